"""`sfdd filter` as it is typed."""

import json
from pathlib import Path
from typing import Any

import pytest
from filtering.helpers import make_run, write_lines
from sfdd_cli.main import app
from typer.testing import CliRunner, Result

FLAT = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path, {"chat.jsonl": FLAT}, num_turns=[1, 1, 2, 2, 3, 3, 9, 9])


def sfdd(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["filter", *map(str, arguments)])


def report(*arguments: object) -> dict[str, Any]:
    result = sfdd(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_every_budget(run: Path) -> None:
    assert report("--run", run)["kept"] == 4
    assert report("--run", run, "--keep", "0.25")["kept"] == 2
    assert report("--run", run, "--keep-rows", 3)["kept"] == 3
    assert report("--run", run, "--keep-tokens", 150)["supervised_tokens_kept"] == 150
    band = report("--run", run, "--band", "0.2:0.8")
    assert (band["kept"], band["band"], band["keep"]) == (4, [0.2, 0.8], None)
    assert (band["threshold"], band["upper_threshold"]) == (0.3, 0.6)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--keep", "0.5", "--keep-rows", "3"], "--keep and --keep-rows exclude each other."),
        (["--keep-rows", "3", "--keep-tokens", "5"], "--keep-rows and --keep-tokens exclude"),
        (["--band", "0.2"], "--band is '0.2'; write two fractions, such as 0.2:0.8."),
        (["--band", "a:b"], "--band is 'a:b'; write two fractions"),
        (["--band", "nan:1"], "--band is 'nan:1'; write two fractions"),
        (["--band", "0.8:0.2"], "--band is 0.8:0.2; it is two fractions from 0 to 1, the lower"),
        (["--match-length"], "--match-length draws at random"),
        (["--metric", "mine"], "--metric is 'mine'; choose one of flatness"),
        (["--by", "topic"], "--by is 'topic'; choose one of length, turns, id"),
    ],
)
def test_a_wrong_option_is_one_sentence(run: Path, options: list[str], complaint: str) -> None:
    result = sfdd("--run", run, *options)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"Error: {complaint}")
    assert result.stderr.count("\n") == 1
    assert not (run / "selection.parquet").exists()


class TestConfigFile:
    def test_a_flag_replaces_the_files_budget(self, run: Path, tmp_path: Path) -> None:
        config = tmp_path / "sfdd.toml"
        config.write_text('[filter]\nkeep = 0.25\nby = "turns"\n')
        assert report("--config", config, "--run", run)["keep"] == 0.25
        result = report("--config", config, "--run", run, "--keep-rows", 5)
        assert (result["kept"], result["keep"], result["by"]) == (5, None, "turns")

    def test_other_budgets_in_the_file(self, run: Path, tmp_path: Path) -> None:
        config = tmp_path / "sfdd.toml"
        config.write_text('[filter]\nband = "0.2:0.8"\n')
        assert report("--config", config, "--run", run)["kept"] == 4
        config.write_text("[filter]\nkeep-rows = 3\n")
        assert report("--config", config, "--run", run)["kept"] == 3
        config.write_text("[filter]\nkeep-rows = 3\nkeep = 0.5\n")
        assert sfdd("--config", config, "--run", run).exit_code == 2


def test_what_people_read(run: Path, tmp_path: Path) -> None:
    own = write_lines(
        tmp_path / "own.jsonl", [{"id": str(i), "topic": "ab"[i % 2]} for i in range(8)]
    )
    result = sfdd("--run", run, "--keep-rows", "4", "--join", own, "--by", "topic")
    assert result.exit_code == 0
    assert result.stdout.startswith("Kept 4 of 8 scored conversations by flatness\n")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "retention ratio 0.500 (asked for 4 conversations, by topic)" in lines
    assert "joined 8 conversations" in lines
    assert "kept by turns 1 0.0% 0 of 2" in lines
    assert "9+ 100.0% 2 of 2" in lines
    assert "kept by topic a 50.0% 2 of 4" in lines
    assert "kept by source" not in result.stdout  # there is but one
    assert "Next: sfdd train-draft" in result.stderr


def test_a_budget_without_room(run: Path) -> None:
    result = sfdd("--run", run, "--keep-tokens", "5")
    assert result.exit_code == 1
    assert result.stderr.startswith(
        "Error: --keep-tokens 5 has no room for a single conversation: the first to keep has more"
    )
    result = sfdd("--run", run, "--band", "0.51:0.52")
    assert result.exit_code == 1
    assert result.stderr == "Error: No conversation lies inside the band. Give a wider one.\n"
