"""Rows of a score table as they are finished: on disk within seconds, and never scored twice.

Rows are written as small Parquet shards, each complete or absent. A run that ends well merges them into
scores.parquet; one that was killed finds them there the next time. A finished table counts as done work,
too, so records appended to a data set are scored without the others.
"""

import logging
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sfdd.artifacts import (
    PARQUET_METADATA_KEY,
    Provenance,
    RunDirectory,
    atomic_path,
    read_parquet_provenance,
    write_text,
)
from sfdd.conversations.conversation import Origin, Skipped, TokenizedConversation
from sfdd.errors import ArtifactError, DataError

log = logging.getLogger(__name__)

_SECONDS_PER_SHARD = 5.0
_ROWS_PER_SHARD = 20_000
_ROW_GROUP = 2**16


class ScoreStore:
    """The finished rows of one run directory."""

    def __init__(
        self, run: RunDirectory, schema: pa.Schema, provenance: Provenance, overwrite: bool
    ) -> None:
        """Open what is there, or start.

        Raises:
            ArtifactError: rows of other provenance are there and `overwrite` is False.
        """
        self._run = run
        self._schema = schema
        self._buffer: list[Mapping[str, Any]] = []
        self._last_flush = time.monotonic()
        if overwrite:
            shutil.rmtree(run.shards, ignore_errors=True)
            run.scores.unlink(missing_ok=True)
        self._refuse_other_provenance(provenance)
        write_text(run.shards / "provenance.json", provenance.to_json())
        self._tables = self._read_finished()
        self._pending_check = self._hashes()
        self.resumed = len(self._pending_check)

    def holds(self, item: Skipped | TokenizedConversation) -> bool:
        """Whether the row of a record is finished.

        Raises:
            DataError: the record's content is not what was scored.
        """
        expected = self._pending_check.pop(item.origin, None)
        if expected is not None and expected != item.content_hash:
            raise DataError(
                f"Data set {item.origin.source} has changed since it was scored: record "
                f"{item.origin.row} differs. Score it again with --overwrite, or into another --run."
            )
        return expected is not None

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Take finished rows; they are on disk a few seconds later."""
        self._buffer += rows
        overdue = time.monotonic() - self._last_flush > _SECONDS_PER_SHARD
        if overdue or len(self._buffer) >= _ROWS_PER_SHARD:
            self.flush()

    def flush(self) -> None:
        """Write what was added as one shard."""
        if self._buffer:
            table = pa.Table.from_pylist(self._buffer, self._schema)
            with atomic_path(self._run.shards / f"{time.time_ns()}.parquet") as temporary:
                pq.write_table(table, temporary)
            self._tables.append(table)
        self._buffer = []
        self._last_flush = time.monotonic()

    def finish(self, sources: list[str], provenance: Provenance) -> pa.Table:
        """Merge everything into scores.parquet, in the order of the data.

        Raises:
            DataError: there are rows of records that the data no longer hold.
        """
        self.flush()
        if self._pending_check:
            gone = next(iter(self._pending_check))
            raise DataError(
                f"This run holds scores of {len(self._pending_check)} records that the data given "
                f"now do not have (first: {gone}). Give all data sets again, start again with "
                "--overwrite, or choose another --run."
            )
        table = pa.concat_tables([self._schema.empty_table(), *self._tables])
        position = pc.index_in(table["source"], pa.array(sources))
        order = pc.sort_indices(
            pa.table({"source": position, "row": table["row"]}),
            [("source", "ascending"), ("row", "ascending")],
        )
        metadata = {PARQUET_METADATA_KEY: provenance.to_json()}
        table = table.take(order).replace_schema_metadata(metadata)
        with atomic_path(self._run.scores) as temporary:
            pq.write_table(table, temporary, row_group_size=_ROW_GROUP, compression="zstd")
        shutil.rmtree(self._run.shards)
        return table

    def _refuse_other_provenance(self, provenance: Provenance) -> None:
        for found in self._found_provenances():
            if differences := found.differences(provenance):
                raise ArtifactError(
                    f"{self._run.root} holds scores made with another {'; '.join(differences)}. "
                    "Start again with --overwrite, or choose another --run."
                )

    def _found_provenances(self) -> list[Provenance]:
        found = []
        if self._run.scores.exists():
            found.append(read_parquet_provenance(self._run.scores))
        partial = self._run.shards / "provenance.json"
        if partial.exists():
            try:
                found.append(Provenance.from_json(partial.read_text(encoding="utf-8")))
            except ValueError as error:
                raise ArtifactError(
                    f"{partial} is damaged ({error}). Start again with --overwrite."
                ) from error
        return found

    def _read_finished(self) -> list[pa.Table]:
        tables = []
        if self._run.scores.exists():
            tables.append(self._read(self._run.scores))
        for shard in sorted(self._run.shards.glob("*.parquet")):
            try:
                tables.append(self._read(shard))
            except (OSError, ValueError) as error:
                log.warning("Shard %s is damaged and will be scored again (%s).", shard, error)
                shard.unlink()
        return tables

    def _read(self, path: Path) -> pa.Table:
        return pq.read_table(path, schema=self._schema).replace_schema_metadata(None)

    def _hashes(self) -> dict[Origin, str]:
        """Content hash of every finished row; forgets rows that two shards hold."""
        hashes: dict[Origin, str] = {}
        for i, table in enumerate(self._tables):
            columns = (table[name].to_pylist() for name in ("source", "row", "content_hash"))
            fresh = []
            for source, row, content_hash in zip(*columns, strict=True):
                origin = Origin(source, row)
                fresh.append(origin not in hashes)
                hashes[origin] = content_hash
            self._tables[i] = table if all(fresh) else table.filter(pa.array(fresh))
        return hashes
