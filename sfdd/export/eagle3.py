"""What an engine would mistake in the parts that EAGLE-3 alone has: draft vocabulary and aux layers."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sfdd.export.layouts import (
    AUX_LAYERS,
    ONLY_NESTED,
    Sizes,
    aux_layers,
    export_again,
    mapping,
    nested_aux_layers,
)


def vocabulary_findings(
    d2t: Tensor | None,  # int64 [D]
    t2d: Tensor | None,  # bool [V]
    sizes: Sizes,
) -> Iterator[str]:
    """What is wrong with the tokens that the maps name; maps of another length are left to others."""
    if d2t is None or d2t.shape != (sizes.draft_vocabulary,) or d2t.is_floating_point():
        return
    chosen = d2t.long() + torch.arange(len(d2t))  # [D]
    outside = (chosen < 0) | (chosen >= sizes.vocabulary)  # [D]
    if _marked(d2t, t2d) and not _marked(chosen, t2d):
        yield (
            "d2t holds the target's token ids, and engines add the draft token's own id to what it "
            "holds: subtract 0, 1, 2 … from them."
        )
    elif bool(outside.any()):
        wrong = int(outside.nonzero()[0, 0])
        yield (
            f"d2t maps draft token {wrong} to {int(chosen[wrong])}, outside the target's vocabulary of "
            f"{sizes.vocabulary}: does it hold ids, not what is to be added to get them?"
        )
    elif bool((chosen.diff() <= 0).any()):
        wrong = int((chosen.diff() <= 0).nonzero()[0, 0]) + 1
        yield (
            f"d2t maps draft token {wrong} to {int(chosen[wrong])}, not above the "
            f"{int(chosen[wrong - 1])} before it, but sfdd's are in the order of the target's."
        )
    elif t2d is not None and t2d.shape == (sizes.vocabulary,) and not _marked(chosen, t2d):
        yield "d2t and t2d name different tokens, so one of them is another drafter's."


def _marked(ids: Tensor, t2d: Tensor | None) -> bool:
    """Whether some token ids are those that `t2d` marks, in ascending order."""
    return t2d is not None and torch.equal(t2d.bool().nonzero()[:, 0], ids.long())


def aux_layer_findings(config: Mapping[str, Any], engine: str, layers: int | None) -> Iterator[str]:
    """Where an engine would hand the drafter other layers of the target than it was trained on.

    Args:
        layers: how many the target has; None where that is not known.
    """
    ids, nested = aux_layers(config), mapping(config, "eagle_config")
    if nested.get("use_aux_hidden_state") is False:
        yield "config.json has use_aux_hidden_state false, so the drafter would be given no layers."
    if not ids and nested_aux_layers(config):
        yield ONLY_NESTED
        return
    if not ids:
        yield f"config.json names no aux layers ({AUX_LAYERS}), so every engine takes its own."
        return
    if list(ids) != sorted(set(ids)) or ids[0] < 1:
        yield f"config.json names aux layers {list(ids)}, but sfdd's are distinct, ascending, from 1."
    fused = config.get("num_aux_hidden_states")
    if fused not in (None, len(ids)):
        yield f"config.json has num_aux_hidden_states {fused}, but names {len(ids)} aux layers."
    inner = nested.get(AUX_LAYERS)
    if engine == "vllm" and inner and len(inner) != len(ids):
        yield f"eagle_config names {len(inner)} aux layers, by which vLLM makes fc, not {len(ids)}."
    counted = [i - 1 for i in ids]
    if engine == "sglang" and config.get(AUX_LAYERS) and inner != counted:
        yield (
            f"eagle_config names aux layers {inner} for {list(ids)}, but SGLang reads it alone and "
            f"counts from 0, {counted}: {export_again(engine)}."
        )
    if layers and max(ids) > layers:
        yield f"config.json names aux layer {max(ids)}, but the target has {layers} layers."
    elif engine == "sglang" and max(ids) == layers:
        yield f"config.json names aux layer {max(ids)}, the last, which SGLang cannot hand on."
