"""Rows of a score table as they are finished: on disk within seconds, and never scored twice.

Rows are written as small Parquet shards, each complete or absent. A run that ends well merges them into
scores.parquet; one that was killed finds them there the next time. A finished table counts as done work,
too, so records appended to a data set are scored without the others.
"""

import logging
import shutil
import time
from collections.abc import Mapping, Sequence
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
)
from sfdd.conversations.conversation import Origin, Skipped, TokenizedConversation
from sfdd.errors import ArtifactError, DataError

log = logging.getLogger(__name__)

_SECONDS_PER_SHARD = 5.0
_ROWS_PER_SHARD = 20_000
_ROW_GROUP = 2**16


class _DamagedError(ArtifactError):
    """A file of rows that cannot be read."""


class ScoreStore:
    """The finished rows of one run directory; every file of them says what made it."""

    def __init__(
        self,
        run: RunDirectory,
        schema: pa.Schema,
        provenance: Provenance,
        sources: Sequence[str],
        overwrite: bool,
    ) -> None:
        """Open what is there, or start.

        Args:
            sources: names of the data sets to be scored, in order.

        Raises:
            ArtifactError: there are rows of other provenance or data, and `overwrite` is False.
        """
        self._run = run
        self._schema = schema.with_metadata({PARQUET_METADATA_KEY: provenance.to_json()})
        self._sources = list(sources)
        self._buffer: list[Mapping[str, Any]] = []
        self._last_flush = time.monotonic()
        if overwrite:
            self._remove_shards()
            run.scores.unlink(missing_ok=True)
        self._tables = self._read_finished(provenance)
        self._unseen = self._hashes()
        self._refuse_other_data()
        self.resumed = len(self._unseen)

    def holds(self, item: Skipped | TokenizedConversation) -> bool:
        """Whether the row of a record is finished.

        Raises:
            DataError: the record's content is not what was scored.
        """
        expected = self._unseen.pop(item.origin, None)
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
            self._tables.append(table.replace_schema_metadata(None))
        self._buffer = []
        self._last_flush = time.monotonic()

    def finish(self, provenance: Provenance) -> pa.Table:
        """Merge everything into scores.parquet, in the order of the data.

        Raises:
            DataError: there are rows of records that the data no longer hold.
        """
        self.flush()
        if self._unseen:
            gone = next(iter(self._unseen))
            raise DataError(
                f"Data set {gone.source} has changed since it was scored: {len(self._unseen)} records "
                f"are gone (first: record {gone.row}). Score it again with --overwrite, or into "
                "another --run."
            )
        table = pa.concat_tables([self._schema.empty_table(), *self._tables])
        order = pc.sort_indices(
            pa.table(
                {
                    "source": pc.index_in(table["source"], pa.array(self._sources, pa.string())),
                    "row": table["row"],
                }
            ),
            [("source", "ascending"), ("row", "ascending")],
        )
        metadata = {PARQUET_METADATA_KEY: provenance.to_json()}
        table = table.take(order).replace_schema_metadata(metadata)
        with atomic_path(self._run.scores) as temporary:
            pq.write_table(table, temporary, row_group_size=_ROW_GROUP, compression="zstd")
        self._remove_shards()
        return table

    def _read_finished(self, provenance: Provenance) -> list[pa.Table]:
        tables = []
        if self._run.scores.exists():
            tables.append(self._read(self._run.scores, provenance))
        for shard in sorted(self._run.shards.glob("*.parquet")):
            try:
                tables.append(self._read(shard, provenance))
            except _DamagedError as damage:
                log.warning("Scored again: %s", damage.__cause__)
                shard.unlink()
        return tables

    def _read(self, path: Path, provenance: Provenance) -> pa.Table:
        """The rows of one file, refused if they are not what this run would make."""
        try:
            found = read_parquet_provenance(path)
            table = pq.read_table(path)
        except (ArtifactError, OSError, ValueError) as error:
            raise _DamagedError(
                f"The scores in {path} are damaged ({error}). Start again with --overwrite."
            ) from error
        if differences := found.differences(provenance):
            raise ArtifactError(
                f"{self._run.root} holds scores made with another {'; '.join(differences)}. "
                "Start again with --overwrite, or choose another --run."
            )
        return table.replace_schema_metadata(None)

    def _refuse_other_data(self) -> None:
        """Before anything is computed: rows of data sets that were not given could not be merged."""
        others = dict.fromkeys(o.source for o in self._unseen if o.source not in self._sources)
        if others:
            raise ArtifactError(
                f"{self._run.root} holds scores of {', '.join(others)}. Name all data sets of the run, "
                "start again with --overwrite, or choose another --run."
            )

    def _remove_shards(self) -> None:
        shutil.rmtree(self._run.shards, ignore_errors=True)

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
