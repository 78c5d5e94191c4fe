"""Tiny random targets of the families that drafters are made for."""

from typing import Any

import torch
import transformers
from conftest import byte_tokenizer

from sfdd.targets.loading import TargetSource
from sfdd.targets.transformers_target import TransformersTarget

SMALL: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
# What each name stands for: model type, and what differs from `SMALL`.
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, wide heads": ("llama", {"head_dim": 16}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}),
    "llama, llama3": (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0} | _LLAMA3},
    ),
    "llama, yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama, linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"sliding_window": 8}),
    "gemma3": ("gemma3_text", {"sliding_window": 8}),
    "phi3": ("phi3", {"tie_word_embeddings": False}),
    "phi3, longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0} | _LONG,
        },
    ),
    "granite": ("granite", {"logits_scaling": 4.0, "embedding_multiplier": 12.0}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "gpt_neox": ("gpt_neox", {"hidden_act": "gelu"}),
}


def make_target(name: str, **changes: Any) -> TransformersTarget:
    """The target of that name in `TARGETS`, or of a model type and changes of its own."""
    model_type, special = TARGETS.get(name, (name, {}))
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **(SMALL | special | changes))
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    return TransformersTarget(model, byte_tokenizer(), TargetSource(name))
