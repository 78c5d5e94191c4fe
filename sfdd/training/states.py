"""The target's hidden states of some conversations: computed as they are needed, or read from a cache.

Both sources round to the same dtype, so a drafter learns the same from either.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sfdd.conversations.conversation import TokenizedConversation
from sfdd.targets.transformers_target import TransformersTarget


class States(Protocol):
    """A source of hidden states."""

    def read(
        self, conversations: Sequence[TokenizedConversation], input_ids: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The last hidden states [B, T, H], and those of the aux layers [B, T, A * H] if there are any.

        Args:
            input_ids: int64 [B, T], the conversations padded on the right, on the target's device, or one
                row of padding for none at all. States of padding may be anything finite.
        """

    def expect(self, coming: Sequence[Sequence[TokenizedConversation]]) -> None:
        """What will be read next, so that it can be fetched in the meantime."""


class OnlineStates:
    """The target's forward pass in the loop, without autograd."""

    def __init__(
        self, target: TransformersTarget, aux_layers: Sequence[int], dtype: torch.dtype
    ) -> None:
        target.require_independent_states()
        self._target, self._aux_layers, self._dtype = target, tuple(aux_layers), dtype

    def read(
        self, conversations: Sequence[TokenizedConversation], input_ids: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """See `States`."""
        if not self._target.rope_goes_by_length or len(conversations) < 2:
            return self._forward(input_ids)
        each = [
            self._forward(ids[None, : len(conversation)])
            for ids, conversation in zip(input_ids, conversations, strict=True)
        ]
        hidden = pad_sequence([last[0] for last, _ in each], batch_first=True)
        aux = [of_one[0] for _, of_one in each if of_one is not None]
        return hidden, pad_sequence(aux, batch_first=True) if aux else None

    def _forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        # Not inference_mode: autograd keeps these tensors for the backward pass.
        with torch.no_grad():
            hidden, aux = self._target.hidden_and_aux_states(input_ids, aux_layers=self._aux_layers)
        return hidden.to(self._dtype), None if aux is None else aux.to(self._dtype)

    def expect(self, coming: Sequence[Sequence[TokenizedConversation]]) -> None:
        """Nothing: the target's device is busy with the step before."""


def states_dtype(name: str, target: TransformersTarget) -> torch.dtype:
    """What hidden states are rounded to, for the setting of that name."""
    if name != "auto":
        return getattr(torch, name)
    own = target.model.dtype
    return own if own.itemsize == 2 else torch.float16


def fault_of_states(
    target: TransformersTarget,
    conversation: TokenizedConversation,
    aux_layers: Sequence[int],
    dtype: torch.dtype,
) -> str | None:
    """Why the hidden states of a conversation are not finite, and the remedy; None where they are."""
    input_ids = torch.from_numpy(conversation.input_ids).long()[None].to(target.device)
    with torch.no_grad():
        hidden, aux = target.hidden_and_aux_states(input_ids, aux_layers=aux_layers)
    states = hidden if aux is None else torch.cat([hidden, aux], dim=-1)  # [1, T, (1 + A) * H]
    if not bool(states.isfinite().all()):
        return (
            f"the target's hidden states for conversation {conversation.id} are not finite. Remove the "
            "conversation, or give another --dtype for the target."
        )
    if not bool(states.to(dtype).isfinite().all()):
        return (
            f"the target's hidden states for conversation {conversation.id} reach "
            f"{states.abs().max().item():.3g}, more than {str(dtype).removeprefix('torch.')} can hold. "
            "Give --states-dtype bfloat16."
        )
    return None
