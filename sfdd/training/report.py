"""What a training run found, as the command prints it and the drafter's provenance keeps it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# The first and the last training loss are means over this part of the steps at each end.
_END_FRACTION = 0.1
_MEASURED = ("held_out_before", "held_out_after")


@dataclass(frozen=True)
class HeldOutScores:
    """What the held-out conversations say of a drafter.

    Attributes:
        loss: what training minimises, without noise, per supervised token (times its weight).
        losses: what it is made of, by name: `hidden_loss` and `token_loss` of EAGLE, `step_0_loss` … of
            EAGLE-3.
        agreement: of the first so many drafts from a position, how often all are the target's own
            choice. [S]
        acceptance_length: estimated tau of greedy drafts of S tokens: 1 + the sum of `agreement`.
    """

    loss: float
    losses: Mapping[str, float]
    agreement: tuple[float, ...]
    acceptance_length: float

    @property
    def top1_agreement(self) -> float:
        """How often the likeliest first draft is the target's own choice."""
        return self.agreement[0]

    def to_json(self) -> dict[str, Any]:
        """As JSON values, the losses beside the others."""
        return {
            "loss": self.loss,
            **self.losses,
            "top1_agreement": self.top1_agreement,
            "agreement": list(self.agreement),
            "acceptance_length": self.acceptance_length,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "HeldOutScores":
        """Inverse of `to_json`, whatever else stands there."""
        losses = {name: loss for name, loss in value.items() if name.endswith("_loss")}
        return cls(value["loss"], losses, tuple(value["agreement"]), value["acceptance_length"])


@dataclass(frozen=True)
class TrainReport:
    """A training run, finished or stopped when its time was up.

    Attributes:
        steps: done, of `total_steps`.
        conversations: trained on; `held_out_conversations` come on top.
        tokens: read over all epochs, padding excluded.
        supervised_tokens: those of `tokens` that counted in the loss.
        first_loss, last_loss: training loss per supervised token over the first and the last tenth of
            the steps, at least one.
        held_out_before, held_out_after: None where nothing was held out, or not measured yet.
        draft_vocab_size: tokens that the drafter can draft; None for the target's.
        best_step: the step whose checkpoint is kept besides, since its estimated acceptance length was
            higher than at the end; None where it was not.
        seconds: steps and held-out measurements, over every process that worked on the run.
        skipped: records that could not be used, by reason.
        truncated: conversations cut at the maximum length.
        already_finished: an earlier process had finished it; nothing was trained now.
    """

    drafter: Path
    method: str
    steps: int
    total_steps: int
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
    draft_vocab_size: int | None = None
    best_step: int | None = None
    skipped: Mapping[str, int] = field(default_factory=dict)
    truncated: int = 0
    already_finished: bool = False

    @property
    def is_finished(self) -> bool:
        """Whether no step is left."""
        return self.steps == self.total_steps

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        measured = {
            name: scores.to_json() if (scores := getattr(self, name)) else None
            for name in _MEASURED
        }
        return asdict(self) | {"drafter": str(self.drafter)} | measured

    @classmethod
    def from_json(cls, value: Mapping[str, Any], drafter: Path) -> "TrainReport":
        """A finished run's report, read back from the directory `drafter`."""
        measured = {
            name: HeldOutScores.from_json(value[name]) if value[name] else None
            for name in _MEASURED
        }
        return cls(**{**value, **measured, "drafter": drafter, "already_finished": True})


def loss_at_ends(steps: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """`first_loss` and `last_loss` of the log's step lines."""
    count = max(1, round(_END_FRACTION * len(steps)))
    return _mean_loss(steps[:count]), _mean_loss(steps[-count:])


def _mean_loss(steps: Sequence[Mapping[str, Any]]) -> float:
    total = sum(line["loss"] * line["supervised_tokens"] for line in steps)
    return float(total / sum(line["supervised_tokens"] for line in steps))
