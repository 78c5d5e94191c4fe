"""`sfdd inspect`: what a pipe, a terminal and a machine get."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from conftest import save_tiny_target
from helpers import openai, write_jsonl
from sfdd_cli.main import app
from typer.testing import CliRunner, Result

from sfdd.scoring.config import ScoreConfig
from sfdd.scoring.run import score

_SFDD = [sys.executable, "-c", "from sfdd_cli.main import app; app()", "inspect"]
_NO_SETTINGS = {name: None for name in os.environ if name.startswith("SFDD_")}
_STYLED = re.compile(r"\x1b\[([0-9;]+)m(.*?)\x1b\[0m")
ATTACK = "\x1b]0;owned\x07\x1b[2J [red]x[/red] :smile: \x9b31m\r \u202eabc \t|"
ANSWER = "Grün 😀 " + "word " * 60


def _environment(**changes: str) -> dict[str, str]:
    ours = {k: v for k, v in os.environ.items() if not k.startswith("SFDD_") and k != "NO_COLOR"}
    return ours | {"TERM": "xterm-256color", "COLUMNS": "80"} | changes


def piped(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    command = [*_SFDD, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env=_environment(**env), check=False
    )


def invoke(*arguments: object) -> Result:
    """As `piped`, without a process of its own, where the terminal does not matter."""
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)], env=_NO_SETTINGS)


def on_a_terminal(*arguments: object, **env: str) -> str:
    """What is written to a terminal of 256 colours; stderr is not one."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*_SFDD, *map(str, arguments)],
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env=_environment(**env),
    ) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                written += (piece := os.read(ours, 65536))
            except OSError:  # Linux says so at the end
                break
            if not piece:
                break
        os.close(ours)
    assert process.returncode == 0, written
    return written.decode().replace("\r\n", "\n")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    records = [
        openai("Hi", "Hello there", id="first"),
        openai(f"What is {ATTACK}?", f"One\n\nTwo {ATTACK}", id=f"odd {ATTACK}"),
        {"messages": [{"role": "ro\x1bbot", "content": "x"}], "id": "robot"},
        openai("Q" * 300 + ATTACK, "too late", id="cut"),
        openai("Hallo", ANSWER, id="long"),
    ]
    return write_jsonl(tmp_path / "chat.jsonl", records)


@pytest.fixture
def scored(data: Path, tiny_directory: Path, tmp_path: Path) -> Path:
    run = tmp_path / "run"
    score(ScoreConfig((str(data),), str(tiny_directory), run=run, token_scores=True))
    return run


def test_a_pipe_gets_supervised_text_in_brackets(
    data: Path, tiny_directory: Path, tmp_path: Path
) -> None:
    done = piped(data, "--target", tiny_directory, "--run", tmp_path / "none")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n⟦Hello there<|im_end|>⟧\n"
        "\n"
        f"{data}:0\n"
        "  id                 first\n"
        "  format             openai\n"
        "  roles              user, assistant\n"
        "  samples            1\n"
        "  tokens             34\n"
        "  supervised tokens  12\n"
        "  rewritten          no\n"
    )
    assert done.stderr == (
        f"Next: sfdd score {data} --target {tiny_directory} --run {tmp_path}/none\n"
    )


def test_numbers_of_a_scored_record(scored: Path) -> None:
    done = invoke("--id", "first", "--run", scored)
    row = pq.read_table(scored / "scores.parquet").to_pylist()[0]
    effective = 260 * row["flatness"] ** 2
    assert (
        f"\n  flatness           {row['flatness']:.6g} ({effective:.3g} effective tokens of 260)\n"
    ) in done.stdout
    assert done.stdout.endswith(f"\n  scores             {scored}/scores.parquet\n")
    assert done.stderr == f"Next: sfdd inspect --row 1 --run {scored}\n"


def test_a_terminal_gets_one_colour_where_nothing_was_scored(
    data: Path, tiny_directory: Path, tmp_path: Path
) -> None:
    shown = on_a_terminal(data, "--target", tiny_directory, "--run", tmp_path / "none")
    assert "⟦" not in shown
    assert [text for _, text in _STYLED.findall(shown)] == ["Hello there<|im_end|>"]
    assert "Effective number" not in shown


def test_a_terminal_gets_a_colour_for_each_level_of_flatness(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "sharp"
    target = save_tiny_target(tmp_path / "target", initializer_range=0.8)  # sure of some tokens
    score(ScoreConfig((str(data),), str(target), run=run, token_scores=True))
    flatness = iter(pq.read_table(run / "scores.parquet").to_pylist()[4]["token_flatness"])
    expected = ""  # the level of every character: that of the flattest of its bytes
    for character in ANSWER:
        flattest = max(next(flatness) for _ in character.encode())
        expected += str(sum(260 * flattest**2 >= bound for bound in (1.1, 2, 5, 20)))
    assert len(set(expected)) >= 4

    shown = on_a_terminal("--row", 4, "--run", run)
    conversation, _, rest = shown.partition("\nEffective number of tokens (flatness): ")
    legend = {style: label.strip() for style, label in _STYLED.findall(rest.splitlines()[0])}
    assert list(legend.values()) == [
        *("< 1.1 (0.065)", "< 2 (0.0877)", "< 5 (0.139)", "< 20 (0.277)"),
        "more",
    ]
    styled = _STYLED.findall(conversation)
    levels = "".join(str(list(legend).index(style)) * len(text) for style, text in styled)
    assert "".join(text for _, text in styled) == ANSWER + "<|im_end|>"
    assert levels[: len(ANSWER)] == expected


@pytest.mark.parametrize("term", ["xterm", "xterm-256color"])
def test_levels_differ_on_terminals_of_few_colours(term: str, scored: Path) -> None:
    shown = on_a_terminal("--row", 4, "--run", scored, TERM=term, COLORTERM="")
    legend = shown.partition("\nEffective number of tokens (flatness): ")[2].splitlines()[0]
    styles = [style for style, _ in _STYLED.findall(legend)]
    assert len(set(styles)) == 5


def test_no_color_is_heeded(data: Path, scored: Path) -> None:
    shown = on_a_terminal("--run", scored, NO_COLOR="1")
    assert "\x1b" not in shown
    assert "⟦Hello there<|im_end|>⟧" in shown


def test_data_are_text_to_a_terminal(scored: Path) -> None:
    """No title is set, no screen cleared, nothing turned around; brackets and colons are themselves."""
    spelt = r"\x1b]0;owned\x07\x1b[2J [red]x[/red] :smile: \x9b31m\x0d \u202eabc"
    shown = on_a_terminal("--row", 1, "--run", scored)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", plain)
    assert plain.count(spelt) == 3  # question, answer, id
    assert "One↵\n↵\nTwo " in plain
    assert piped("--row", 1, "--run", scored).stdout.count(spelt + " \t|") == 3


def test_skipped_records(data: Path, scored: Path) -> None:
    done = invoke("--id", "robot", "--run", scored)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith(f"{data}:2\n  id       robot\n  skipped  unknown_role: ")
    assert "\x1b" not in done.stdout
    done = invoke("--id", "cut", "--run", scored, "--max-length", 100)
    assert done.stdout.startswith("As read; not rendered:\nuser: " + "Q" * 300 + r"\x1b]0;owned")
    assert "assistant: too late\n\n" in done.stdout
    assert "  skipped  no_supervised_tokens: within 100 tokens\n" in done.stdout


def test_json_is_one_object(scored: Path) -> None:
    report = json.loads(invoke("--row", 4, "--run", scored, "--json").stdout)
    row = pq.read_table(scored / "scores.parquet").to_pylist()[4]
    (tokens,) = report["samples"]
    supervised = [token for token in tokens if token["supervised"]]
    assert "".join(t["text"] for t in supervised) == ANSWER + "<|im_end|>"
    assert [t["flatness"] for t in supervised] == row["token_flatness"]
    assert report["flatness"] == row["flatness"]
    assert (report["id"], report["row"], report["status"]) == ("long", 4, "rendered")
    report = json.loads(invoke("--row", 2, "--run", scored, "--json").stdout)
    assert (report["status"], report["samples"]) == ("skipped", [])


def test_score_now(data: Path, tiny_directory: Path, scored: Path, tmp_path: Path) -> None:
    where = ["--target", tiny_directory, "--run", tmp_path / "none"]
    live = json.loads(invoke(data, *where, "--score", "--json").stdout)
    stored = json.loads(invoke("--run", scored, "--json").stdout)
    assert live["scores"] == "live"
    assert live["flatness"] == pytest.approx(stored["flatness"], rel=1e-6)


def test_notes_and_mistakes_go_to_stderr(scored: Path) -> None:
    done = invoke("--run", scored, "--reasoning", "drop")
    assert "made with another reasoning (was keep, now drop)" in done.stderr
    assert "flatness" not in done.stdout
    done = invoke("--run", scored, "--row", 5)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "has no row 5: it has 5 records" in done.stderr
    assert invoke("--run", scored, "--row", 1, "--id", "x").exit_code == 2


def test_config_file(data: Path, scored: Path, tmp_path: Path) -> None:
    config = tmp_path / "sfdd.toml"
    config.write_text(f'[inspect]\ndata = "{data}"\nrow = 4\nrun = "{scored}"\nmax-length = 30\n')
    report = json.loads(invoke("--config", config, "--json").stdout)
    assert (report["id"], report["num_tokens"], report["truncated"]) == ("long", 30, True)
