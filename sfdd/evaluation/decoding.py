"""Draft-verify decoding and its baseline, over the same target and with KV caches on both sides."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sfdd.evaluation.acceptance import AcceptanceStats
from sfdd.evaluation.proposing import Proposer
from sfdd.evaluation.verification import Sampling, verify
from sfdd.targets.body import forget, new_cache

if TYPE_CHECKING:
    from transformers import Cache

    from sfdd.targets.transformers_target import TransformersTarget


@dataclass(frozen=True)
class Limits:
    """When a response ends: with a token of `stop_ids`, which is emitted, or at its last token."""

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()

    def room(self, tokens: list[int]) -> int:
        """How many tokens may still follow `tokens`."""
        return 0 if tokens[-1] in self.stop_ids else self.max_new_tokens - len(tokens)

    def cut(self, tokens: list[int]) -> list[int]:
        """`tokens` up to and including the first that ends the response."""
        ends = (i + 1 for i, token in enumerate(tokens) if token in self.stop_ids)
        return tokens[: next(ends, len(tokens))]


@dataclass(frozen=True)
class Decoding:
    """A response, and how many tokens each draft proposed and had accepted.

    Every response starts with a token of the target, chosen when the prompt was read. Every draft
    then adds its accepted tokens and one of the target, except that an accepted token of `stop_ids`
    is the last one: what was drafted behind it counts as proposed, not as accepted, and the target
    adds nothing. A draft proposes at most one token fewer than may still be emitted; where only one
    may, the target decodes it without a draft.
    """

    tokens: tuple[int, ...]
    proposed: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    @property
    def acceptance(self) -> AcceptanceStats:
        return AcceptanceStats.from_counts(self.proposed, self.accepted)


def stop_token_ids(target: "TransformersTarget") -> frozenset[int]:
    """The tokens that end a response: the generation config's, else the tokenizer's."""
    generation = getattr(target.model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = target.tokenizer.eos_token_id
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)


@torch.inference_mode()
def autoregressive_decode(
    target: "TransformersTarget",
    prompt_ids: Tensor,  # [P]
    limits: Limits,
    sampling: Sampling,
) -> Decoding:
    """One forward pass of the target per token."""
    cache = new_cache()
    token, _ = _advance(target, prompt_ids, cache, sampling)  # [1]
    tokens = token.tolist()
    while limits.room(tokens):
        token, _ = _advance(target, token, cache, sampling)
        tokens += token.tolist()
    return Decoding(tuple(tokens))


@torch.inference_mode()
def speculative_decode(
    target: "TransformersTarget",
    proposer: Proposer,
    prompt_ids: Tensor,  # [P]
    limits: Limits,
    sampling: Sampling,
    num_speculative_tokens: int = 5,
) -> Decoding:
    """One forward pass of the target per draft of `num_speculative_tokens` tokens.

    The response is distributed as that of `autoregressive_decode`; at temperature 0 it is equal,
    unless two logits are so close that the order of floating-point sums decides between them.
    """
    cache, layers = new_cache(), proposer.aux_layers
    token, states = _advance(target, prompt_ids, cache, sampling, layers)  # [1], [P, H]
    certain = torch.cat([prompt_ids[1:], token])  # [P]
    tokens, proposed, accepted = token.tolist(), [], []
    proposer.begin(sampling)
    while (room := limits.room(tokens)) > 1:
        draft = proposer.propose(certain, states, min(num_speculative_tokens, room - 1))  # k tokens
        chain = torch.cat([certain[-1:], draft.tokens])  # [k + 1]
        hidden, states = _read(target, chain, cache, layers)  # [k + 1, H] each
        certain = verify(draft, target.logits(hidden), sampling)  # [a + 1]
        states = states[: len(certain)]  # [a + 1, H]
        forget(cache, len(chain) - len(certain))

        emitted = limits.cut(certain.tolist())
        tokens += emitted
        proposed.append(len(draft.tokens))
        accepted.append(min(len(emitted), len(certain) - 1))
    if room:
        token, _ = _advance(target, certain[-1:], cache, sampling)
        tokens += token.tolist()
    return Decoding(tuple(tokens), tuple(proposed), tuple(accepted))


def _advance(
    target: "TransformersTarget",
    ids: Tensor,  # [T]
    cache: "Cache",
    sampling: Sampling,
    aux_layers: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:  # [1], [T, H]
    """Read some tokens; the one that follows, and the states of `_read`. Only one row has logits."""
    hidden, states = _read(target, ids, cache, aux_layers)
    token, _ = sampling.draw(target.logits(hidden[-1:]))
    return token, states


def _read(
    target: "TransformersTarget", ids: Tensor, cache: "Cache", aux_layers: tuple[int, ...]
) -> tuple[Tensor, Tensor]:  # [T] -> [T, H], [T, H or A * H]
    """Hidden states of some tokens: those that the target's head reads, and those a proposer reads."""
    hidden, aux = target.hidden_and_aux_states(ids[None], cache=cache, aux_layers=aux_layers)
    return hidden[0], hidden[0] if aux is None else aux[0]
