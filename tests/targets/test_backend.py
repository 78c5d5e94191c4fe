"""Which engine scores, and what is said where it cannot. Runs with and without vLLM."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import openai, write_jsonl

from sfdd.errors import UsageError
from sfdd.targets.backend import open_backend
from sfdd.targets.config import BackendConfig, parse_engine_args

WITH_VLLM = importlib.util.find_spec("vllm") is not None


def test_auto_is_transformers_without_a_gpu(tiny_directory: Path, caplog: Any) -> None:
    caplog.set_level("INFO", logger="sfdd")
    backend = open_backend(str(tiny_directory), BackendConfig(), 100)
    assert backend.about["backend"] == "transformers"
    assert "Scoring with transformers, float32 on cpu." in caplog.messages


def test_the_command_says_which(tiny_directory: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "chat.jsonl", [openai("Question", "Answer")])
    command = [Path(sys.executable).with_name("sfdd"), "score", data, "--target", tiny_directory]
    done = subprocess.run(
        [*command, "--run", tmp_path / "run"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Scoring with transformers, float32 on cpu.\n" in done.stderr
    assert "engine             transformers, float32 on cpu\n" in done.stdout


@pytest.mark.skipif(WITH_VLLM, reason="vLLM is installed here")
@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({"backend": "vllm"}, "--backend vllm"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ({"engine_args": {"max_num_seqs": 4}}, "--engine-arg"),
    ],
)
def test_vllm_is_missing(settings: dict[str, Any], asked: str, tiny_directory: Path) -> None:
    with pytest.raises(UsageError) as raised:
        open_backend(str(tiny_directory), BackendConfig(**settings), 100)
    assert str(raised.value) == (
        f"{asked} needs vLLM, which is not installed here. Install it with "
        "\"pip install 'sfdd[vllm]'\", or score with --backend transformers."
    )


@pytest.mark.skipif(WITH_VLLM, reason="vLLM is installed here")
def test_a_folder_called_vllm_is_not_vllm(
    tiny_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="not installed here"):
        open_backend(str(tiny_directory), BackendConfig(backend="vllm"), 100)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "sglang"}, "--backend is 'sglang'; choose one of auto, transformers, vllm."),
        (
            {"backend": "transformers", "quantization": "fp8"},
            "--quantization is for --backend vllm.",
        ),
        ({"backend": "vllm", "attn_implementation": "sdpa"}, "--attn-implementation is for"),
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size must be at least 1."),
        (
            {"gpu_memory_utilization": 1.5},
            "--gpu-memory-utilization must be above 0 and at most 1.",
        ),
        ({"batch_tokens": 1}, "--batch-tokens must be at least 2."),
        ({"logits_memory": 0}, "--logits-memory must be at least 1."),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        BackendConfig(**settings)
    assert str(raised.value).startswith(message)


def test_arguments_of_the_engine() -> None:
    pairs = ["max-num-seqs=4", "kv_cache_dtype=fp8", 'hf_overrides={"a": 1}', "seed=", "x=a=b"]
    assert parse_engine_args(pairs) == {
        "max_num_seqs": 4,
        "kv_cache_dtype": "fp8",
        "hf_overrides": {"a": 1},
        "seed": "",
        "x": "a=b",
    }
    for wrong in ("max_num_seqs", "=4"):
        with pytest.raises(UsageError, match=r"write KEY=VALUE, as in max_num_seqs=64\."):
            parse_engine_args([wrong])
