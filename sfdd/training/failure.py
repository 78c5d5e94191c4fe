"""What ends a training that cannot go on as it is: where it came from, and what to say."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite

from sfdd.conversations.conversation import TokenizedConversation
from sfdd.errors import DrafterError
from sfdd.targets.transformers_backend import ran_out_of_memory
from sfdd.training.config import TrainConfig
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
    def among(
        cls, step: Step, sums: Sums, norm: float = 0.0, loss: str = "loss"
    ) -> "NotFinite | None":
        """What there is of it, if anything.

        Args:
            norm: of the gradient, if there is one.
            loss: what to call it.
        """
        if not isfinite(sums.loss):
            number = sums.first_not_finite()
            conversations = step.conversations if number is None else step.micro_batch(number)
            return cls(loss, sums.loss, conversations)
        return None if isfinite(norm) else cls("gradient", norm, step.conversations)

    def message(self, when: str, kept: str, fault: str | None = None) -> str:
        """One sentence for the user.

        Args:
            when: "of step 7".
            kept: where the state before that is; empty for nowhere.
            fault: of the target's states, if it is theirs; see `fault_of_states`.
        """
        where = f"The state before it is kept in {kept}. " if kept else ""
        what = f"Training stopped: the {self.name} {when} is {self.value}"
        if fault:
            return f"{what}, since {fault} {where}Start again with --overwrite."
        few = ", ".join(c.id for c in self.conversations[:_IDS_NAMED])
        more = len(self.conversations) - _IDS_NAMED
        ids = f"{few} and {more} more" if more > 0 else few
        return f"{what}, in the conversations {ids}. {where}{REMEDY}"


@contextmanager
def memory_running_out(config: TrainConfig) -> Iterator[None]:
    """Say in one sentence what to do where memory runs out.

    Raises:
        DrafterError: it did.
    """
    try:
        yield
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DrafterError(
            f"Memory ran out with {config.tokens_at_once} tokens at a time ({reason}). Run the same "
            f"command with --micro-batch-tokens {max(2, config.tokens_at_once // 2)} or less, or with "
            "--gradient-checkpointing: it goes on from the last checkpoint."
        ) from error
