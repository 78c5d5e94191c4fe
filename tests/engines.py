"""Tiny targets in an engine of vLLM's and in transformers, and when their statistics are equal."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from conftest import byte_tokenizer

from sfdd.conversations.conversation import TokenizedConversation
from sfdd.targets.backend import open_backend
from sfdd.targets.config import BackendConfig
from sfdd.targets.statistics import TokenStats
from sfdd.targets.transformers_target import TransformersTarget

SMALL = {
    "vocab_size": 260,  # which vLLM pads to 320
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "gemma2": {
        "final_logit_softcapping": 2.0,
        # vLLM's attention on a CPU approximates this one: flatness is then off by up to 4e-3.
        "attn_logit_softcapping": None,
        "sliding_window": 8,
        "query_pre_attn_scalar": 32,
    },
}


def save_family(directory: Path, family: str) -> Path:
    """A random tiny target of a family."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **(SMALL | FAMILIES[family]))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


Statistics = dict[str, TokenStats]


def in_vllm(
    target: Path | str,
    samples: Sequence[TokenizedConversation],
    inspect: Callable[[Any], None] = lambda backend: None,
    engine_args: dict[str, Any] | None = None,
    **settings: Any,
) -> Statistics:
    """Statistics of an engine that is started for them; `inspect` sees the backend before it ends."""
    arguments = {"enforce_eager": True} | (engine_args or {})
    config = BackendConfig(backend="vllm", engine_args=arguments, **settings)
    backend = open_backend(str(target), config, 512)
    try:
        found = {
            sample.id: stats
            for batch in backend.token_stats(samples)
            for sample, stats in zip(*batch, strict=True)
        }
        inspect(backend)
    finally:
        backend.close()
    return found


def in_transformers(
    target: Path | str, samples: Sequence[TokenizedConversation], dtype: str = "auto"
) -> Statistics:
    loaded = TransformersTarget.load(str(target), dtype=dtype)
    return {sample.id: loaded.token_stats([sample])[0] for sample in samples}


def assert_equal(found: Statistics, expected: Statistics) -> None:
    """Within what two implementations of the same float32 model differ by."""
    assert found.keys() == expected.keys()
    for key, stats in expected.items():
        got = found[key]
        np.testing.assert_allclose(got.flatness, stats.flatness, rtol=1e-4)
        for name in ("entropy", "nll", "energy"):
            np.testing.assert_allclose(getattr(got, name), getattr(stats, name), atol=5e-4)
        for name in ("top1", "margin"):
            np.testing.assert_allclose(getattr(got, name), getattr(stats, name), atol=1e-4)
