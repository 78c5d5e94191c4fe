"""Real runs killed at random moments, over and over, until they are through (`make test-slow`)."""

import random
import signal
import subprocess
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from scoring.test_interruption import data, start, target  # noqa: F401
from scoring.test_workers import assert_equal_to_one_process, worker

from sfdd.artifacts import RunDirectory

pytestmark = pytest.mark.slow
KILLS = 24


def kill_later(process: subprocess.Popen[str], seconds: float) -> bool:
    """Whether it was still running when SIGKILL came."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
    return process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("workers", [1, 3])
def test_killed_at_random_moments(
    workers: int,
    data: Path,  # noqa: F811
    target: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Whatever was being written when the kill came, nothing is missing and nothing is there twice."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    run = tmp_path / "run"
    kills = rounds = 0
    durations = [8.0]
    while kills < KILLS:
        if RunDirectory(run).scores.exists():  # it got through: begin again, for more to kill
            assert_complete(run)
            RunDirectory(run).scores.unlink()
        rounds += 1
        assert rounds < 10 * KILLS
        started = time.monotonic()
        if workers == 1:
            processes = [start(data, target, run)]
        else:
            processes = [worker(index, workers, data, target, run) for index in range(workers)]
        deadline = moments.uniform(0.3, 1.1) * min(durations)
        for process in processes:
            killed = kill_later(process, max(0.0, started + deadline - time.monotonic()))
            kills += killed
            if not killed:
                assert process.returncode == 0, process.communicate()
                durations.append(time.monotonic() - started)
    for index in range(workers):
        last = (
            start(data, target, run) if workers == 1 else worker(index, workers, data, target, run)
        )
        _, stderr = last.communicate()
        assert last.returncode == 0, stderr
    assert_complete(run)
    assert_equal_to_one_process(data, target, run, tmp_path / "whole")


def assert_complete(run: Path) -> None:
    ids = pq.read_table(RunDirectory(run).scores)["id"].to_pylist()
    assert ids == [f"c{i}" for i in range(300)]
