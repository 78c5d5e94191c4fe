"""`sfdd export` as it is typed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import save_tiny_target
from safetensors.torch import load_file, save_file
from sfdd_cli.main import app
from typer.testing import CliRunner, Result

from sfdd.artifacts import Provenance
from sfdd.drafters.loading import new_drafter
from sfdd.targets.transformers_target import TransformersTarget


def sfdd(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an EAGLE-3 drafter, and its target beside."""
    folder = tmp_path_factory.mktemp("export")
    save_tiny_target(folder / "target", num_hidden_layers=8)
    target = TransformersTarget.load(str(folder / "target"))
    provenance = Provenance(dict(target.identity), {"target": str(folder / "target")})
    drafter = new_drafter("eagle3", target, draft_to_target=torch.arange(10, 110))
    drafter.save(folder / "run/drafter", provenance)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "here")
    return tmp_path / "here"


def lines(result: Result) -> list[str]:
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


def test_export_then_check(folder: Path) -> None:
    run, target = folder / "run", folder / "target"
    result = sfdd("--for", "sglang", "--run", run, "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    output = run / "export/sglang"
    assert result.stdout.startswith(f"Wrote {output} for SGLang\n")
    assert "method eagle3" in lines(result)
    assert "aux layers 2, 4, 5" in lines(result)
    assert "draft vocabulary 100" in lines(result)
    assert f"Next: sfdd export --check {output} --for sglang\n" in result.stderr

    result = sfdd("--check", output, "--for", "sglang", "--target", target)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"SGLang would load {output}\n")
    assert any(line.startswith("draft step drafts token ") for line in lines(result))
    assert "--speculative-algorithm EAGLE3 --speculative-draft-model-path" in result.stderr


def test_what_was_trained_is_checked_by_default(folder: Path) -> None:
    result = sfdd("--check", "--for", "vllm", "--run", folder / "run")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"vLLM would load {folder / 'run/drafter'}\n")
    assert any(line.startswith("draft step drafts token ") for line in lines(result))
    result = sfdd("--check", "--for", "vllm", "--run", folder / "run", "--files-only")
    assert "draft step not run: the files alone were checked" in lines(result)
    assert '--speculative-config \'{"method": "eagle3", "model": ' in result.stderr


def test_a_rejection_is_one_sentence(folder: Path) -> None:
    path = folder / "run/drafter/model.safetensors"
    tensors = load_file(path)
    tensors["d2t"] = tensors["d2t"] + torch.arange(100)
    save_file(tensors, path)
    result = sfdd("--check", folder / "run/drafter", "--for", "vllm")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        "Error: d2t holds the target's token ids, and engines add the draft token's own id to what it "
        "holds: subtract 0, 1, 2 … from them.\n"
    )
    result = sfdd("--for", "vllm", "--run", folder / "run")
    assert result.exit_code == 1
    assert result.stderr.startswith(
        f"Error: The drafter in {folder / 'run/drafter'} cannot be exported: d2t holds"
    )
    assert not (folder / "run/export/vllm").exists()


def test_json(folder: Path) -> None:
    run = folder / "run"
    report = json.loads(sfdd("--for", "vllm", folder / "out", "--run", run, "--json").stdout)
    assert report["output"] == str(folder / "out")
    assert report["described"]["aux_layers"] == [2, 4, 5]
    check = ["--for", "vllm", "--check", folder / "out", "--json"]
    report = json.loads(sfdd(*check).stdout)
    assert (report["accepted"], report["rejections"], report["not_drafted"]) == (True, [], None)
    assert 0 <= report["drafted"] < 260
    report = json.loads(sfdd(*check, "--files-only").stdout)
    assert (report["accepted"], report["drafted"]) == (True, None)
    (folder / "out/pytorch_model.bin").write_bytes(b"")
    result = sfdd("--for", "vllm", "--check", folder / "out", "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["accepted"], len(report["rejections"])) == (1, False, 1)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--for", "tgi"], "--for is 'tgi'; choose one of vllm, sglang."),
        (
            ["--for", "vllm", "--dtype", "int8"],
            "--dtype is 'int8'; choose one of bfloat16, float16, ",
        ),
        (
            ["--for", "vllm", "--check", "--dtype", "float16"],
            "--check writes nothing, so --dtype has no meaning with it: leave it out.",
        ),
        (
            ["--for", "vllm", "--check", "--overwrite"],
            "--check writes nothing, so --overwrite has no",
        ),
        (
            ["--for", "vllm", "--check", "--files-only", "--target", "smollm2"],
            "--files-only loads no target, but --target names one: leave out one of the two.",
        ),
        *(
            (
                ["--for", "vllm", *option],
                f"{option[0]} is for --check, which alone loads a target: leave it out, or add --check.",
            )
            for option in (
                ["--target", "smollm2"],
                ["--device", "cpu"],
                ["--trust-remote-code"],
                ["--files-only"],
            )
        ),
    ],
)
def test_a_wrong_option(arguments: list[str], complaint: str) -> None:
    result = sfdd(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: {complaint}")
    assert result.stderr.count("\n") == 1


def test_the_environments_target_is_no_option_of_an_export(folder: Path) -> None:
    result = CliRunner().invoke(
        app,
        ["export", "--for", "vllm", "--run", str(folder / "run")],
        env={"SFDD_TARGET": "my/model"},
    )
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("kind", ["embedded", "gguf"])
def test_the_target_to_serve_is_one_that_engines_read(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded one by where it lies; a GGUF file is none."""
    gguf = folder / "target/model.gguf"
    gguf.touch()
    monkeypatch.setattr("sfdd.targets.smollm2.locate", lambda: str(folder / "target"))
    name = "smollm2" if kind == "embedded" else str(gguf)
    provenance = {"identity": {}, "about": {"target": name}}
    (folder / "run/drafter/provenance.json").write_text(json.dumps(provenance))
    result = sfdd("--check", "--for", "vllm", "--run", folder / "run", "--files-only")
    served = str(folder / "target") if kind == "embedded" else "TARGET"
    assert f"Next: vllm serve {served} --speculative-config" in result.stderr


def test_a_run_without_a_drafter(tmp_path: Path) -> None:
    for arguments in (["--for", "vllm"], ["--for", "vllm", "--check"]):
        result = sfdd(*arguments, "--run", tmp_path)
        assert result.exit_code == 1
        assert result.stderr == (
            f"Error: There is no directory {tmp_path / 'drafter'}. Train a drafter with "
            "'sfdd train-draft'.\n"
        )


def test_the_configuration_file(folder: Path) -> None:
    config = folder / "sfdd.toml"
    config.write_text(f'[export]\nengine = "vllm"\nrun = "{folder / "run"}"\ndtype = "float16"\n')
    result = sfdd("--config", config, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["described"]["dtype"] == "float16"


@pytest.mark.parametrize("command", ["export", "export-data"])
def test_help_imports_nothing_heavy(command: str) -> None:
    code = (
        "import sys; from sfdd_cli.main import app\n"
        "try: app()\n"
        "finally: print([m for m in ('torch', 'transformers', 'pyarrow', 'datasets', 'safetensors')"
        " if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, command, "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("Usage:")
    assert done.stderr.strip() == "[]"
