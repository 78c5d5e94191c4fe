"""`sfdd train-draft` as a process: what it prints, how it ends, and that it goes on after a signal."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers import openai
from safetensors.torch import load_file
from sfdd_cli.main import app
from typer.testing import CliRunner, Result

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the subprocesses below, whose sums must come out the same."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    records = [openai(f"Count from {n}", f"{n} {n + 1} {n + 2}") for n in range(20)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def arguments(data: Path, tiny_directory: Path) -> list[str]:
    """A training of many small steps."""
    options = ["--batch-tokens", "128", "--epochs", "25", "--checkpoint-every", "10"]
    return ["train-draft", str(data), "--target", str(tiny_directory), *options]


@pytest.fixture
def run(tiny_directory: Path) -> Run:
    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(app, list(arguments))

    return invoke


def _weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "drafter/model.safetensors")


def _start(arguments: list[str]) -> subprocess.Popen[str]:
    code = "from sfdd_cli.main import app; app()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_real_signal_amid_training_then_the_same_command_again(
    sent: signal.Signals, tmp_path: Path, arguments: list[str], run: Run
) -> None:
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    process = _start([*arguments, "--run", str(stopped)])
    _wait_for(stopped / "drafter/checkpoints/step-10", process)
    process.send_signal(sent)
    stdout, stderr = process.communicate(timeout=60)
    assert stdout == ""
    assert "Traceback" not in stderr
    if sent != signal.SIGKILL:
        assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[sent]
        assert stderr.endswith(
            "Interrupted. What was finished is kept: run the same command again to continue.\n"
        )
    else:
        assert process.returncode == -signal.SIGKILL
    assert not (stopped / "drafter/provenance.json").exists()

    again = run(*arguments, "--run", str(stopped))
    assert again.exit_code == 0, again.output
    assert run(*arguments, "--run", str(whole)).exit_code == 0
    expected = _weights(whole)
    for name, weight in _weights(stopped).items():
        assert torch.equal(weight, expected[name]), name


def test_summary_on_stdout_next_command_on_stderr(
    tmp_path: Path, arguments: list[str], run: Run
) -> None:
    result = run(*arguments, "--run", str(tmp_path / "run"), "--epochs", "1")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"Trained {tmp_path}/run/drafter"
    assert [line.split("  ")[1] for line in lines[1:]] == [
        "method",
        "conversations",
        "held out",
        "skipped",
        "truncated",
        "steps",
        "tokens",
        "training loss",
        "held-out loss",
        "held-out top-1 agreement",
        "held-out tau, estimated",
        "time",
    ]
    assert result.stderr.endswith(f"Next: sfdd eval --run {tmp_path}/run\n")


def test_json_and_nothing_to_do(tmp_path: Path, data: Path, arguments: list[str], run: Run) -> None:
    with data.open("a") as file:
        file.write('{"messages": []}\nnot json\n')
    command = [*arguments, "--run", str(tmp_path / "run"), "--epochs", "1", "--json"]
    first, second = run(*command), run(*command)
    report, again = json.loads(first.stdout), json.loads(second.stdout)
    assert sum(report["skipped"].values()) == 2
    assert (report["conversations"], report["held_out_conversations"]) == (19, 1)
    assert report["held_out_after"]["loss"] < report["held_out_before"]["loss"]
    assert again == report | {"already_finished": True}
    assert "Nothing to do: this training is finished already.\n" in second.stderr


def test_data_and_target_default_to_those_of_the_run(
    tmp_path: Path, data: Path, tiny_directory: Path, arguments: list[str], run: Run
) -> None:
    where = ["--run", str(tmp_path / "run")]
    assert run("score", str(data), "--target", str(tiny_directory), *where).exit_code == 0
    assert run("filter", "--keep", "0.5", *where).exit_code == 0
    result = run("train-draft", *where, "--max-steps", "1", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["conversations"] + report["held_out_conversations"] == 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "Data set {data} is empty. Give one with at least one record."),
        (
            "[]",
            "No training data in {data}: there are no records. "
            "Give conversations with assistant turns.",
        ),
        (
            '{"messages": []}\nnot json\n{"messages": []}\n',
            "No training data in {data}: every record was skipped "
            "(2 empty_conversation, 1 unreadable). Give conversations with assistant turns.",
        ),
        (
            json.dumps({"messages": [{"role": "user", "content": "Hello?"}]}) + "\n",
            "No training data in {data}: every record was skipped (1 no_assistant_turn). "
            "Give conversations with assistant turns.",
        ),
    ],
    ids=["empty", "no-records", "all-skipped", "no-answers"],
)
def test_no_training_data(
    content: str, message: str, tmp_path: Path, data: Path, arguments: list[str], run: Run
) -> None:
    data.write_text(content)
    result = run(*arguments, "--run", str(tmp_path / "run"))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.endswith(f"Error: {message.replace('{data}', str(data))}\n")


def test_nothing_given_and_nothing_in_the_run(
    tmp_path: Path, data: Path, tiny_directory: Path, run: Run
) -> None:
    empty = tmp_path / "run"
    no_target = run("train-draft", str(data), "--run", str(empty))
    assert (no_target.exit_code, no_target.stderr) == (
        2,
        f"Error: No target given, and nothing was scored in {empty}: give --target.\n",
    )
    no_data = run("train-draft", "--target", str(tiny_directory), "--run", str(empty))
    assert (no_data.exit_code, no_data.stderr) == (
        2,
        f"Error: No training data given, and {empty} has no distilled data. "
        "Name a data set, or make one with 'sfdd filter'.\n",
    )


def test_impossible_setting(arguments: list[str], run: Run) -> None:
    result = run(*arguments, "--epochs", "0")
    assert (result.exit_code, result.stderr) == (
        2,
        "Error: --epochs is 0; it must be at least 1.\n",
    )


def test_output_in_the_way(tmp_path: Path, arguments: list[str], run: Run) -> None:
    (tmp_path / "run").write_text("a file")
    result = run(*arguments, "--run", str(tmp_path / "run"))
    assert (result.exit_code, result.stderr) == (
        1,
        f"Error: Cannot write to {tmp_path}/run/drafter: Not a directory. "
        "Choose another place with --run.\n",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--method", "eagle3", "--aux-layers", "low,high"],
            "--aux-layers is 'low,high'; write numbers of layers with commas between, such as 2,15,27.",
        ),
        (
            ["--method", "eagle3", "--aux-layers", "1,9"],
            "--aux-layers is 1,9; it must be 2 different layers of the target, from 1 to 2.",
        ),
        (
            ["--aux-layers", "1,2"],
            "--aux-layers is for --method eagle3, and the method is eagle. Leave one of them out.",
        ),
        (
            ["--fsdp"],
            "--fsdp shards the drafter over several processes, and this is one. Start sfdd with "
            "'torchrun --nproc-per-node N', or leave --fsdp out.",
        ),
    ],
)
def test_mistakes_about_methods(
    options: list[str], message: str, tmp_path: Path, arguments: list[str], run: Run
) -> None:
    result = run(*arguments, *options, "--run", str(tmp_path / "run"))
    assert (result.exit_code, result.stderr) == (2, f"Error: {message}\n")


def test_eagle3_by_its_options(tmp_path: Path, arguments: list[str], run: Run) -> None:
    options = ["--method", "eagle3", "--aux-layers", "2, 1", "--draft-vocab-size", "8"]
    options += ["--ttt-steps", "3", "--loss", "lk", "--cache", str(tmp_path / "cache"), "--json"]
    options += ["--precision", "bf16", "--keep-checkpoints", "1", "--tracker", "none"]
    result = run(*arguments, *options, "--run", str(tmp_path / "run"), "--epochs", "1")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["method"], report["draft_vocab_size"]) == ("eagle3", 8)
    assert len(report["held_out_after"]["agreement"]) == 5
    drafter = json.loads((tmp_path / "run/drafter/config.json").read_text())
    assert drafter["architectures"] == ["LlamaForCausalLMEagle3"]
    assert drafter["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert drafter["draft_vocab_size"] == 8
    identity = json.loads((tmp_path / "run/drafter/provenance.json").read_text())["identity"]
    assert identity["aux_layers"] == [1, 2]
    assert (identity["ttt_steps"], identity["loss"], identity["precision"]) == (3, "lk", "bf16")


def test_a_draft_vocabulary_is_no_larger_than_the_tokens_there_are(
    tmp_path: Path, arguments: list[str], run: Run
) -> None:
    """Ten digits, the space and the end-of-turn token."""
    options = ["--method", "eagle3", "--run", str(tmp_path / "run"), "--max-steps", "1"]
    result = run(*arguments, *options)
    assert "draft vocabulary          12 tokens" in result.stdout


def test_time_that_is_up_says_how_to_go_on(tmp_path: Path, arguments: list[str], run: Run) -> None:
    command = [*arguments, "--run", str(tmp_path / "run")]
    result = run(*command, "--max-hours", "1e-9")
    assert result.exit_code == 124
    assert result.stdout.startswith(f"Not finished: {tmp_path}/run/drafter\n")
    assert "Stopped after --max-hours 1e-09, at step 1 of " in result.stderr
    assert result.stderr.endswith(": run the same command again to continue.\n")
    assert run(*command, "--max-steps", "5").exit_code == 1  # another training
    assert run(*command).exit_code == 0


def test_changed_setting_is_refused(tmp_path: Path, arguments: list[str], run: Run) -> None:
    command = [*arguments, "--run", str(tmp_path / "run"), "--max-steps", "2"]
    assert run(*command).exit_code == 0
    result = run(*command, "--learning-rate", "0.5")
    assert result.exit_code == 1
    assert "learning_rate (was 0.001, now 0.5)" in result.stderr
    assert run(*command, "--learning-rate", "0.5", "--overwrite").exit_code == 0


def test_settings_from_a_file(tmp_path: Path, arguments: list[str], run: Run) -> None:
    (tmp_path / "sfdd.toml").write_text("[train-draft]\nmax-steps = 3\nlearning-rate = 1e-3\n")
    command = [*arguments, "--run", str(tmp_path / "run"), "--config", str(tmp_path / "sfdd.toml")]
    result = run(*command, "--json", "--max-steps", "2")
    assert json.loads(result.stdout)["steps"] == 2
    provenance = json.loads((tmp_path / "run/drafter/provenance.json").read_text())
    assert provenance["identity"]["learning_rate"] == 1e-3


def test_a_kept_drafter_can_be_moved(tmp_path: Path, arguments: list[str], run: Run) -> None:
    """The report names the directory it is read from, not the one it was trained in."""
    command = [*arguments, "--max-steps", "1", "--json"]
    assert run(*command, "--run", str(tmp_path / "old")).exit_code == 0
    shutil.move(tmp_path / "old", tmp_path / "new")
    result = run(*command, "--run", str(tmp_path / "new"))
    assert json.loads(result.stdout)["drafter"] == f"{tmp_path}/new/drafter"
