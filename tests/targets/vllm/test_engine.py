"""What is said where vLLM cannot score, and that sfdd's plugin is nobody else's burden."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import vllm
from conftest import byte_tokenizer
from helpers import openai, write_jsonl

from sfdd.errors import TargetError, UsageError
from sfdd.targets.backend import open_backend
from sfdd.targets.config import BackendConfig
from sfdd.targets.loading import TargetSource
from sfdd.targets.vllm import engine, private
from sfdd.targets.vllm.plugin import PREFIX


def python(
    code: str, *arguments: object, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, **environment},
    )


def directory(path: Path, config: Mapping[str, Any]) -> TargetSource:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save_pretrained(path)
    return TargetSource(str(path))


class TestSentences:
    def test_a_target_that_reads_more_than_text(self, tmp_path: Path) -> None:
        config = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
        with pytest.raises(TargetError, match=r"\(LlavaForCond.* reads more than text, and vLLM"):
            engine.check_architecture(directory(tmp_path / "target", config))

    def test_a_target_that_vllm_does_not_know(self, tmp_path: Path) -> None:
        config = {"model_type": "llama", "architectures": ["UnheardOfForCausalLM"]}
        with pytest.raises(TargetError, match=r"\(UnheardOfForCausalLM\) is no text-generation"):
            engine.check_architecture(directory(tmp_path / "target", config))

    def test_a_gguf_file(self, tmp_path: Path) -> None:
        (tmp_path / "model.gguf").write_bytes(b"GGUF")
        with pytest.raises(TargetError, match=r"is a GGUF file, which --backend vllm does not"):
            engine.check_architecture(TargetSource(str(tmp_path / "model.gguf")))

    def test_no_plugin(self, qwen2: Path) -> None:
        code = """
import sys
from importlib import metadata
found = metadata.entry_points
metadata.entry_points = lambda **wanted: [e for e in found(**wanted) if e.name != "sfdd"]
from sfdd.targets.loading import TargetSource
from sfdd.targets.vllm.engine import check_architecture
check_architecture(TargetSource(sys.argv[1]))
"""
        done = python(code, qwen2)
        assert "did not load sfdd's plugin. Install sfdd as a package beside it" in done.stderr

    def test_an_old_vllm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(vllm, "__version__", "0.31.2")
        with pytest.raises(TargetError, match=r"^vLLM 0\.31\.2 is too old: sfdd needs 0\.32 or"):
            engine.check_version()

    def test_a_new_vllm(self, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
        monkeypatch.setattr(vllm, "__version__", "1.2.3")
        engine.check_version()
        assert "vLLM 1.2.3 is newer than what sfdd was tested with (0.32 up to" in caplog.text

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("dtype", "has an option of its own: --dtype."),
            ("runner", "is sfdd's to decide; leave it out."),
            ("max_num_seq", "is no argument of vLLM's engine; did you mean 'max_num_seqs'?"),
        ],
    )
    def test_arguments_that_are_refused(self, name: str, said: str, qwen2: Path) -> None:
        config = BackendConfig(backend="vllm", engine_args={name: 1})
        with pytest.raises(UsageError) as raised:
            open_backend(str(qwen2), config, 100)
        assert str(raised.value) == f"--engine-arg {name} {said}"

    def test_what_the_engine_itself_refuses(self, qwen2: Path) -> None:
        config = BackendConfig(
            backend="vllm", engine_args={"num_gpu_blocks_override": 1, "block_size": 32}
        )
        with pytest.raises(TargetError, match=r"^vLLM cannot run target .*\. What its processes"):
            open_backend(str(qwen2), config, 512)


def test_auto_is_float32_on_a_cpu_and_never_left_to_vllm(qwen2: Path, tmp_path: Path) -> None:
    source = TargetSource(str(qwen2))
    assert engine.resolve_dtype(source, "auto") == "float32"
    assert engine.resolve_dtype(source, "bfloat16") == "bfloat16"
    with pytest.raises(UsageError, match="--dtype is 'int8'; choose one of"):
        engine.resolve_dtype(source, "int8")


class TestPlugin:
    def test_every_text_generation_architecture_is_registered(self) -> None:
        vllm.plugins.load_general_plugins()
        registered = vllm.ModelRegistry.get_supported_archs()
        names = private.text_generation_architectures()
        assert len(names) > 100
        assert all(PREFIX + name in registered for name in names)

    def test_it_makes_no_class_and_imports_nothing_heavy(self) -> None:
        code = """
import sys, vllm, torch
from vllm.model_executor.models import config, registry
before = set(sys.modules)
from vllm.plugins import load_general_plugins
load_general_plugins()
print(sorted(name for name in set(sys.modules) - before if "importlib" not in name))
"""
        (line,) = python(code).stdout.splitlines()[-1:]
        added = [name for name in json.loads(line.replace("'", '"')) if "sfdd" in name]
        assert added == [
            "sfdd",
            "sfdd.targets",
            "sfdd.targets.vllm",
            "sfdd.targets.vllm.plugin",
            "sfdd.targets.vllm.private",
        ]

    def test_a_vllm_that_moved_its_names_goes_on_without_it(self) -> None:
        code = """
from vllm.model_executor.models import registry
del registry._TEXT_GENERATION_MODELS
from vllm.plugins import load_general_plugins
load_general_plugins()
print("goes on")
"""
        done = python(code)
        assert done.stdout.endswith("goes on\n"), done.stderr
        assert "Traceback" not in done.stderr

    def test_neither_a_folder_nor_a_list_of_plugins_keeps_it_out(
        self, qwen2: Path, tmp_path: Path
    ) -> None:
        """A folder `sfdd` in the working directory, and VLLM_PLUGINS that names another plugin."""
        (tmp_path / "sfdd").mkdir()
        (tmp_path / "sfdd" / "__init__.py").write_text("raise ImportError('not this one')")
        data = write_jsonl(tmp_path / "chat.jsonl", [openai("Question", "Answer")])
        command = [Path(sys.executable).with_name("sfdd"), "score", data, "--target", qwen2]
        done = subprocess.run(
            [*command, "--run", tmp_path / "run", "--backend", "vllm"],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "VLLM_PLUGINS": "another", "VLLM_CACHE_ROOT": str(tmp_path / "c")},
        )
        assert done.returncode == 0, done.stderr
        assert "scored             1" in done.stdout
