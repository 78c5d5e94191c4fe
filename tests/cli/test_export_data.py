"""`sfdd export-data` as it is typed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import openai, write_jsonl
from sfdd_cli.main import app
from typer.testing import CliRunner, Result


def sfdd(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    chats = [openai(f"Question {i}", "word " * (i + 1), id=f"c{i}") for i in range(6)]
    system = openai("Hi", "Hello!", id="system")
    system["messages"].insert(0, {"role": "system", "content": "Be brief."})
    return write_jsonl(tmp_path / "chat.jsonl", [*chats, system, "{broken"])


def lines(result: Result) -> list[str]:
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


def test_after_score_and_filter_nothing_need_be_said(
    data: Path, tiny_directory: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert sfdd("score", data, "--target", tiny_directory, "--run", run).exit_code == 0
    assert sfdd("filter", "--run", run, "--keep-rows", 4).exit_code == 0
    result = sfdd("export-data", "--for", "speculators", "--run", run)
    assert result.exit_code == 0, result.output
    output = run / "export/speculators.jsonl"
    assert result.stdout.startswith(f"Wrote {output} for Speculators\n")
    assert "written 4 as tokens, 4 rows" in lines(result)
    assert f"data {run / 'distilled/chat.jsonl'}" in lines(result)
    assert result.stderr.endswith(f"Next: Speculators: speculators prepare-data --data {output}\n")
    row = json.loads(output.read_text(encoding="utf-8").splitlines()[0])
    assert row.keys() == {"id", "input_ids", "loss_mask"}


def test_named_data_and_output(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    result = sfdd("export-data", "--for", "eagle", out, "--data", data, "--run", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "read 8" in lines(result)
    assert "written 6 as text, 6 rows" in lines(result)
    assert "skipped 2 (role_the_trainer_does_not_know 1, unreadable 1)" in lines(result)
    assert f"provenance {out}.provenance" in lines(result)
    assert result.stderr.endswith(f"Next: EAGLE: main.py --trainpath {out}\n")


def test_json(data: Path, tmp_path: Path) -> None:
    result = sfdd(
        "export-data",
        "--for",
        "modelopt",
        tmp_path / "out",
        "--data",
        data,
        "--json",
        "--run",
        tmp_path,
    )
    report = json.loads(result.stdout)
    assert (report["read"], report["written"], report["skipped"]) == (8, 7, 1)
    assert report["reasons"] == {"unreadable": 1}
    assert report["hand_over"] == f"data.data_path={tmp_path / 'out'}"


@pytest.mark.parametrize("option", ["--target", "--max-length", "--rewritten"])
def test_an_option_that_text_does_without(option: str, data: Path, tmp_path: Path) -> None:
    value = {"--target": "smollm2", "--max-length": 512, "--rewritten": "last"}[option]
    given = ["export-data", tmp_path / "out", "--data", data, option, value]
    for trainer, instead in (("eagle", ""), ("specforge", ", or add --form tokens")):
        result = sfdd(*given, "--for", trainer)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith(f"Error: {option} is for tokens, but what ")
        assert result.stderr.endswith(f"leave it out{instead}.\n")
    result = CliRunner().invoke(
        app, [*map(str, given[:4]), "--for", "eagle"], env={"SFDD_TARGET": "my/model"}
    )
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (
            ["--for", "axolotl"],
            2,
            "--for is 'axolotl'; choose one of eagle, specforge, speculators",
        ),
        (["--for", "eagle", "--form", "xml"], 2, "--form is 'xml'; choose one of text, tokens."),
        (["--for", "eagle", "--form", "tokens"], 2, "EAGLE takes conversations, not tokens: leave"),
        (["--for", "eagle", "--reasoning", "x"], 2, "--reasoning is 'x'; it must be one of keep"),
        (["--for", "eagle", "--max-length", "1"], 2, "--max-length must be at least 2."),
        (
            ["--for", "speculators"],
            2,
            "Tokens are made by a target's tokenizer, and nothing was scored",
        ),
        (["--for", "eagle", "--data", "no.jsonl"], 1, "Data set no.jsonl does not exist."),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], code: int, complaint: str, data: Path, tmp_path: Path
) -> None:
    given = [] if "--data" in arguments else ["--data", data]
    result = sfdd("export-data", tmp_path / "out", "--run", tmp_path / "run", *given, *arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith(f"Error: {complaint}")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_configuration_file(data: Path, tmp_path: Path) -> None:
    config = tmp_path / "sfdd.toml"
    config.write_text(
        f'[export-data]\ntrainer = "specforge"\ndata = "{data}"\nrun = "{tmp_path / "run"}"\n'
    )
    result = sfdd("export-data", "--config", config, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["output"] == str(tmp_path / "run/export/specforge.jsonl")


def test_text_needs_no_torch(data: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from sfdd_cli.main import app\n"
        "try: app()\n"
        "finally: print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    arguments = ["export-data", "--for", "eagle", tmp_path / "out", "--data", data, "--json"]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"
