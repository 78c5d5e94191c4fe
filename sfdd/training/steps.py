"""The conversations of each step, dealt to processes and micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from sfdd.conversations.conversation import TokenizedConversation
from sfdd.training.batches import TokenWeights, learnable_tokens, loss_weight
from sfdd.training.schedule import BatchPlan, deal


@dataclass(frozen=True)
class Step:
    """Conversations that are summed up together.

    Attributes:
        dealt: for each process and each of its micro-batches, indices into the conversations.
        weight: what the sum of losses is divided by: the weights of all tokens that are learnt.
    """

    conversations: Sequence[TokenizedConversation]
    dealt: Sequence[Sequence[Sequence[int]]]
    weight: float

    @classmethod
    def of(
        cls,
        conversations: Sequence[TokenizedConversation],
        weights: TokenWeights,
        ranks: int,
        micro_batch_tokens: int,
    ) -> "Step":
        return cls(
            conversations,
            deal([len(c) for c in conversations], ranks, micro_batch_tokens),
            sum(loss_weight(c, weights) for c in conversations),
        )

    @property
    def tokens(self) -> int:
        """Padding excluded."""
        return sum(map(len, self.conversations))

    @property
    def supervised_tokens(self) -> int:
        """Those that are learnt."""
        return sum(map(learnable_tokens, self.conversations))

    def at(self, places: Sequence[int]) -> list[TokenizedConversation]:
        """The conversations of a micro-batch."""
        return [self.conversations[place] for place in places]

    def micro_batches(self, rank: int) -> list[list[TokenizedConversation]]:
        """Those of a process."""
        return [self.at(places) for places in self.dealt[rank]]

    def micro_batch(self, number: int) -> list[TokenizedConversation]:
        """The `number`-th of all: those of the processes in turn."""
        turn, rank = divmod(number, len(self.dealt))
        return self.at(self.dealt[rank][turn])


class Steps:
    """The steps of a plan, by their 0-based number."""

    def __init__(
        self,
        plan: BatchPlan,
        conversations: Sequence[TokenizedConversation],
        weights: TokenWeights,
        ranks: int,
        micro_batch_tokens: int,
    ) -> None:
        self._plan, self._conversations, self._weights = plan, conversations, weights
        self._ranks, self._micro_batch_tokens = ranks, micro_batch_tokens
        self._step = lru_cache(maxsize=2)(self._make)  # this one and the next

    def __len__(self) -> int:
        return self._plan.total_steps

    def __getitem__(self, number: int) -> Step:
        return self._step(number)

    def _make(self, number: int) -> Step:
        conversations = [self._conversations[i] for i in self._plan.batch(number)]
        return Step.of(conversations, self._weights, self._ranks, self._micro_batch_tokens)
