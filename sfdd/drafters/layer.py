"""The one decoder layer of a drafter: a Llama layer of the target's sizes, whatever the target's family.

Serving engines load EAGLE drafters as Llama layers, so this is what is trained. Rotary positions and
their scaling are the target's, since a drafter reads positions as far as the target does.
"""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaModel

from sfdd.drafters.attention import IMPLEMENTATION
from sfdd.errors import TargetError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from sfdd.targets.transformers_target import TransformersTarget

_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
# Scalings a Llama layer knows; what another kind says of the target's layers is left out.
_SCALINGS = ("linear", "llama3", "yarn", "longrope")


def drafter_config(target: "TransformersTarget", architecture: str) -> LlamaConfig:
    """The configuration of a drafter for the target: one Llama layer without biases.

    Raises:
        TargetError: the target is not a decoder with rotary positions and heads of attention.
    """
    config = target.config
    name = f"A drafter for {target.source.name} ({config.model_type})"
    if getattr(config, "is_encoder_decoder", False):
        raise TargetError(
            f"{name} cannot be made: it is an encoder-decoder. Use a decoder-only model."
        )
    sizes = {size: getattr(config, size, None) for size in _SIZES}
    if missing := [size for size, value in sizes.items() if not isinstance(value, int)]:
        raise TargetError(
            f"{name} cannot be made: its configuration has no {' and no '.join(missing)}, which a "
            "Llama layer needs. Use a target with attention in its layers."
        )
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if config.hidden_size % heads:
        raise TargetError(
            f"{name} cannot be made: its hidden size, {config.hidden_size}, is not a multiple of its "
            f"{heads} attention heads, as that of a Llama layer is."
        )
    return LlamaConfig(
        **sizes,
        architectures=[architecture],
        num_hidden_layers=1,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        vocab_size=target.vocab_size,
        rms_norm_eps=_norm_epsilon(config),
        rope_parameters=_rotary(config, head_dim, name),
        hidden_act="silu",
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=getattr(config, "bos_token_id", None),
        eos_token_id=getattr(config, "eos_token_id", None),
        pad_token_id=getattr(config, "pad_token_id", None),
    )


def _norm_epsilon(config: "PreTrainedConfig") -> float:
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
    return next((getattr(config, name) for name in names if hasattr(config, name)), 1e-6)


def _rotary(config: "PreTrainedConfig", head_dim: int, name: str) -> dict[str, Any]:
    """The target's rotary positions over whole heads: those of full attention where layers differ."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [p for p in parameters.values() if isinstance(p, Mapping)]
    if by_layer_type:
        parameters = parameters.get("full_attention") or by_layer_type[-1]
    if not isinstance(parameters.get("rope_theta"), int | float):
        raise TargetError(
            f"{name} cannot be made: its positions are not rotary (RoPE), as those of a Llama layer are."
        )
    kind = parameters.get("rope_type", "default")
    if kind == "dynamic":
        raise TargetError(
            f"{name} cannot be made: with dynamic RoPE scaling what it drafts would depend on the "
            "conversations before. Use a target with another rope_type."
        )
    # A target that rotates a part of each head has scaling factors for that part alone.
    fits = len(parameters.get("short_factor", range(head_dim // 2))) == head_dim // 2
    if kind not in _SCALINGS or not fits:
        return {"rope_type": "default", "rope_theta": parameters["rope_theta"]}
    return {k: copy.copy(v) for k, v in parameters.items() if k != "partial_rotary_factor"}


def drafter_body(config: LlamaConfig) -> LlamaModel:
    """transformers' own model of one layer, without embeddings and final norm, float32.

    Its attention is `attention.attend`; attention heads, rotary positions, masks and KV cache are
    transformers' business.
    """
    config = copy.deepcopy(config)
    # Embeddings are the target's: build the body with a vocabulary of one and drop it.
    config.update({"vocab_size": 1, "pad_token_id": None})
    config._attn_implementation = IMPLEMENTATION
    body = LlamaModel(config)
    body.embed_tokens, body.norm = nn.Identity(), nn.Identity()
    return body


def token_embeddings(embedding: nn.Embedding, ids: Tensor) -> Tensor:  # [...] -> [..., H]
    """Rows of the target's embedding matrix.

    As they are: some targets (Gemma) scale them on the way to their own layers, but the engines hand
    a drafter the rows of the matrix.
    """
    return F.embedding(ids, embedding.weight)
