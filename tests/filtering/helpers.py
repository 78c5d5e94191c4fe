"""Score tables small enough to work out by hand, and run directories that hold one."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from helpers import openai, write_jsonl

from sfdd.artifacts import PARQUET_METADATA_KEY, Provenance, digest_files
from sfdd.filtering.config import FilterConfig
from sfdd.filtering.scores import Scores
from sfdd.filtering.selection import Selection, select


def score_table(
    values: Sequence[float | None], metric: str = "flatness", **columns: Any
) -> pa.Table:
    """A score table; None is a skipped record. Rows have 10, 20, 30 … supervised tokens."""
    count = len(values)
    table = {
        "id": pa.array([str(i) for i in range(count)], pa.string()),
        "source": pa.array(["data"] * count, pa.string()),
        "row": pa.array(range(count), pa.int64()),
        "status": pa.array(["skipped" if v is None else "scored" for v in values], pa.string()),
        "reason": pa.array(
            ["no_assistant_turn" if v is None else None for v in values], pa.string()
        ),
        "num_supervised_tokens": pa.array([10 * (i + 1) for i in range(count)], pa.int32()),
        metric: pa.array(values, pa.float64()),
    }
    return pa.table({**table, **columns})


def choose(table: pa.Table, **settings: Any) -> Selection:
    return select(Scores(table), FilterConfig(**settings))


def kept_rows(selection: Selection) -> list[int]:
    return selection.kept.nonzero()[0].tolist()


def reasons(selection: Selection, table: pa.Table) -> list[str | None]:
    return selection.columns(0, table["reason"])["reason"].to_pylist()


def make_run(folder: Path, kinds: Mapping[str, Sequence[float]], **columns: Sequence[Any]) -> Path:
    """A run directory with the scores of some files: flatness of every record, by name of the file.

    Args:
        columns: more of the score table, over all files.
    """
    run = folder / "run"
    run.mkdir(parents=True)
    paths = {
        write_jsonl(
            folder / name, [openai(f"{name} {i}", "answer " * i) for i in range(len(values))]
        ): values
        for name, values in kinds.items()
    }
    values = [value for of_file in paths.values() for value in of_file]
    table = score_table(
        values,
        source=[str(path) for path, of_file in paths.items() for _ in of_file],
        row=[i for of_file in paths.values() for i in range(len(of_file))],
        **columns,
    )
    fingerprints = {str(path): digest_files([path]) for path in paths}
    provenance = Provenance({"target": "t"}, {"target": "t", "data": fingerprints})
    metadata = {PARQUET_METADATA_KEY: provenance.to_json()}
    pq.write_table(table.replace_schema_metadata(metadata), run / "scores.parquet")
    return run


def write_lines(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
