"""How a target is run for scoring."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sfdd.errors import UsageError

BACKENDS = ("auto", "transformers", "vllm")
BATCH_TOKENS = 4096  # with transformers; vLLM has its own
LOGITS_MEMORY = 512  # MiB


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """The engine, and what it is told.

    Attributes:
        backend: one of `BACKENDS`; "auto" is vLLM where it is installed and has a GPU.
        batch_tokens: tokens per forward pass; None for what suits the backend.
        logits_memory: MiB that logits and what is computed from them may take.
        tensor_parallel_size: GPUs that share the target (vLLM).
        gpu_memory_utilization: fraction of each GPU's memory that the engine takes (vLLM).
        quantization: how to quantize the weights; None for as they are stored (vLLM).
        engine_args: more arguments of vLLM's engine, by their names there.
    """

    backend: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    batch_tokens: int | None = None
    logits_memory: int = LOGITS_MEMORY
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    tensor_parallel_size: int | None = None
    gpu_memory_utilization: float | None = None
    quantization: str | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise UsageError(f"--backend is {self.backend!r}; choose one of {', '.join(BACKENDS)}.")
        if self.logits_memory < 1:
            raise UsageError("--logits-memory must be at least 1.")
        if self.batch_tokens is not None and self.batch_tokens < 2:
            raise UsageError("--batch-tokens must be at least 2.")
        if self.tensor_parallel_size is not None and self.tensor_parallel_size < 1:
            raise UsageError("--tensor-parallel-size must be at least 1.")
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise UsageError("--gpu-memory-utilization must be above 0 and at most 1.")
        if self.backend == "transformers" and self.only_of_vllm:
            raise UsageError(f"{self.only_of_vllm[0]} is for --backend vllm.")
        if self.backend == "vllm" and self.attn_implementation:
            raise UsageError(
                "--attn-implementation is for --backend transformers; with vLLM give "
                "--engine-arg attention_backend=NAME."
            )

    @property
    def only_of_vllm(self) -> list[str]:
        """The options given that mean nothing to transformers."""
        names = ("tensor_parallel_size", "gpu_memory_utilization", "quantization")
        given = [f"--{n.replace('_', '-')}" for n in names if getattr(self, n) is not None]
        return given + ["--engine-arg"] * bool(self.engine_args)


def parse_engine_args(pairs: Sequence[str]) -> dict[str, Any]:
    """`key=value` pairs; a value is JSON, or text where it is not.

    Raises:
        UsageError: one is no such pair.
    """
    parsed = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--engine-arg is {pair!r}; write KEY=VALUE, as in max_num_seqs=64.")
        try:
            parsed[name.replace("-", "_")] = json.loads(value)
        except ValueError:
            parsed[name.replace("-", "_")] = value
    return parsed
