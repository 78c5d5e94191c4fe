"""Where draft tokens come from."""

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from sfdd.drafters.eagle import EagleDrafter
from sfdd.evaluation.verification import Draft, Sampling
from sfdd.targets.body import forget, new_cache

if TYPE_CHECKING:
    from sfdd.targets.transformers_target import TransformersTarget


class Proposer(Protocol):
    """Proposes what comes next, one conversation after another."""

    def begin(self, sampling: Sampling) -> None:
        """Forget everything; the draft tokens of the new conversation are chosen by `sampling`."""

    def propose(self, tokens: Tensor, hidden_states: Tensor, count: int) -> Draft:
        """A chain of up to `count` (at least 1) tokens that follow `tokens`.

        Args:
            tokens: [N], those that became certain since the last call: accepted draft tokens and
                the target's own. The first time, the prompt without its first token, and the first
                token of the response.
            hidden_states: [N, H], of the target at the position before each of them: those from
                which it predicted them.
        """


class EagleProposer:
    """A chain drafted by an EAGLE drafter, with a KV cache.

    The cache holds the positions computed from the target's hidden states and, behind them, those
    of the last chain, computed from the drafter's own predictions. When the target has spoken these
    are dropped, and what it accepted is read again with its true hidden states.
    """

    def __init__(self, drafter: EagleDrafter, target: "TransformersTarget") -> None:
        self._drafter = drafter
        self._target = target
        self.begin(Sampling())

    def begin(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._cache = new_cache()
        self._num_guessed = 0

    def propose(self, tokens: Tensor, hidden_states: Tensor, count: int) -> Draft:
        forget(self._cache, self._num_guessed)
        predicted = self._predict(tokens, hidden_states)  # [1, H]
        drawn = [self._sampling.draw(self._target.logits(predicted))]  # ([1], [1, V])
        for _ in range(count - 1):
            token, _ = drawn[-1]
            predicted = self._predict(token, predicted)
            drawn.append(self._sampling.draw(self._target.logits(predicted)))
        self._num_guessed = count - 1
        probabilities = [row for _, row in drawn if row is not None]
        return Draft(
            torch.cat([token for token, _ in drawn]),
            torch.cat(probabilities) if probabilities else None,
        )

    def _predict(self, tokens: Tensor, hidden_states: Tensor) -> Tensor:  # [N], [N, H] -> [1, H]
        """The hidden state predicted for the last of `tokens`."""
        embeddings = self._target.embedding(tokens)  # [N, H]
        predicted: Tensor = self._drafter(
            embeddings[None], hidden_states[None], cache=self._cache
        )  # [1, N, H]
        return predicted[0, -1:]
