"""A loss or gradient that is not finite: where it came from, and what to say."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from sfdd.conversations.conversation import TokenizedConversation
from sfdd.training.module import Sums
from sfdd.training.steps import Step

REMEDY = (
    "Lower --learning-rate, use --dtype float32, or remove the conversations, and start again with "
    "--overwrite."
)
_IDS_NAMED = 8


@dataclass(frozen=True)
class NotFinite:
    """What is not finite in a step, and the conversations that were computed together there."""

    name: str
    value: float
    conversations: Sequence[TokenizedConversation]

    @classmethod
    def among(cls, step: Step, sums: Sums, norm: float) -> "NotFinite | None":
        """What there is of it, if anything."""
        if not isfinite(sums.loss):
            number = sums.first_not_finite()
            conversations = step.conversations if number is None else step.micro_batch(number)
            return cls("loss", sums.loss, conversations)
        return None if isfinite(norm) else cls("gradient", norm, step.conversations)

    def message(self, step: int, kept: str) -> str:
        """One sentence for the user.

        Args:
            kept: where the state before the step is; empty for nowhere.
        """
        few = ", ".join(c.id for c in self.conversations[:_IDS_NAMED])
        more = len(self.conversations) - _IDS_NAMED
        ids = f"{few} and {more} more" if more > 0 else few
        where = f"The state before it is kept in {kept}. " if kept else ""
        return (
            f"Training stopped: the {self.name} of step {step} is {self.value}, in the conversations "
            f"{ids}. {where}{REMEDY}"
        )
