"""What vLLM and SGLang read of an EAGLE or EAGLE-3 drafter, and how to get from one form to the other.

Read from vLLM 0.32 (`llama_eagle.py`, `llama_eagle3.py`, `EAGLEConfig`) and SGLang (`llama_eagle.py`,
`llama_eagle3.py`, `ModelRunner`), late in 2026. sfdd trains vLLM's form. They differ in this:

- vLLM finds EAGLE's class by prefixing the architecture with "Eagle", SGLang by the architecture alone.
- SGLang's EAGLE has a bias in `fc`, and starts with random values where the checkpoint has none.
- vLLM reads the aux layers' ids from the top level of config.json, SGLang from `eagle_config`, and
  counts from 0 there: id i of sfdd and vLLM, the residual stream after i layers, is the output of
  SGLang's layer i - 1.
- vLLM stops at a `d2t` where the draft vocabulary is the whole one; SGLang reads it, but needs none.
- SGLang may run on a transformers that looks for `rope_theta` and `rope_scaling` rather than
  `rope_parameters`, and takes a base of 10,000 where it finds none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sfdd.drafters.drafter import renamed
from sfdd.errors import DrafterError
from sfdd.export.checkpoint import Checkpoint

EAGLE, EAGLE3 = "eagle", "eagle3"
ARCHITECTURES = {
    (EAGLE, "vllm"): "LlamaForCausalLM",
    (EAGLE, "sglang"): "LlamaForCausalLMEagle",
    (EAGLE3, "vllm"): "LlamaForCausalLMEagle3",
    (EAGLE3, "sglang"): "LlamaForCausalLMEagle3",
}
# Those that vLLM makes the same class of: it adds "Eagle" or "Eagle3" where a name lacks it.
ALSO = {
    (EAGLE, "vllm"): ("EagleLlamaForCausalLM",),
    (EAGLE3, "vllm"): ("LlamaForCausalLM", "Eagle3LlamaForCausalLM"),
}
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
ONLY_NESTED = (
    "config.json names aux layers in eagle_config alone, where vLLM and SGLang count differently: write "
    f"them as {AUX_LAYERS} at its top level, too, as vLLM counts."
)
NO_SIZES = (KeyError, TypeError, ValueError, ArithmeticError)
_LAYER = {EAGLE: "layers.0", EAGLE3: "midlayer"}


@dataclass(frozen=True)
class Sizes:
    """The sizes that config.json asks for.

    Attributes:
        hidden, target_hidden: H of the drafter's states and of the target's.
        heads, kv_heads, head_dim: of the attention.
        vocabulary, draft_vocabulary: V and D.
        aux_layers: how many of the target's layers are fused.
    """

    hidden: int
    target_hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    draft_vocabulary: int
    aux_layers: int

    @property
    def whole_vocabulary(self) -> bool:
        """Whether the drafter's head covers every token of the target's."""
        return self.draft_vocabulary == self.vocabulary


def sizes_of(config: Mapping[str, Any]) -> Sizes:
    """The sizes in a config.json; raises one of `NO_SIZES` where one is missing or no number."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    return Sizes(
        hidden=hidden,
        target_hidden=int(config.get("target_hidden_size") or hidden),
        intermediate=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocabulary=int(config["vocab_size"]),
        draft_vocabulary=int(config.get("draft_vocab_size") or config["vocab_size"]),
        aux_layers=len(aux_layers(config) or nested_aux_layers(config) or (0, 0, 0)),
    )


def method_of(checkpoint: Checkpoint) -> str:
    """Which kind of drafter it is, by its tensors, else by its architecture.

    The architecture may be that of a plain Llama for either kind.
    """
    names = checkpoint.tensors
    if any(mark in name for name in names for mark in ("midlayer.", "hidden_norm.", "d2t")):
        return EAGLE3
    if "layers.0.self_attn.q_proj.weight" in names and "norm.weight" not in names:
        return EAGLE
    named = checkpoint.config.get("architectures")
    return EAGLE3 if named == [ARCHITECTURES[EAGLE3, "vllm"]] else EAGLE


def aux_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The aux layer ids as sfdd and vLLM count; () where no whole numbers are written.

    Those in `eagle_config` alone may be counted either way.
    """
    ids = config.get(AUX_LAYERS)
    known = isinstance(ids, list) and all(isinstance(i, int) for i in ids)
    return tuple(ids) if ids and known else ()


def nested_aux_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The aux layer ids in `eagle_config`, however they are counted."""
    return aux_layers(mapping(config, "eagle_config"))


def by_sfdds_names(tensors: Mapping[str, Tensor], method: str) -> dict[str, Tensor]:
    """The layer under one name where vLLM knows two."""
    if method == EAGLE:
        return dict(tensors)
    return renamed(tensors, "layers.0.", "midlayer.")


def mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object within a config.json; an empty one where there is none."""
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def expected_tensors(method: str, engine: str, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that an engine loads from such a drafter, by name."""
    s, layer = sizes, _LAYER[method]
    read = s.hidden if method == EAGLE else 2 * s.hidden  # EAGLE-3 reads [embedding; state]
    shapes = {
        f"{layer}.self_attn.q_proj.weight": (s.heads * s.head_dim, read),
        f"{layer}.self_attn.k_proj.weight": (s.kv_heads * s.head_dim, read),
        f"{layer}.self_attn.v_proj.weight": (s.kv_heads * s.head_dim, read),
        f"{layer}.self_attn.o_proj.weight": (s.hidden, s.heads * s.head_dim),
        f"{layer}.mlp.gate_proj.weight": (s.intermediate, s.hidden),
        f"{layer}.mlp.up_proj.weight": (s.intermediate, s.hidden),
        f"{layer}.mlp.down_proj.weight": (s.hidden, s.intermediate),
        f"{layer}.post_attention_layernorm.weight": (s.hidden,),
    }
    if method == EAGLE:
        shapes["fc.weight"] = (s.hidden, 2 * s.hidden)
        return shapes | ({"fc.bias": (s.hidden,)} if engine == "sglang" else {})
    shapes |= {
        "fc.weight": (s.hidden, s.aux_layers * s.target_hidden),
        f"{layer}.input_layernorm.weight": (s.hidden,),
        f"{layer}.hidden_norm.weight": (s.hidden,),
        "norm.weight": (s.hidden,),
        "lm_head.weight": (s.draft_vocabulary, s.hidden),
    }
    return shapes | ({} if s.whole_vocabulary else {"d2t": (s.draft_vocabulary,)})


def optional_tensors(method: str, engine: str, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Tensors that an engine takes, or leaves out, without harm."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (sizes.vocabulary, sizes.hidden)}
    if method == EAGLE3:
        shapes["t2d"] = (sizes.vocabulary,)
        if engine == "sglang":
            shapes["d2t"] = (sizes.draft_vocabulary,)
    return shapes


def as_trained(checkpoint: Checkpoint) -> Checkpoint:
    """A drafter in sfdd's own form, whichever engine it was exported for.

    Raises:
        DrafterError: it has what sfdd's drafters have not.
    """
    config, method = dict(checkpoint.config), method_of(checkpoint)
    tensors = by_sfdds_names(checkpoint.tensors, method)
    bias = tensors.pop("fc.bias", None)
    if bias is not None and bool(bias.any()):
        raise DrafterError(
            f"fc.bias of {checkpoint.directory} is not zero, and vLLM's drafters have no bias there."
        )
    config["architectures"] = [ARCHITECTURES[method, "vllm"]]
    if method == EAGLE3:
        if nested_aux_layers(config) and not aux_layers(config):
            raise DrafterError(
                f"The drafter in {checkpoint.directory} is not certain: {ONLY_NESTED}"
            )
        config |= _aux_config(config, aux_layers(config), first=1)
        if sizes_of(config).whole_vocabulary:
            tensors = {n: t for n, t in tensors.items() if n not in ("d2t", "t2d")}
    return replace(checkpoint, config=config, tensors=tensors)


def for_engine(checkpoint: Checkpoint, engine: str, dtype: torch.dtype | None) -> Checkpoint:
    """A drafter of sfdd's own form in the form that an engine loads, in the given dtype."""
    method = method_of(checkpoint)
    config, tensors = dict(checkpoint.config), dict(checkpoint.tensors)
    config["architectures"] = [ARCHITECTURES[method, engine]]
    dtype = dtype or tensors["fc.weight"].dtype
    config["dtype"] = str(dtype).removeprefix("torch.")
    if engine == "sglang":
        config |= {"torch_dtype": config["dtype"], **_older_rope(config)}
    if method == EAGLE and engine == "sglang":
        tensors["fc.bias"] = torch.zeros(len(tensors["fc.weight"]))
    if method == EAGLE3:
        config |= _aux_config(config, aux_layers(config), first=0 if engine == "sglang" else 1)
    cast = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    return replace(checkpoint, config=config, tensors=cast)


def _aux_config(config: Mapping[str, Any], ids: tuple[int, ...], first: int) -> dict[str, Any]:
    """The ids at the top level as vLLM counts, and in `eagle_config` counted from `first`."""
    nested = {**mapping(config, "eagle_config"), "use_aux_hidden_state": True}
    nested[AUX_LAYERS] = [i - 1 + first for i in ids]
    return {AUX_LAYERS: list(ids), "eagle_config": nested}


def _older_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, as transformers before version 5 has them."""
    rope = mapping(config, "rope_parameters")
    if "rope_theta" not in rope:
        return {}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    plain = scaling.get("rope_type", "default") == "default"
    return {"rope_theta": rope["rope_theta"], "rope_scaling": None if plain else scaling}


def export_again(engine: str) -> str:
    """What to do about a drafter that is in another engine's form."""
    return f"write it with 'sfdd export --for {engine}'"
