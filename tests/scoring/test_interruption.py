"""Real processes, stopped by real signals."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from conftest import save_tiny_target
from helpers import openai, write_jsonl

from sfdd.errors import ArtifactError
from sfdd.scoring.config import ScoreConfig
from sfdd.scoring.run import score

# As `sfdd score` does, with a shard for every batch, so that there is something to lose.
SCORE = """
import sys
from sfdd.scoring import store
store._SECONDS_PER_SHARD = 0.0
from sfdd_cli.main import app
app(["score", *sys.argv[1:]])
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slow enough to be interrupted: a second or two for the data below."""
    return save_tiny_target(
        tmp_path_factory.mktemp("slow"), hidden_size=128, num_hidden_layers=4, intermediate_size=512
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = [openai(f"Question {i}", "word " * (50 + i % 37), id=f"c{i}") for i in range(300)]
    return write_jsonl(tmp_path_factory.mktemp("data") / "chat.jsonl", records)


def start(data: Path, target: Path, run: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCORE, str(data), "--target", str(target), "--run", str(run)]
    return subprocess.Popen(
        [*command, "--batch-tokens", "600"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_shards(run: Path, count: int, process: subprocess.Popen[str]) -> None:
    while len(list(run.glob("scores.partial/*.parquet"))) < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_interrupted_and_continued_equals_uninterrupted(
    how: signal.Signals, data: Path, target: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for shards in (3, 30):
        process = start(data, target, run)
        wait_for_shards(run, shards, process)
        process.send_signal(how)
        _, stderr = process.communicate()
        if how != signal.SIGKILL:
            assert process.returncode == 128 + how
            assert "run the same command again to continue" in stderr
        assert not (run / "scores.parquet").exists()

    settings = {"batch_tokens": 600}
    report = score(ScoreConfig((str(data),), str(target), run=run, **settings))
    assert 30 <= report.resumed < report.read == 300
    score(ScoreConfig((str(data),), str(target), run=tmp_path / "whole", **settings))

    continued = pq.read_table(run / "scores.parquet")
    whole = pq.read_table(tmp_path / "whole" / "scores.parquet")
    assert continued["id"].to_pylist() == [f"c{i}" for i in range(300)]
    exact = [name for name in whole.column_names if whole.schema.field(name).type != "double"]
    assert continued.select(exact).equals(whole.select(exact))
    for name in set(whole.column_names) - set(exact):  # other batches round otherwise
        assert continued[name].to_pylist() == pytest.approx(whole[name].to_pylist(), rel=1e-5)
    assert not (run / "scores.partial").exists()
    assert {path.name for path in run.iterdir() if path.suffix != ".lock"} == {"scores.parquet"}


def test_a_damaged_shard_is_scored_again(data: Path, target: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(data, target, run)
    wait_for_shards(run, 4, process)
    process.kill()
    process.communicate()
    shards = sorted(run.glob("scores.partial/*.parquet"))
    shards[0].write_bytes(shards[0].read_bytes()[:100])
    shards[1].write_bytes(b"")
    report = score(ScoreConfig((str(data),), str(target), run=run))
    assert report.read == report.scored == 300


def test_a_shard_of_another_target_is_refused(data: Path, target: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(data, target, run)
    wait_for_shards(run, 1, process)
    process.kill()
    process.communicate()
    other = save_tiny_target(tmp_path / "other", seed=1)
    with pytest.raises(ArtifactError, match=r"holds scores made with another target \(was "):
        score(ScoreConfig((str(data),), str(other), run=run))


def test_two_processes_on_one_run(data: Path, target: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(data, target, run)
    wait_for_shards(run, 1, process)
    with pytest.raises(ArtifactError, match=rf"is in use: process {process.pid} on \S+ is doing"):
        score(ScoreConfig((str(data),), str(target), run=run))
    process.kill()
    process.communicate()
    assert score(ScoreConfig((str(data),), str(target), run=run)).read == 300
