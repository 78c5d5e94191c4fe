"""Several real processes on one run directory, one of them killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from helpers import openai, write_jsonl
from scoring.test_interruption import SCORE, data, target, wait_for_shards  # noqa: F401

from sfdd.artifacts import RunDirectory
from sfdd.errors import ArtifactError, UsageError
from sfdd.scoring.config import ScoreConfig
from sfdd.scoring.run import score
from sfdd.scoring.workers import Worker, this_worker

TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "3"]


def test_workers_share_every_row_once() -> None:
    workers = [Worker(index, 3) for index in range(3)]
    for rows in range(10):
        assert sum(worker.share(rows) for worker in workers) == rows
        assert all(sum(worker.takes(row) for worker in workers) == 1 for row in range(rows))
        assert [w.share(rows) for w in workers] == [
            sum(w.takes(row) for row in range(rows)) for w in workers
        ]


def test_who_says_which_worker_this_is() -> None:
    launched = {"RANK": "2", "WORLD_SIZE": "4"}
    assert this_worker(None, None, {}) == Worker(0, 1)
    assert this_worker(None, None, launched) == Worker(2, 4)
    assert this_worker(1, 3, launched) == Worker(1, 3)
    with pytest.raises(UsageError, match="--shard-index is 3 of 3 shards; it must be from 0 to 2"):
        Worker(3, 3)
    with pytest.raises(UsageError, match="go together"):
        ScoreConfig(("d",), "t", shard_index=1)
    with pytest.raises(UsageError, match="--overwrite is for one process"):
        ScoreConfig(("d",), "t", shard_index=1, num_shards=2, overwrite=True)


def worker(
    index: int,
    count: int,
    data: Path,  # noqa: F811
    target: Path,  # noqa: F811
    run: Path,
) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCORE, str(data), "--target", str(target), "--run", str(run)]
    command += ["--batch-tokens", "600", "--shard-index", str(index), "--num-shards", str(count)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )


def finish(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    outputs = []
    for process in processes:
        stdout, stderr = process.communicate()
        assert process.returncode == 0, stderr
        outputs.append(stdout)
    return outputs


def assert_equal_to_one_process(data: Path, target: Path, run: Path, whole: Path) -> None:  # noqa: F811
    score(ScoreConfig((str(data),), str(target), run=whole, batch_tokens=600))
    together = pq.read_table(RunDirectory(run).scores)
    alone = pq.read_table(RunDirectory(whole).scores)
    exact = [name for name in alone.column_names if alone.schema.field(name).type != "double"]
    assert together.select(exact).equals(alone.select(exact))
    for name in set(alone.column_names) - set(exact):  # other batches round otherwise
        assert together[name].to_pylist() == pytest.approx(alone[name].to_pylist(), rel=1e-5)


def test_one_of_three_workers_is_killed_and_started_again(
    data: Path,  # noqa: F811
    target: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    processes = [worker(index, 3, data, target, run) for index in range(3)]
    wait_for_shards(run, 6, processes[1])
    processes[1].send_signal(signal.SIGKILL)
    processes[1].communicate()
    outputs = finish([processes[0], processes[2]])
    assert all("the last worker to finish merges all" in output for output in outputs)
    assert not RunDirectory(run).scores.exists()
    (output,) = finish([worker(1, 3, data, target, run)])
    assert "read               300" in output
    assert not RunDirectory(run).shards.exists()
    assert_equal_to_one_process(data, target, run, tmp_path / "whole")


def test_torchrun_needs_nothing_else(
    data: Path,  # noqa: F811
    target: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    script = tmp_path / "score.py"
    script.write_text(SCORE)
    command = [sys.executable, *TORCHRUN, str(script), str(data), "--target", str(target)]
    # torchrun takes a --run behind the script for one of its own options.
    environment = {**os.environ, "SFDD_RUN": str(run)}
    done = subprocess.run(
        [*command, "--batch-tokens", "600"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert_equal_to_one_process(data, target, run, tmp_path / "whole")


def test_what_workers_left_is_finished_by_one_process(
    data: Path,  # noqa: F811
    target: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    finish([worker(0, 2, data, target, run)])
    report = score(ScoreConfig((str(data),), str(target), run=run, batch_tokens=600))
    assert (report.read, report.resumed, report.complete) == (300, 150, True)


def test_who_is_kept_out(
    data: Path,  # noqa: F811
    target: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The same part twice, and all parts beside one; another part is let in."""
    run = tmp_path / "run"
    first = worker(0, 2, data, target, run)
    wait_for_shards(run, 1, first)
    settings = ScoreConfig((str(data),), str(target), run=run)
    with pytest.raises(ArtifactError, match=rf"is in use: process {first.pid} on"):
        score(settings)
    with pytest.raises(ArtifactError, match=rf"is in use: process {first.pid} on"):
        score(ScoreConfig((str(data),), str(target), run=run, shard_index=0, num_shards=2))
    finish([worker(1, 2, data, target, run), first])
    assert score(settings).resumed == 300


def test_ids_are_what_one_process_gives(tmp_path: Path, tiny_directory: Path) -> None:
    """An id that repeats falls back to the place in the same records, whoever has them."""
    records = [openai("a", str(i), id=f"x{i % 3}") for i in range(12)]
    path = write_jsonl(tmp_path / "d.jsonl", records)
    for index in range(4):
        config = ScoreConfig(
            (str(path),),
            str(tiny_directory),
            run=tmp_path / "parts",
            shard_index=index,
            num_shards=4,
        )
        report = score(config)
        assert report.complete == (index == 3)
        assert report.resumed == 0
    score(ScoreConfig((str(path),), str(tiny_directory), run=tmp_path / "whole"))
    ids = [
        pq.read_table(tmp_path / name / "scores.parquet")["id"].to_pylist()
        for name in ("parts", "whole")
    ]
    assert ids[0] == ids[1] == ["x0", "x1", "x2", *(f"{path}:{row}" for row in range(3, 12))]
