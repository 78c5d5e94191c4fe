"""sfdd's architectures: each is vLLM's own model whose pooler gives statistics of its logits.

`SfddLlamaForCausalLM` and the others come into being when vLLM asks this module for them by name.
"""

from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces_base import VllmModelForPooling

from sfdd.targets.vllm import private
from sfdd.targets.vllm.plugin import PREFIX, SETTINGS
from sfdd.targets.vllm.pooler import StatisticsPooler


def __getattr__(name: str) -> type:
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = _with_statistics(private.model_class(name.removeprefix(PREFIX)), name)
    globals()[name] = made
    return made


def _with_statistics(base: Any, name: str) -> type:
    """A subclass of vLLM's model `base` that pools."""

    class WithStatistics(base, VllmModelForPooling):
        is_pooling_model = True

        def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
            self.pooler = StatisticsPooler(
                self.compute_logits,  # not the model itself: modules must not contain each other
                vllm_config.model_config.get_vocab_size(),
                vllm_config.additional_config[SETTINGS]["logits_memory"],
            )

    WithStatistics.__name__ = WithStatistics.__qualname__ = name
    WithStatistics.__module__ = __name__
    return WithStatistics
