"""Calling the body of a transformers model, with or without a KV cache, across transformers versions."""

import inspect

from torch import Tensor, nn
from transformers import Cache, DynamicCache

from sfdd.errors import TargetError


def new_cache() -> Cache:
    """An empty KV cache that keeps every position, so that rejected tokens can be taken back."""
    return DynamicCache()


def forget(cache: Cache, count: int) -> None:
    """Remove the last `count` positions.

    Raises:
        TargetError: the model keeps a state that cannot be taken back, as linear attention does.
    """
    try:
        if count:
            cache.crop(-count)
    except (AttributeError, IndexError, RuntimeError, ValueError, NotImplementedError) as error:
        raise TargetError(
            f"This target's cache cannot take back rejected tokens ({error}), which draft-verify "
            "decoding needs. Only targets with attention in every layer can be evaluated."
        ) from error


def run_body(
    body: nn.Module,
    *,
    input_ids: Tensor | None = None,  # [B, T]
    inputs_embeds: Tensor | None = None,  # [B, T, H]
    attention_mask: Tensor | None = None,  # [B, T], 1 = token
    cache: Cache | None = None,
) -> Tensor:
    """Last hidden states [B, T, H]; with a `cache`, the input continues what it holds.

    No mask is needed for right-padded input: attention is causal, so what follows a sequence cannot
    reach it.
    """
    position_ids = None
    if attention_mask is not None:
        position_ids = (attention_mask.cumsum(-1) - 1).clamp_(min=0)
    # Renamed in transformers 5.24; older and custom model code knows only the former name.
    cache_argument = (
        "cache" if "cache" in inspect.signature(body.forward).parameters else "past_key_values"
    )
    return body(
        **({"inputs_embeds": inputs_embeds} if input_ids is None else {"input_ids": input_ids}),
        attention_mask=attention_mask,
        position_ids=position_ids,
        use_cache=cache is not None,
        **{cache_argument: cache},
    ).last_hidden_state
