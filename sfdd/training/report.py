"""What a training run found, as the command prints it and the drafter's provenance keeps it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# The first and the last training loss are means over this part of the steps at each end.
_END_FRACTION = 0.1


@dataclass(frozen=True)
class HeldOutScores:
    """Means over the supervised tokens of the held-out conversations.

    Attributes:
        loss: the weighted sum that training minimises, without noise.
        hidden_loss: SmoothL1 between predicted and target hidden states.
        token_loss: cross-entropy in nats against the target's distribution.
        top1_agreement: fraction of tokens whose likeliest guess is the target's own.
    """

    loss: float
    hidden_loss: float
    token_loss: float
    top1_agreement: float


@dataclass(frozen=True)
class TrainReport:
    """A finished training run.

    Attributes:
        conversations: trained on; `held_out_conversations` come on top.
        tokens: read over all epochs, padding excluded.
        supervised_tokens: those of `tokens` that counted in the loss.
        first_loss, last_loss: training loss per supervised token over the first and the last tenth of
            the steps, at least one.
        held_out_before, held_out_after: None where nothing was held out.
        seconds: steps and held-out measurements, over every process that worked on the run.
        skipped: records that could not be used, by reason.
        truncated: conversations cut at the maximum length.
        already_finished: an earlier process had finished it; nothing was trained now.
    """

    drafter: Path
    steps: int
    epochs: int
    conversations: int
    held_out_conversations: int
    tokens: int
    supervised_tokens: int
    first_loss: float
    last_loss: float
    held_out_before: HeldOutScores | None
    held_out_after: HeldOutScores | None
    seconds: float
    tokens_per_second: float
    skipped: Mapping[str, int] = field(default_factory=dict)
    truncated: int = 0
    already_finished: bool = False

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self) | {"drafter": str(self.drafter)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], drafter: Path) -> "TrainReport":
        """A finished run's report, read back from the directory `drafter`."""
        measured = {
            name: HeldOutScores(**value[name]) if value[name] else None
            for name in ("held_out_before", "held_out_after")
        }
        return cls(**{**value, **measured, "drafter": drafter, "already_finished": True})


def loss_at_ends(steps: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """`first_loss` and `last_loss` of the log's step lines."""
    count = max(1, round(_END_FRACTION * len(steps)))
    return _mean_loss(steps[:count]), _mean_loss(steps[-count:])


def _mean_loss(steps: Sequence[Mapping[str, Any]]) -> float:
    total = sum(line["loss"] * line["supervised_tokens"] for line in steps)
    return float(total / sum(line["supervised_tokens"] for line in steps))
