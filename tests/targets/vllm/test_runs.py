"""Whole runs of `sfdd score --backend vllm`: the same table as with transformers, and never lost work."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engines import assert_equal
from helpers import openai, write_jsonl

from sfdd.artifacts import RunDirectory, read_parquet_provenance
from sfdd.conversations.config import MaskConfig
from sfdd.conversations.pipeline import open_sources, tokenize
from sfdd.errors import ArtifactError
from sfdd.filtering.config import FilterConfig
from sfdd.filtering.run import filter_data
from sfdd.scoring.config import ScoreConfig
from sfdd.scoring.run import score, score_with
from sfdd.targets import smollm2
from sfdd.targets.backend import open_backend

ROOT = Path(__file__).parents[3]
REAL = ROOT.parent / "shared/data/gpteacher_roleplay.jsonl"
OURS = ROOT / "data/chat_sharegpt.jsonl"
FAST = ("--engine-arg", "enforce_eager=true", "--engine-arg", "max_num_seqs=4")
# As `sfdd score` does, with a shard for every batch, so that there is something to lose.
SCORE = """
import sys
from sfdd.scoring import store
store._SECONDS_PER_SHARD = 0.0
from sfdd_cli.main import app
if __name__ == "__main__":
    app(["score", *sys.argv[1:]])
"""


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 real conversations: of a public set where it is at hand, else of data/."""
    source = REAL if REAL.exists() else OURS
    with source.open(encoding="utf-8") as lines:
        first = [line for line, _ in zip(lines, range(60), strict=False)]
    path = tmp_path_factory.mktemp("real") / "chat.jsonl"
    path.write_text("".join(first), encoding="utf-8")
    return path


def test_the_same_scores_as_transformers(conversations: Path, tmp_path: Path) -> None:
    """SmolLM2: every number of every token, the means, and what a filter keeps of them."""
    statistics, tables, kept = [], [], []
    for name in ("vllm", "transformers"):
        config = ScoreConfig(
            (str(conversations),),
            smollm2.NAME,
            run=tmp_path / name,
            backend=name,
            max_length=1024,
            token_scores=True,
            engine_args={"enforce_eager": True} if name == "vllm" else {},
        )
        backend = open_backend(config.target, config, config.max_length)
        sources = open_sources(config.data)
        assert score_with(backend, sources, config).scored >= 50
        samples = list(tokenize(sources, backend.tokenizer, 1024, MaskConfig()))
        batches = list(backend.token_stats(samples))
        statistics.append({c.id: s for b in batches for c, s in zip(*b, strict=True)})
        backend.close()
        tables.append(pq.read_table(RunDirectory(config.run).scores))
        filter_data(FilterConfig(run=config.run))
        selection = pq.read_table(RunDirectory(config.run).selection)
        kept.append(selection)

    assert_equal(*statistics)
    ours, theirs = tables
    same = [f.name for f in ours.schema if f.type not in (pa.float64(), pa.list_(pa.float32()))]
    assert ours.select(same).equals(theirs.select(same))
    assert ours.schema.equals(theirs.schema)
    difference = ours["flatness"].to_numpy() - theirs["flatness"].to_numpy()
    assert abs(difference).max() < 1e-5
    decisions = [c for c in kept[0].column_names if kept[0].schema.field(c).type != pa.float64()]
    assert kept[0].select(decisions).equals(kept[1].select(decisions))


def start(data: Path, target: Path, run: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCORE, str(data), "--target", str(target), "--run", str(run)]
    return subprocess.Popen(
        [*command, "--backend", "vllm", *FAST],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = [openai(f"Question {i}", "word " * (30 + i % 37), id=f"c{i}") for i in range(400)]
    return write_jsonl(tmp_path_factory.mktemp("data") / "chat.jsonl", records)


def wait_for_shards(run: Path, count: int, process: subprocess.Popen[str]) -> None:
    while len(list(run.glob("scores.partial/*.parquet"))) < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def processes_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=30)
    alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not alive, [p.cmdline() for p in alive]


def test_whatever_dies_the_rows_stay_and_the_run_continues(
    data: Path, qwen2: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"

    process = start(data, qwen2, run)  # the engine is killed
    wait_for_shards(run, 3, process)
    engine = processes_of(process)
    max(engine, key=lambda p: p.memory_info().rss).kill()
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Error: vLLM's engine stopped:" in stderr
    assert "run the same command again to continue" in stderr
    assert_gone(engine)

    process = start(data, qwen2, run)  # Ctrl-C in a terminal reaches every process
    before = len(list(run.glob("scores.partial/*.parquet")))
    assert before >= 3
    wait_for_shards(run, before + 3, process)
    engine = processes_of(process)
    for one in [psutil.Process(process.pid), *engine]:
        one.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert "Interrupted. What was finished is kept" in stderr
    assert_gone(engine)

    process = start(data, qwen2, run)  # sfdd is killed; the engine must not keep its GPU
    wait_for_shards(run, before + 6, process)
    engine = processes_of(process)
    process.kill()
    process.communicate(timeout=120)
    assert_gone(engine)
    assert not RunDirectory(run).scores.exists()

    process = start(data, qwen2, run)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert "read               400" in stdout
    assert "Scoring with vLLM" in stderr
    table = pq.read_table(RunDirectory(run).scores)
    assert table["row"].to_pylist() == list(range(400))

    whole = ScoreConfig((str(data),), str(qwen2), run=tmp_path / "whole", backend="transformers")
    score(whole)
    theirs = pq.read_table(RunDirectory(whole.run).scores)
    assert table["flatness"].to_pylist() == pytest.approx(theirs["flatness"].to_pylist(), rel=1e-4)


def test_the_backend_is_recorded_and_never_mixed(data: Path, qwen2: Path, tmp_path: Path) -> None:
    settings = {"data": (str(data),), "target": str(qwen2), "run": tmp_path / "run"}
    arguments = {"enforce_eager": True, "hf_overrides": {"head_dtype": "model"}}
    score(ScoreConfig(**settings, backend="vllm", engine_args=arguments))
    provenance = read_parquet_provenance(RunDirectory(settings["run"]).scores)
    assert provenance.about["backend"] == "vllm"
    assert provenance.about["backend_version"].startswith("0.")
    assert provenance.about["engine_args"]["enforce_eager"] is True
    assert provenance.identity["dtype"] == "float32"
    with pytest.raises(ArtifactError, match=r"another backend \(was vllm, now transformers\)"):
        score(ScoreConfig(**settings, backend="transformers"))
