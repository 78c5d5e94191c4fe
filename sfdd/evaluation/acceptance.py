"""Counting what the target accepted."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any


def _ratio(part: float, whole: float) -> float | None:
    """`part / whole`; None where nothing was measured."""
    return part / whole if whole else None


@dataclass(frozen=True)
class AcceptanceStats:
    """How many drafts proposed a token at position i of the chain, and how many had it accepted.

    A draft is one chain of at least one proposed token together with its verification. A token is
    accepted when it is emitted: what follows an accepted end-of-sequence token was proposed, but is
    not accepted.
    """

    proposed_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()

    @classmethod
    def from_counts(cls, proposed: Sequence[int], accepted: Sequence[int]) -> "AcceptanceStats":
        """From the numbers of proposed and accepted tokens of every draft."""
        positions = range(max(proposed, default=0))
        return cls(
            tuple(sum(count > position for count in proposed) for position in positions),
            tuple(sum(count > position for count in accepted) for position in positions),
        )

    def __add__(self, other: "AcceptanceStats") -> "AcceptanceStats":
        return AcceptanceStats(
            _add(self.proposed_by_position, other.proposed_by_position),
            _add(self.accepted_by_position, other.accepted_by_position),
        )

    @property
    def num_drafts(self) -> int:
        return self.proposed_by_position[0] if self.proposed_by_position else 0

    @property
    def num_proposed(self) -> int:
        return sum(self.proposed_by_position)

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_by_position)

    @property
    def mean_accepted(self) -> float | None:
        """The paper's l: accepted draft tokens per verification."""
        return _ratio(self.num_accepted, self.num_drafts)

    @property
    def acceptance_length(self) -> float | None:
        """tau = l + 1: tokens per verification, the target's own included."""
        return _ratio(self.num_accepted + self.num_drafts, self.num_drafts)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / proposed."""
        return _ratio(self.num_accepted, self.num_proposed)

    @property
    def acceptance_rate_by_position(self) -> tuple[float, ...]:
        """Of the drafts that proposed a token at position i, the share that had it accepted."""
        pairs = zip(self.accepted_by_position, self.proposed_by_position, strict=True)
        return tuple(accepted / proposed for accepted, proposed in pairs)

    def to_dict(self) -> dict[str, Any]:
        return {
            "acceptance_length": self.acceptance_length,
            "mean_accepted": self.mean_accepted,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_rate_by_position": list(self.acceptance_rate_by_position),
            "num_drafts": self.num_drafts,
            "num_proposed": self.num_proposed,
            "num_accepted": self.num_accepted,
        }


def _add(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))
