"""Attention of a drafter, when it drafts and when it is trained as it drafts (training-time test).

A drafter of base position i drafts step by step. Step 0 stands where the target's own states end, and
sees step 0 of every position up to i. Step j stands at position i + j and sees, besides those, its own
steps 1 to j: what is in its KV cache when it drafts. Trained at all base positions at once, that is

    keys of step 0: causal; keys of each later step: one for each query, its own

so a step costs O(T) more than plain attention, and nothing of [T, (j + 1) T] is made. Gradients
recompute the scores, a block of rows at a time, rather than keep them.
"""

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

KeysAndValues: TypeAlias = tuple[Tensor, Tensor]  # [B, K, T, D] each, of K key heads

IMPLEMENTATION = "sfdd_draft_steps"
_ROWS = 256  # queries whose scores are at hand at once


def attend(
    module: nn.Module,
    query: Tensor,  # [B, N, T, D]
    key: Tensor,  # [B, K, T, D]
    value: Tensor,  # [B, K, T, D]
    attention_mask: Tensor | None,
    scaling: float,
    steps: list[KeysAndValues] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # [B, T, N, D]
    """An attention function as transformers calls it: its own SDPA, except where `steps` is given.

    Args:
        steps: keys and values of the draft steps so far, the first T rows of which are those of this
            step's base positions. Those of this step are appended.
    """
    if steps is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    steps.append((key, value))
    if len(steps) == 1:
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling)
    width = query.shape[2]
    first_key, first_value = (x[:, :, :width] for x in steps[0])
    own_keys, own_values = (
        torch.stack([step[part][:, :, :width] for step in steps[1:]], dim=3) for part in (0, 1)
    )  # [B, K, T, j, D]
    blocks = []
    for start in range(0, width, _ROWS):
        end = min(start + _ROWS, width)
        rows = slice(start, end)
        blocks.append(
            checkpoint(
                _attend_rows,
                query[:, :, rows] * scaling,
                first_key[:, :, :end],
                first_value[:, :, :end],
                own_keys[:, :, rows],
                own_values[:, :, rows],
                use_reentrant=False,
                preserve_rng_state=False,
            )
        )
    return torch.cat(blocks, dim=2).transpose(1, 2), None


def _attend_rows(
    query: Tensor,  # [B, N, R, D], scaled; the last R of the E positions
    first_key: Tensor,  # [B, K, E, D], of step 0
    first_value: Tensor,  # [B, K, E, D]
    own_key: Tensor,  # [B, K, R, j, D], of each row's own steps
    own_value: Tensor,  # [B, K, R, j, D]
) -> Tensor:  # [B, N, R, D]
    batch, heads, rows, size = query.shape
    key_heads, end = first_key.shape[1:3]
    grouped = query.view(batch, key_heads, -1, rows, size)  # [B, K, N/K, R, D]
    flat = grouped.flatten(2, 3)  # [B, K, N/K * R, D]: one product for all heads that share keys
    causal = (flat @ first_key.transpose(-1, -2)).view(batch, key_heads, -1, rows, end)
    hidden = torch.ones(rows, end, dtype=torch.bool, device=query.device).triu(end - rows + 1)
    causal = causal.masked_fill(hidden, -torch.inf)
    own = torch.einsum("bkgrd,bkrjd->bkgrj", grouped, own_key)
    scores = torch.cat([causal, own], dim=-1)  # [B, K, N/K, R, E + j]
    weights = F.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    weights = weights.to(query.dtype)
    attended = (weights[..., :end].flatten(2, 3) @ first_value).view_as(grouped)
    attended = attended + torch.einsum("bkgrj,bkrjd->bkgrd", weights[..., end:], own_value)
    return attended.view(batch, heads, rows, size)


AttentionInterface.register(IMPLEMENTATION, attend)
AttentionMaskInterface.register(IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
