"""How `sfdd filter` scales: ten million score rows, and a data set of two gigabytes beside `cp`.

    python benchmarks/filter_scale.py [--rows 10000000] [--gigabytes 2] [--folder DIR] [FILTER OPTIONS...]

Makes a score table as `sfdd score` leaves it, every token's flatness included, and the JSONL file that
it is of, in a temporary folder; runs the real command in a process of its own; prints seconds from start
to end and the peak resident set. Copying is measured in turn with `cp`, the file in the page cache;
medians of three. Options that are not known here go to `sfdd filter` on the ten million rows.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import monotonic

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sfdd.artifacts import PARQUET_METADATA_KEY, Provenance, digest_files
from sfdd.scoring.schema import score_schema

ROW_GROUP = 2**16  # as `sfdd score` writes them
TOKEN_SCORES = 16  # of each row; more would make a larger file of what must not be read
SHORT, LONG = 100, 2000  # bytes of a record
REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--folder", type=Path, help="where to make the temporary folder")
    arguments, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="sfdd-filter-", dir=arguments.folder) as folder:
        many_rows(Path(folder, "rows"), arguments.rows, options)
        much_data(Path(folder, "data"), int(arguments.gigabytes * 1e9))


def many_rows(folder: Path, rows: int, options: list[str]) -> None:
    data, run = make(folder, rows, SHORT)
    print(
        f"{rows:,} rows, {size(run / 'scores.parquet') / 1e9:.2f} GB of scores, "
        f"{size(data) / 1e9:.2f} GB of data",
        flush=True,
    )
    for given in ([], *([options] if options else [])):
        runs = [sfdd_filter(run, given) for _ in range(REPEATS)]
        seconds, peak = median(s for s, _ in runs), max(p for _, p in runs)
        named = " ".join(["sfdd filter", *given])
        print(f"{named}: {seconds:.1f} s (median of {REPEATS}), peak {peak:.2f} GiB", flush=True)


def much_data(folder: Path, gigabytes: int) -> None:
    data, run = make(folder, gigabytes // LONG, LONG)
    megabytes = size(data) / 1e6
    print(f"{megabytes / 1000:.2f} GB of data in {gigabytes // LONG:,} records", flush=True)
    copied, filtered, peaks = [], [], []
    for _ in range(REPEATS):
        copied.append(cp(data, folder / "copy.jsonl"))
        seconds, peak = sfdd_filter(run, [])
        filtered.append(seconds)
        peaks.append(peak)
        print(f"  cp {copied[-1]:.2f} s, sfdd filter {seconds:.2f} s", flush=True)
    ours, theirs = median(filtered), median(copied)
    print(
        f"sfdd filter: {megabytes / ours:.0f} MB/s, cp: {megabytes / theirs:.0f} MB/s, "
        f"{theirs / ours:.2f} of it; peak {max(peaks):.2f} GiB (medians of {REPEATS})"
    )


def make(folder: Path, rows: int, record_bytes: int) -> tuple[Path, Path]:
    """A data set of so many records of a size, and the run directory with its scores."""
    data, run = folder / "chat.jsonl", folder / "run"
    run.mkdir(parents=True)
    write_data(data, rows, record_bytes)
    provenance = Provenance({"target": "none"}, {"target": "none", "data": {}})
    provenance = Provenance(
        provenance.identity, {**provenance.about, "data": {str(data): digest_files([data])}}
    )
    schema = score_schema(token_scores=True).with_metadata(
        {PARQUET_METADATA_KEY: provenance.to_json()}
    )
    random = np.random.default_rng(0)
    with pq.ParquetWriter(run / "scores.parquet", schema, compression="zstd") as writer:
        for start in range(0, rows, ROW_GROUP):
            count = min(ROW_GROUP, rows - start)
            writer.write_table(scores(schema, data, start, count, random))
    return data, run


def write_data(path: Path, rows: int, record_bytes: int) -> None:
    before, after = b'{"messages":[{"role":"user","content":"', b'"}]}\n'
    text = b"flatter tokens are more valuable " * (record_bytes // 33 + 1)
    with path.open("wb") as file:
        for start in range(0, rows, ROW_GROUP):
            numbers = (b"%09d " % i for i in range(start, min(start + ROW_GROUP, rows)))
            filling = record_bytes - len(before) - len(after) - 10
            file.writelines(before + n + text[:filling] + after for n in numbers)


def scores(
    schema: pa.Schema, data: Path, start: int, count: int, random: np.random.Generator
) -> pa.Table:
    """Some rows; one in a hundred was skipped."""
    scored = random.random(count) >= 0.01
    tokens = np.where(scored, random.integers(1, 2000, count), 0).astype(np.int32)
    columns: dict[str, object] = {
        "id": [f"chat-{i:012}" for i in range(start, start + count)],
        "source": [str(data)] * count,
        "row": np.arange(start, start + count),
        "content_hash": [random.bytes(16).hex() for _ in range(count)],
        "status": np.where(scored, "scored", "skipped"),
        "reason": pa.array(np.full(count, "no_assistant_turn"), mask=scored),
        "truncated": np.zeros(count, bool),
        "rewritten": np.zeros(count, bool),
        "token_flatness": pa.FixedSizeListArray.from_arrays(
            random.random(count * TOKEN_SCORES, dtype=np.float32), TOKEN_SCORES
        ).cast(pa.list_(pa.float32())),
    }
    for name in schema.names:
        if pa.types.is_int32(schema.field(name).type):
            columns.setdefault(name, tokens)
        elif pa.types.is_float64(schema.field(name).type):
            columns[name] = pa.array(random.random(count), mask=~scored)
    return pa.table(columns).select(schema.names).cast(schema)


def sfdd_filter(run: Path, options: list[str]) -> tuple[float, float]:
    """Seconds and peak resident set in GiB of one `sfdd filter`."""
    code = "from sfdd_cli.main import app; app()"
    command = [sys.executable, "-c", code, "filter", "--run", str(run), *options]
    started = monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = monotonic() - started
    if status:
        raise SystemExit(process.stderr.read().decode() if process.stderr else "it failed")
    return seconds, usage.ru_maxrss / 2**20  # Linux has it in kB


def cp(data: Path, copy: Path) -> float:
    """Seconds of one `cp`."""
    started = monotonic()
    subprocess.run(["cp", str(data), str(copy)], check=True)
    seconds = monotonic() - started
    copy.unlink()
    return seconds


def size(path: Path) -> int:
    return path.stat().st_size


if __name__ == "__main__":
    main()
