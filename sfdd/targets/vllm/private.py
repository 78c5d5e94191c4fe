"""Every name of vLLM that sfdd uses although vLLM does not promise to keep it.

tests/targets/vllm/test_private.py fails loudly where one moves.
"""

from collections.abc import Collection
from typing import Any


def text_generation_architectures() -> Collection[str]:
    """Names of all architectures that generate text from text."""
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    return list(_TEXT_GENERATION_MODELS)


def multimodal_architectures() -> Collection[str]:
    """Names of all architectures that read more than text."""
    from vllm.model_executor.models.registry import _MULTIMODAL_MODELS

    return list(_MULTIMODAL_MODELS)


def model_class(architecture: str) -> type:
    """vLLM's own class of an architecture."""
    from vllm import ModelRegistry

    return ModelRegistry.models[architecture].load_model_cls()


def share_settings(architecture: str, name: str) -> None:
    """Let `name` have what vLLM changes in the configuration of `architecture`, as for hybrid models."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    if architecture in MODELS_CONFIG_MAP:
        MODELS_CONFIG_MAP.setdefault(name, MODELS_CONFIG_MAP[architecture])


def shut_down(engine: Any) -> None:
    """End an engine's processes now, rather than when it is collected."""
    engine.engine_core.shutdown()
