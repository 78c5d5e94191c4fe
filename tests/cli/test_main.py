"""Manners of the command line: what is printed where, and how it ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import openai, write_jsonl

from sfdd import __version__


def sfdd(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from sfdd_cli.main import app; app()", *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "200", **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    records = [openai(f"Question {i}", "word " * (i + 1), id=f"c{i}") for i in range(6)]
    return write_jsonl(tmp_path / "chat.jsonl", [*records, "{broken"])


def test_version() -> None:
    assert sfdd("--version").stdout == f"sfdd {__version__}\n"


@pytest.mark.parametrize("command", ["", "score", "filter", "train-draft", "eval", "inspect"])
def test_help_imports_nothing_heavy(command: str) -> None:
    code = (
        "import sys; from sfdd_cli.main import app\n"
        "try: app()\n"
        "finally: print([m for m in ('torch', 'transformers', 'pyarrow', 'datasets')"
        " if m in sys.modules], file=sys.stderr)"
    )
    arguments = [command] if command else []
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("Usage:")
    assert done.stderr.strip() == "[]"


def test_the_common_path_repeats_no_argument(
    data: Path, tiny_directory: Path, tmp_path: Path
) -> None:
    """score -> filter, with the run directory from the environment."""
    env = {"SFDD_RUN": str(tmp_path / "run")}
    scored = sfdd("score", data, "--target", tiny_directory, env=env)
    assert scored.returncode == 0, scored.stderr
    assert "read               7" in scored.stdout
    assert "skipped            1 (unreadable 1)" in scored.stdout
    assert "Next: sfdd filter --keep 0.5" in scored.stderr
    assert "conversations/s" in scored.stderr
    filtered = sfdd("filter", "--keep", "0.5", env=env)
    assert filtered.returncode == 0, filtered.stderr
    assert filtered.stdout.startswith("Kept 3 of 6 scored conversations by flatness\n")
    assert "Next: sfdd train-draft" in filtered.stderr


def test_json_is_one_object_on_stdout(data: Path, tiny_directory: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    report = json.loads(
        sfdd("score", data, "--target", tiny_directory, "--run", run, "--json").stdout
    )
    assert (report["read"], report["scored"], report["skipped"]) == (7, 6, 1)
    report = json.loads(sfdd("filter", "--run", run, "--json").stdout)
    assert report["kept"] == 3


def test_a_users_mistake_is_one_sentence() -> None:
    done = sfdd("score", "no/such.jsonl", "--target", "smollm2")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        "Error: Data set no/such.jsonl does not exist. Give a JSONL, JSON, Parquet or Arrow file, a "
        "folder made by save_to_disk, or a hub id such as org/name.\n"
    )


def test_debug_shows_the_traceback() -> None:
    done = sfdd("--debug", "score", "no/such.jsonl", "--target", "smollm2")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("keep", ["0", "1.5", "-1", "nan"])
def test_keep_outside_its_range_is_a_usage_error(keep: str, tmp_path: Path) -> None:
    done = sfdd("filter", "--keep", keep, "--run", tmp_path)
    assert done.returncode == 2
    assert "it is the fraction to keep, above 0 and at most 1." in done.stderr


def test_an_unknown_option_is_a_usage_error() -> None:
    assert sfdd("score", "--no-such-option").returncode == 2


class TestConfigFile:
    def test_flag_then_environment_then_file_then_default(
        self, data: Path, tiny_directory: Path, tmp_path: Path
    ) -> None:
        config = tmp_path / "sfdd.toml"
        config.write_text(
            f'[score]\ntarget = "{tiny_directory}"\nmax-length = 200\n'
            f'run = "{tmp_path / "from-file"}"\ndata = "{data}"\n[filter]\nkeep = 0.25\n'
        )
        flag = tmp_path / "from-flag"
        env = {"SFDD_RUN": str(tmp_path / "from-environment")}
        for extra, expected, environment in (
            (["--run", flag], flag, env),
            ([], tmp_path / "from-environment", env),
            ([], tmp_path / "from-file", None),
        ):
            done = sfdd("score", "--config", config, "--json", *extra, env=environment)
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["scores"] == str(expected / "scores.parquet")
        done = sfdd("filter", "--config", config, "--run", flag, "--json")
        assert json.loads(done.stdout)["keep"] == 0.25

    def test_an_unknown_key_names_the_near_one(self, tmp_path: Path) -> None:
        config = tmp_path / "sfdd.toml"
        config.write_text("[filter]\nkep = 0.25\n")
        done = sfdd("filter", "--config", config)
        assert done.returncode == 2
        assert "unknown key 'kep'; did you mean 'keep'?" in done.stderr

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            ("[fitler]\n", "unknown table [fitler]; did you mean 'filter'?"),
            ("filter = 5\n", "filter is not a table; write [filter]"),
            ("keep = 5\n", "unknown table [keep]"),
        ],
    )
    def test_a_table_that_is_none(self, content: str, complaint: str, tmp_path: Path) -> None:
        config = tmp_path / "sfdd.toml"
        config.write_text(content)
        done = sfdd("filter", "--config", config)
        assert done.returncode == 2
        assert complaint in done.stderr

    def test_a_broken_file(self, tmp_path: Path) -> None:
        config = tmp_path / "sfdd.toml"
        config.write_text("[filter\n")
        done = sfdd("filter", "--config", config)
        assert done.returncode == 2
        assert f"cannot read {config}" in done.stderr
