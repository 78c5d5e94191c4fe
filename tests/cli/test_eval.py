"""`sfdd eval` as a user meets it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sfdd_cli.main import app
from typer.testing import CliRunner, Result

from sfdd.artifacts import Provenance
from sfdd.drafters.eagle import EagleDrafter
from sfdd.targets.transformers_target import TransformersTarget

PROMPTS = [{"id": f"{s}/{i}", "set": s, "turns": [f"Question {i}"]} for s in "ab" for i in range(2)]


@pytest.fixture
def run(tmp_path: Path, tiny_target: TransformersTarget) -> Path:
    """A run directory that holds a drafter, beside it prompts.jsonl."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in PROMPTS))
    provenance = Provenance(tiny_target.identity, {"target": tiny_target.source.name})
    EagleDrafter.for_target(tiny_target).save(tmp_path / "run/drafter", provenance)
    return tmp_path / "run"


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def test_json_is_one_object_whose_counts_add_up(run: Path) -> None:
    """In a process of its own: stdout is the object and nothing else."""
    arguments = ["eval", str(run.parent / "prompts.jsonl"), "--run", str(run), "--json"]
    arguments += ["--max-new-tokens", "10", "--num-speculative-tokens", "3", "--untrained"]
    code = "from sfdd_cli.main import app; app()"
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    assert report == json.loads((run / "eval.json").read_text())
    assert (report["num_prompts"], report["num_responses"]) == (4, 4)
    for name in ("drafter", "untrained"):
        result = report[name]
        assert result["num_identical"] == 4
        assert result["num_tokens"] == report["baseline"]["num_tokens"]
        # A response has a first token of the target's, per draft what was accepted and one token,
        # and at most one more: the last one, where there was no room for a draft.
        by_drafts = result["num_drafts"] + result["num_accepted"]
        assert by_drafts + 4 <= result["num_tokens"] <= by_drafts + 8
        assert result["acceptance_length"] == pytest.approx(result["mean_accepted"] + 1)
        assert len(result["acceptance_rate_by_position"]) == 3
        assert result["num_tokens"] == sum(s[name]["num_tokens"] for s in report["sets"].values())


def test_text_is_a_table_of_everything(run: Path) -> None:
    result = invoke(run.parent / "prompts.jsonl", "--run", run, "--max-new-tokens", 8)
    assert result.exit_code == 0, result.output
    first, *lines = result.stdout.splitlines()
    assert first == (
        "4 prompts, 4 responses of at most 8 tokens, temperature 0, 5 draft tokens per verification"
    )
    labels = [line[:21].rstrip() for line in lines[:-4] if line and not line.startswith("  ")]
    assert labels == [
        *("acceptance length tau", "mean accepted l", "acceptance rate", "drafts"),
        *("proposed tokens", "accepted tokens", "emitted tokens", "seconds", "tokens/s"),
        *("speedup", "lossless prompts"),
    ]
    assert [line.split()[0] for line in lines[-3:]] == ["drafter", "a", "b"]
    assert lines[-1].endswith("2/2")
    assert any(line.startswith("lossless prompts") and line.endswith("4/4") for line in lines)


def test_temperature_above_zero_has_no_lossless_row(run: Path) -> None:
    options = ("--max-new-tokens", 6, "--temperature", 1, "--limit", 2)
    result = invoke(run.parent / "prompts.jsonl", "--run", run, *options)
    assert result.exit_code == 0, result.output
    assert "temperature 1" in result.stdout
    assert "lossless" not in result.stdout


def test_a_config_file_gives_defaults(run: Path) -> None:
    settings = run.parent / "eval.toml"
    settings.write_text("[eval]\nmax-new-tokens = 5\nnum_speculative_tokens = 2\nlimit = 1\n")
    arguments = (run.parent / "prompts.jsonl", "--run", run, "--config", settings, "--limit", 3)
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("3 prompts, 3 responses of at most 5 tokens")


def test_prompts_default_to_the_projects_own(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    result = invoke("--run", run)
    assert result.exit_code == 2
    assert "No prompts given, and there is no data/eval_prompts.jsonl here." in result.output
    Path("data").mkdir()
    Path("prompts.jsonl").rename("data/eval_prompts.jsonl")
    assert invoke("--run", run, "--limit", 1, "--max-new-tokens", 3).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["prompts.jsonl", "--run", "new"], 1, "No drafter in new/drafter"),
        (["none.jsonl", "--run", "run"], 1, "Cannot read prompts from none.jsonl"),
        (["prompts.jsonl", "--max-new-tokens", "0"], 2, "--max-new-tokens must be at least 1"),
        (["prompts.jsonl", "--run", "new", "--untrained"], 2, "Name the target with --target"),
    ],
)
def test_a_mistake_is_one_sentence(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(run.parent)
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert result.stdout == ""
