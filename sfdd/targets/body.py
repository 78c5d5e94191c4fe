"""Calling the body of a transformers model, with or without a KV cache, across transformers versions."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.modeling_outputs import MoeModelOutputWithPast

from sfdd.errors import TargetError


class ReturnStates(nn.Module):
    """Stands in for the body of a model whose hidden states are known already."""

    def forward(
        self, input_ids: None = None, *_: Any, inputs_embeds: Tensor, **__: Any
    ) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


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
    position_ids: Tensor | None = None,  # [B, T]; None: counted from what is attended to
    cache: Cache | None = None,
    **attention: Any,
) -> Tensor:
    """Last hidden states [B, T, H]; with a `cache`, the input continues what it holds.

    No mask is needed for right-padded input: attention is causal, so what follows a sequence cannot
    reach it. Further arguments reach the attention function as they are.
    """
    if attention_mask is not None and position_ids is None:
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
        **attention,
    ).last_hidden_state


def _decoder_layers(body: nn.Module) -> nn.ModuleList | None:
    """The layers that a text model's hidden states go through in turn; None where it has no such list."""
    decoder = getattr(body, "get_decoder", lambda: body)()
    lists = (getattr(decoder, name, None) for name in ("layers", "h"))
    return next((layers for layers in lists if isinstance(layers, nn.ModuleList)), None)


@contextmanager
def recorded_layers(body: nn.Module, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Within it, a forward pass leaves the residual stream after layer i (1 is the first) under i.

    The stream after the last layer is before the final norm, unlike the last of transformers' own
    `hidden_states`. Only the layers asked for are kept: [B, T, H] each.

    Raises:
        TargetError: the model is not a list of layers, has no such layer, or its layers pass on
            something else.
    """
    layers = _decoder_layers(body)
    if layers is None or not all(1 <= i <= len(layers) for i in layer_ids):
        raise TargetError(
            f"The hidden states of layers {', '.join(map(str, layer_ids))} were asked for, but "
            f"{type(body).__name__} has {len(layers) if layers else 'no list of'} layers."
        )
    states: dict[int, Tensor] = {}

    def keep(layer_id: int, output: Any) -> None:
        stream = output[0] if isinstance(output, tuple) else output  # [B, T, H]
        if stream.ndim != 3:
            raise TargetError(
                f"The layers of {type(body).__name__} pass on more than one stream of hidden states, "
                "which EAGLE-3 cannot read. Train with --method eagle."
            )
        states[layer_id] = stream

    handles = [
        layers[i - 1].register_forward_hook(lambda _, __, output, i=i: keep(i, output))
        for i in layer_ids
    ]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()
