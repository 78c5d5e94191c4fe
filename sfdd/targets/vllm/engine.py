"""From settings to a running engine, or to a sentence that says why there is none."""

import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from sfdd.errors import TargetError, UsageError
from sfdd.targets.config import BackendConfig
from sfdd.targets.loading import DTYPES, TargetSource
from sfdd.targets.vllm import private
from sfdd.targets.vllm.plugin import OWNER, PREFIX, SETTINGS

if TYPE_CHECKING:
    from vllm import LLMEngine

log = logging.getLogger(__name__)

# The version that the tests run with; pyproject.toml says the same.
OLDEST, NEXT_UNTESTED = (0, 32), (0, 33)
_ENTRY_POINT = "sfdd"
# Arguments that have an option of their own, or that sfdd decides.
_OPTIONS = {
    "model": "--target",
    "dtype": "--dtype",
    "max_model_len": "--max-length",
    "max_num_batched_tokens": "--batch-tokens",
    "quantization": "--quantization",
    "tensor_parallel_size": "--tensor-parallel-size",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "trust_remote_code": "--trust-remote-code",
    "device_ids": "--device",
}
_OURS = ("runner", "convert", "tokenizer", "skip_tokenizer_init", "additional_config", "task")


def vllm_version() -> str:
    """As vLLM itself says; its distribution has several names."""
    import vllm

    return str(vllm.__version__)


def check_version() -> None:
    """Make vLLM ready: refuse a version older than the supported range, warn of a newer one.

    Raises:
        TargetError: it is too old, or cannot be imported.
    """
    _prepare_environment()
    try:
        version = vllm_version()
    except Exception as error:
        raise TargetError(
            f"vLLM is installed but cannot be imported: {_first_line(error)}."
        ) from error
    number = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    oldest, untested = (".".join(map(str, v)) for v in (OLDEST, NEXT_UNTESTED))
    if number < OLDEST:
        raise TargetError(
            f"vLLM {version} is too old: sfdd needs {oldest} or newer. Upgrade it, or score with "
            "--backend transformers."
        )
    if number >= NEXT_UNTESTED:
        log.warning(
            "vLLM %s is newer than what sfdd was tested with (%s up to, not including, %s).",
            version, oldest, untested,
        )  # fmt: skip


def check_architecture(source: TargetSource) -> str:
    """The architecture of a target, if vLLM can score it.

    Raises:
        TargetError: it cannot.
    """
    from vllm import ModelRegistry
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    _ = source.weights  # not of a GGUF file
    names = list(getattr(source.config, "architectures", None) or [])
    registered = ModelRegistry.get_supported_archs()
    for name in names:
        if PREFIX + name in registered:
            return name
    found = f"Target {source.name} ({', '.join(names) or 'no architecture in its config.json'})"
    if not any(name.startswith(PREFIX) for name in registered):
        raise TargetError(
            f"vLLM {vllm_version()} did not load sfdd's plugin. Install sfdd as a package beside it "
            f"(its entry point is '{_ENTRY_POINT}' in the group vllm.general_plugins), or score with "
            "--backend transformers."
        )
    if set(names) & set(private.multimodal_architectures()):
        raise TargetError(
            f"{found} reads more than text, and vLLM scores text-only models alone. Use "
            "--backend transformers, or a text-only version of it."
        )
    raise TargetError(
        f"{found} is no text-generation model that vLLM {vllm_version()} has code of its own for. Use "
        "--backend transformers."
    )


def resolve_dtype(source: TargetSource, dtype: str) -> str:
    """What "auto" means: float32 on a CPU, else what the weights are stored in.

    vLLM itself would score a float32 checkpoint in 16 bits without a word.

    Raises:
        UsageError: it is none of `DTYPES`, or has to be named.
    """
    from vllm.platforms import current_platform

    if dtype not in DTYPES:
        raise UsageError(f"--dtype is {dtype!r}; choose one of {', '.join(DTYPES)}.")
    if dtype != "auto":
        return dtype
    if current_platform.is_cpu():
        return "float32"
    stored = source.checkpoint_dtype()
    if stored not in DTYPES:
        raise UsageError(
            f"What target {source.name} is stored in cannot be told from it; give --dtype."
        )
    return stored


def engine_arguments(
    source: TargetSource, config: BackendConfig, architecture: str, dtype: str, max_length: int
) -> dict[str, Any]:
    """The arguments of vLLM's engine.

    Raises:
        UsageError: some of `config.engine_args` are unknown, or not the user's to give.
    """
    own = dict(config.engine_args)
    _check_names(own)
    overrides = own.pop("hf_overrides", {})
    if not isinstance(overrides, Mapping):
        raise UsageError("--engine-arg hf_overrides must be a JSON object.")
    chosen = {
        "max_num_batched_tokens": config.batch_tokens,
        "quantization": config.quantization,
        "tensor_parallel_size": config.tensor_parallel_size,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "device_ids": _device_ids(config),
    }
    return {
        "model": source.weights,
        "runner": "pooling",
        "dtype": dtype,
        "max_model_len": max_length,
        "trust_remote_code": config.trust_remote_code,
        "skip_tokenizer_init": True,  # conversations come as tokens
        "load_format": "safetensors",  # never a pickle
        "disable_log_stats": True,
        "enable_prefix_caching": False,  # every prompt is computed whole, so it would only cost
        "additional_config": {SETTINGS: {"logits_memory": config.logits_memory}},
        "hf_overrides": {**overrides, "architectures": [PREFIX + architecture]},
        **{name: value for name, value in chosen.items() if value is not None},
        **own,
    }


def start_engine(source: TargetSource, arguments: Mapping[str, Any]) -> "LLMEngine":
    """Start an engine.

    Raises:
        TargetError: vLLM cannot; the message is its own.
    """
    from vllm import EngineArgs, LLMEngine

    try:
        return LLMEngine.from_engine_args(EngineArgs(**arguments))
    except Exception as error:
        raise TargetError(
            f"vLLM cannot run target {source.name}: {_first_line(error)}. What its processes said "
            f"stands above, if anything. {_advice(str(error))}"
        ) from error


def _check_names(own: Mapping[str, Any]) -> None:
    from vllm import EngineArgs

    known = [field.name for field in fields(EngineArgs)]
    for name in own:
        if name in _OPTIONS:
            raise UsageError(f"--engine-arg {name} has an option of its own: {_OPTIONS[name]}.")
        if name in _OURS:
            raise UsageError(f"--engine-arg {name} is sfdd's to decide; leave it out.")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise UsageError(f"--engine-arg {name} is no argument of vLLM's engine{hint}")


def _device_ids(config: BackendConfig) -> list[int] | None:
    """The GPUs of `cuda:N`: as many from the N-th on as share the target."""
    kind, _, index = config.device.partition(":")
    if kind not in ("auto", "cuda") and not (kind == "cpu" and not index):
        raise UsageError(f"--device is {config.device!r}; with vLLM give auto, cuda or cuda:N.")
    if not index:
        return None
    size = config.tensor_parallel_size or 1
    return list(range(int(index), int(index) + size))


def _prepare_environment() -> None:
    """What vLLM and its processes read from the environment; a user's own choice stays."""
    os.environ[OWNER] = str(os.getpid())
    # A folder in the working directory must not stand in for a package, in any of the processes.
    os.environ["PYTHONSAFEPATH"] = "1"
    # Threads are at work here, and what forks with them may hang.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if "VLLM_PLUGINS" in os.environ:
        plugins = [name for name in os.environ["VLLM_PLUGINS"].split(",") if name]
        os.environ["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*plugins, _ENTRY_POINT]))


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")


def _advice(message: str) -> str:
    """What to try next, by what vLLM says."""
    said = message.lower()
    if "head_dtype" in said:
        return 'Its head is quantized: add --engine-arg \'hf_overrides={"head_dtype": "model"}\'.'
    if "kv cache" in said or "max_model_len" in said or "max seq len" in said:
        return "Lower --max-length, or raise --gpu-memory-utilization."
    if "memory" in said:
        return "Lower --gpu-memory-utilization, --batch-tokens or --logits-memory."
    return "Try --backend transformers, or other --engine-arg settings."
