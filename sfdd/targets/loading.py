"""From what the user calls a target to its files, tokenizer, weights and fingerprint."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfdd.artifacts import digest_bytes, digest_files, digest_json
from sfdd.errors import TargetError, UsageError
from sfdd.targets import smollm2

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16", "float16")
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json")


@dataclass(frozen=True)
class TargetSource:
    """A target model on disk or on the hub, not loaded yet.

    Attributes:
        name: what the user wrote: a local directory, a GGUF file, a hub id, or `smollm2`.
        trust_remote_code: run the model's own Python code; off unless the user asked for it.
    """

    name: str
    trust_remote_code: bool = False

    @cached_property
    def _location(self) -> Mapping[str, Any]:
        """The arguments by which transformers finds it."""
        name = smollm2.locate() if self.name == smollm2.NAME else self.name
        path = Path(name).expanduser()
        if path.is_file() and path.suffix == ".gguf":
            where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        elif path.is_dir():
            where = {"pretrained_model_name_or_path": str(path)}
        elif path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise TargetError(
                f"Target {self.name} does not exist. Give a local model directory, a GGUF file, "
                f"a hub id such as {smollm2.HUB_ID}, or '{smollm2.NAME}'."
            )
        else:
            where = {"pretrained_model_name_or_path": name}
        return where | {"trust_remote_code": self.trust_remote_code}

    @property
    def directory(self) -> Path | None:
        """The local directory, None for a hub id."""
        path = Path(self._location["pretrained_model_name_or_path"])
        return path if path.is_dir() else None

    @property
    def reference(self) -> str:
        """How to name it so that it is found from any folder."""
        path = Path(self.name).expanduser()
        return str(path.resolve()) if path.exists() and self.name != smollm2.NAME else self.name

    def load_tokenizer(self) -> "PreTrainedTokenizerBase":
        """The target's tokenizer; it must have a chat template.

        Raises:
            TargetError: there is none, or it has no chat template.
        """
        from transformers import AutoTokenizer

        location = self._location
        try:
            tokenizer = AutoTokenizer.from_pretrained(**location)
        except Exception as error:
            raise self._cannot_load("tokenizer", error) from error
        if not tokenizer.chat_template:
            raise TargetError(
                f"Target {self.name} has no chat template, so conversations cannot be rendered as it "
                "sees them. Use an instruction-tuned model, or add chat_template.jinja to its directory."
            )
        return tokenizer

    def load_model(
        self, dtype: str = "auto", device: str = "auto", attn_implementation: str | None = None
    ) -> "PreTrainedModel":
        """The frozen target in evaluation mode.

        Args:
            dtype: one of `DTYPES`; "auto" is float32 on a CPU and the checkpoint's own on a GPU.
            device: "auto", "cpu", "cuda", "cuda:1" …

        Raises:
            UsageError: `dtype` is not one of `DTYPES`.
            TargetError: it cannot be loaded, or the checkpoint lacks weights the model needs.
        """
        if dtype not in DTYPES:
            raise UsageError(f"--dtype is {dtype!r}; choose one of {', '.join(DTYPES)}.")
        import torch
        from transformers import AutoModelForCausalLM

        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if dtype == "auto":
            dtype = "float32" if device == "cpu" else "auto"
        weights = {} if "gguf_file" in self._location else {"use_safetensors": True}
        attention = {"attn_implementation": attn_implementation} if attn_implementation else {}
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                **self._location,
                **weights,
                **attention,
                dtype=dtype if dtype == "auto" else getattr(torch, dtype),
                device_map=device,
                output_loading_info=True,
            )
        except Exception as error:
            raise self._cannot_load("model", error) from error
        if missing := sorted(report["missing_keys"]):
            raise TargetError(
                f"Target {self.name} lacks {len(missing)} weights that its architecture needs "
                f"(first: {missing[0]}); its scores would be those of a random model. "
                "Download or convert the checkpoint again."
            )
        return model.eval().requires_grad_(False)

    @cached_property
    def config(self) -> "PreTrainedConfig":
        """The target's configuration, without its weights.

        Raises:
            TargetError: there is none.
        """
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(**self._location)
        except Exception as error:
            raise self._cannot_load("configuration", error) from error

    @property
    def weights(self) -> str:
        """Directory or hub id of a checkpoint in safetensors files.

        Raises:
            TargetError: it is a GGUF file.
        """
        if "gguf_file" in self._location:
            raise TargetError(
                f"Target {self.name} is a GGUF file, which --backend vllm does not read. Convert it to a "
                "safetensors directory, or use --backend transformers."
            )
        return str(self._location["pretrained_model_name_or_path"])

    def checkpoint_dtype(self) -> str | None:
        """What its weights are stored in, such as "bfloat16"; None where that cannot be told."""
        if dtype := getattr(self.config.get_text_config(), "dtype", None):
            return str(dtype).removeprefix("torch.")
        files = sorted(self.directory.glob("*.safetensors")) if self.directory else []
        return _dtype_of_file(files[0]) if files else None

    def fingerprint(self, config: "PreTrainedConfig | None" = None) -> str:
        """Identity of the weights: a digest of the files, or the hub's commit for a hub id."""
        if (gguf := self._location.get("gguf_file")) and self.directory:
            return digest_files([self.directory / gguf])
        if self.directory:
            return digest_files([f for glob in _WEIGHT_FILES for f in self.directory.glob(glob)])
        commit = getattr(config, "_commit_hash", None)
        return digest_bytes(f"{self.name}@{commit}".encode())

    def _cannot_load(self, part: str, error: Exception) -> TargetError:
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return TargetError(
            f"Cannot load the {part} of target {self.name}: {first_line.rstrip('.')}. "
            f"Give a local model directory, a GGUF file, a hub id such as {smollm2.HUB_ID}, "
            f"or '{smollm2.NAME}'."
        )


def _dtype_of_file(path: Path) -> str | None:
    """The type of the first weight in a safetensors file that is a floating-point number."""
    from safetensors import SafetensorError, safe_open

    names = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    try:
        with safe_open(path, "pt") as file:
            types = (file.get_slice(name).get_dtype() for name in file.keys())  # noqa: SIM118
            return next((names[t] for t in types if t in names), None)
    except (OSError, SafetensorError):
        return None  # loading it will say what is wrong


_BITS = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}


def warn_of_lower_precision(source: TargetSource, dtype: str) -> None:
    """Warn where a target is scored with fewer bits than its weights are stored with."""
    stored = source.checkpoint_dtype() or dtype
    if _BITS.get(dtype, 0) < _BITS.get(stored, 0):
        log.warning(
            "Target %s is stored in %s and scored in %s: its tokens' flatness shifts by about 1 %%, that "
            "of single tokens by up to a fifth, and near the threshold other conversations may be kept. "
            "Use --dtype %s for exact scores.",
            source.name,
            stored,
            dtype,
            stored,
        )


def context_length(config: "PreTrainedConfig") -> int | None:
    """Positions a model was made for; None where its configuration does not say."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def usable_length(max_length: int, context: int | None) -> int:
    """`max_length`, or the target's context where that is shorter; says so."""
    if context is None or max_length <= context:
        return max_length
    log.warning("Conversations are cut at %d tokens, the context of the target.", context)
    return context


def tokenizer_identity(tokenizer: "PreTrainedTokenizerBase") -> dict[str, str]:
    """What must be equal for two tokenizers to give the same input_ids and loss mask."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    return {
        "tokenizer": digest_json([vocabulary, tokenizer.special_tokens_map]),
        "chat_template": digest_json(tokenizer.chat_template),
    }
