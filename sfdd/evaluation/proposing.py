"""Where draft tokens come from."""

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from sfdd.drafters.drafter import Drafter
from sfdd.drafters.layer import token_embeddings
from sfdd.evaluation.verification import Draft, Sampling
from sfdd.targets.body import forget, new_cache

if TYPE_CHECKING:
    from sfdd.targets.transformers_target import TransformersTarget


class Proposer(Protocol):
    """Proposes what comes next, one conversation after another."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's layers whose hidden states it reads; none: it reads the last ones."""

    def begin(self, sampling: Sampling) -> None:
        """Forget everything; the draft tokens of the new conversation are chosen by `sampling`."""

    def propose(self, tokens: Tensor, states: Tensor, count: int) -> Draft:
        """A chain of up to `count` (at least 1) tokens that follow `tokens`.

        Args:
            tokens: [N], those that became certain since the last call: accepted draft tokens and
                the target's own. The first time, the prompt without its first token, and the first
                token of the response.
            states: of the target at the position before each of them, from which it predicted them:
                [N, H], its last hidden states, or [N, A * H], those of the `aux_layers`.
        """


class EagleProposer:
    """A chain drafted by an EAGLE or EAGLE-3 drafter, with a KV cache.

    The cache holds the positions computed from the target's hidden states and, behind them, those
    of the last chain, computed from the drafter's own states. When the target has spoken these
    are dropped, and what it accepted is read again with its true hidden states.
    """

    def __init__(self, drafter: Drafter, target: "TransformersTarget") -> None:
        self._drafter = drafter
        self._target = target
        self.begin(Sampling())

    def begin(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._cache = new_cache()
        self._num_guessed = 0

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self._drafter.aux_layers

    def propose(self, tokens: Tensor, states: Tensor, count: int) -> Draft:
        forget(self._cache, self._num_guessed)
        state = self._step(tokens, self._drafter.fuse(states[None]))  # [1, 1, H]
        drawn = [self._draw(state)]  # ([1], [1, V])
        for _ in range(count - 1):
            token, _ = drawn[-1]
            state = self._step(token, state)
            drawn.append(self._draw(state))
        self._num_guessed = count - 1
        probabilities = [row for _, row in drawn if row is not None]
        return Draft(
            torch.cat([token for token, _ in drawn]),
            torch.cat(probabilities) if probabilities else None,
        )

    def _step(self, tokens: Tensor, states: Tensor) -> Tensor:  # [N], [1, N, H] -> [1, 1, H]
        """The drafter's state at the last of `tokens`."""
        embeddings = token_embeddings(self._target.embedding, tokens)  # [N, H]
        return self._drafter(embeddings[None], states, cache=self._cache)[:, -1:]

    def _draw(self, state: Tensor) -> tuple[Tensor, Tensor | None]:  # [1, 1, H] -> [1], [1, V]
        """A token, by the target's ids, and the distribution over all of them that it was drawn from."""
        head = self._drafter.head(self._target)
        token, probabilities = self._sampling.draw(head(self._drafter.normed(state[0])))
        chosen = self._drafter.draft_to_target
        if chosen is None:
            return token, probabilities
        if probabilities is not None:  # what cannot be drafted has probability 0
            everything = probabilities.new_zeros(1, self._target.vocab_size)
            probabilities = everything.index_copy_(1, chosen, probabilities)
        return chosen[token], probabilities
