"""From conversations and the target's hidden states to what a drafter reads and must predict.

The one module that knows EAGLE's shift. At position t a drafter reads the embedding of token t+1 and the
hidden state h_t, and predicts h_{t+1}; the head turns that into the distribution of token t+2. So a
position counts in the loss where token t+2 is supervised, and the first two tokens of a conversation
can never be learnt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sfdd.conversations.conversation import TokenizedConversation

_SHIFT = 2


@dataclass(frozen=True)
class DraftBatch:
    """Aligned inputs and targets of a drafter, T-2 positions for padded conversations of T tokens."""

    embeddings: Tensor  # [B, T-2, H], of token t+1
    hidden_states: Tensor  # [B, T-2, H], h_t
    target_states: Tensor  # [B, T-2, H], h_{t+1}
    mask: Tensor  # bool [B, T-2], True where token t+2 is supervised

    def with_noise(self, noise: Tensor) -> "DraftBatch":
        """The same with `noise` [B, T-2, H] on what is read, not on what is to be predicted."""
        return replace(self, hidden_states=self.hidden_states + noise)


def draft_batch(
    input_ids: Tensor,  # [B, T]
    loss_mask: Tensor,  # bool [B, T]
    hidden_states: Tensor,  # [B, T, H], of the target for input_ids
    embedding: nn.Module,
) -> DraftBatch:
    """Align right-padded conversations with the target's hidden states for them."""
    return DraftBatch(
        embeddings=embedding(input_ids[:, 1:-1]),
        hidden_states=hidden_states[:, :-2],
        target_states=hidden_states[:, 1:-1],
        mask=loss_mask[:, _SHIFT:],
    )


def learnable_tokens(conversation: TokenizedConversation) -> int:
    """How many supervised tokens of a conversation count in the loss."""
    return int(conversation.loss_mask[_SHIFT:].sum())


@dataclass(frozen=True)
class PaddedTokens:
    """Some conversations as rectangular tensors, padded on the right."""

    input_ids: Tensor  # [B, T]
    loss_mask: Tensor  # bool [B, T], False on padding
    lengths: Tensor  # [B]


def pad(
    conversations: Sequence[TokenizedConversation], device: torch.device, width: int = 0
) -> PaddedTokens:
    """Pad to the longest of the conversations, or to `width` where that is more.

    Padding is token 0 and is never attended to: attention is causal.
    """
    width = max(width, *map(len, conversations))
    input_ids = torch.zeros(len(conversations), width, dtype=torch.int64)
    loss_mask = torch.zeros(len(conversations), width, dtype=torch.bool)
    for row, conversation in enumerate(conversations):
        input_ids[row, : len(conversation)] = torch.from_numpy(conversation.input_ids)
        loss_mask[row, : len(conversation)] = torch.from_numpy(conversation.loss_mask)
    lengths = torch.tensor([len(conversation) for conversation in conversations])
    return PaddedTokens(input_ids.to(device), loss_mask.to(device), lengths)
