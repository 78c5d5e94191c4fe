"""From conversations to what a forward pass is given: rectangles of tokens, weights and hidden states."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from sfdd.conversations.conversation import TokenizedConversation
from sfdd.targets.transfer import to_device
from sfdd.training.objectives import SHIFT
from sfdd.training.states import States

# The fewest tokens that a draft step can be computed for.
_SHORTEST = SHIFT + 1

Floats: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float32]]
# The loss weight of each token of a conversation: float32 [T], read where the token is supervised.
TokenWeights: TypeAlias = Callable[[TokenizedConversation], Floats]


def equal_weights(conversation: TokenizedConversation) -> Floats:
    """Every token counts as one."""
    return np.ones(len(conversation), np.float32)


@dataclass(frozen=True)
class Batch:
    """Some conversations and the target's view of them, padded on the right, on one device."""

    input_ids: Tensor  # int64 [B, T]
    loss_mask: Tensor  # bool [B, T], False on padding
    weights: Tensor  # float32 [B, T], loss weight of each token, 0 on padding
    hidden_states: Tensor  # [B, T, H], the target's last ones, after its final norm
    aux_states: Tensor | None  # [B, T, A * H], after each of the drafter's aux layers side by side


@dataclass(frozen=True)
class PaddedTokens:
    """Some conversations as rectangular tensors, padded on the right."""

    input_ids: Tensor  # int64 [B, T]
    loss_mask: Tensor  # bool [B, T], False on padding
    weights: Tensor  # float32 [B, T], 0 on padding


def learnable_tokens(conversation: TokenizedConversation) -> int:
    """How many supervised tokens of a conversation count in the loss."""
    return int(conversation.loss_mask[SHIFT:].sum())


def loss_weight(conversation: TokenizedConversation, weights: TokenWeights) -> float:
    """What a conversation adds to the weight by which the sum of losses is divided."""
    learnt = weights(conversation)[SHIFT:][conversation.loss_mask[SHIFT:]]
    return float(learnt.sum(dtype=np.float64))


def pad(
    conversations: Sequence[TokenizedConversation],
    weights: TokenWeights = equal_weights,
    width: int = _SHORTEST,
) -> PaddedTokens:
    """Pad to the longest of the conversations, or to `width` where that is more.

    Padding is token 0 and is never attended to: attention is causal. No conversations at all make one row
    of padding, which weighs nothing: a process with nothing to do must still take part in the step.
    """
    width = max([width, *map(len, conversations)])
    rows = max(1, len(conversations))
    input_ids = torch.zeros(rows, width, dtype=torch.int64)
    loss_mask = torch.zeros(rows, width, dtype=torch.bool)
    of_tokens = torch.zeros(rows, width)
    for row, conversation in enumerate(conversations):
        tokens = slice(len(conversation))
        input_ids[row, tokens] = torch.from_numpy(conversation.input_ids)
        loss_mask[row, tokens] = torch.from_numpy(conversation.loss_mask)
        of_tokens[row, tokens] = torch.from_numpy(weights(conversation))
    return PaddedTokens(input_ids, loss_mask, of_tokens)


def make_batch(
    conversations: Sequence[TokenizedConversation],
    weights: TokenWeights,
    states: States,
    device: torch.device,
) -> Batch:
    """What the drafter is trained on, or measured on, in one forward pass."""
    tokens = pad(conversations, weights)
    input_ids = to_device(tokens.input_ids, device)
    hidden, aux = states.read(conversations, input_ids)
    loss_mask, of_tokens = (to_device(x, device) for x in (tokens.loss_mask, tokens.weights))
    return Batch(input_ids, loss_mask, of_tokens, hidden, aux)
