"""Rows of a score table as they are finished: on disk within seconds, and never scored twice.

Rows are written as small Parquet shards, each complete or absent. When every row is there they are merged
into scores.parquet. A run that was killed finds its shards there the next time, and a finished table
counts as done work, too, so records appended to a data set are scored without the others.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sfdd.artifacts import PARQUET_METADATA_KEY, Provenance, RunDirectory, atomic_path
from sfdd.scoring.finished import Finished
from sfdd.scoring.pieces import Piece, finished_pieces, remove_shards, write_shard
from sfdd.scoring.workers import Worker

_SECONDS_PER_SHARD = 5.0
_ROWS_PER_SHARD = 20_000
_ROW_GROUP = 2**16
_PIECES_HELD = 64


class ScoreStore:
    """The finished rows of one run directory; every file of them says what made it."""

    def __init__(
        self,
        run: RunDirectory,
        schema: pa.Schema,
        provenance: Provenance,
        sources: Sequence[str],
        worker: Worker,
        overwrite: bool,
    ) -> None:
        """Open what is there, or start.

        Args:
            sources: names of the data sets to be scored, in order.

        Raises:
            ArtifactError: there are rows of other provenance or data, and `overwrite` is False.
        """
        self._run = run
        self._schema = schema
        self._provenance = provenance
        self._sources = list(sources)
        self._worker = worker
        self._buffer: list[Mapping[str, Any]] = []
        self._last_flush = time.monotonic()
        if overwrite:
            remove_shards(run)
            run.scores.unlink(missing_ok=True)
        pieces = finished_pieces(run, provenance)
        self.finished = Finished(pieces, sources, str(run.root), worker.takes)
        self.resumed = len(self.finished)

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Take finished rows; they are on disk a few seconds later."""
        self._buffer += rows
        overdue = time.monotonic() - self._last_flush > _SECONDS_PER_SHARD
        if overdue or len(self._buffer) >= _ROWS_PER_SHARD:
            self.flush()

    def flush(self) -> None:
        """Write what was added as one shard."""
        if self._buffer:
            schema = self._schema.with_metadata({PARQUET_METADATA_KEY: self._provenance.to_json()})
            table = pa.Table.from_pylist(self._buffer, schema)
            write_shard(self._run.shards, self._worker.index, table)
        self._buffer = []
        self._last_flush = time.monotonic()

    def keys(self) -> tuple[list[Piece], np.ndarray]:
        """All pieces on disk, and for each of their rows, in the order of the data and each row once:
        source, row, piece, position in the piece. [N, 4]
        """
        pieces = list(finished_pieces(self._run, self._provenance))
        number = {name: i for i, name in enumerate(self._sources)}
        parts = [np.empty((0, 4), np.int64)]
        for i, piece in enumerate(pieces):
            table = piece.read(["source", "row"])
            source = np.fromiter((number[s] for s in table["source"].to_pylist()), np.int64)
            row = table["row"].to_numpy()
            parts.append(np.stack([source, row, np.full_like(row, i), np.arange(len(row))], axis=1))
        keys = np.concatenate(parts)
        keys = keys[np.lexsort((keys[:, 1], keys[:, 0]))]
        same = (keys[1:, :2] == keys[:-1, :2]).all(axis=1)
        return pieces, keys[np.concatenate([np.ones(min(len(keys), 1), np.bool_), ~same])]

    def merge(self, pieces: Sequence[Piece], keys: np.ndarray, provenance: Provenance) -> None:
        """Write scores.parquet in the order of the data, a row group at a time, and remove the shards."""
        schema = self._schema.with_metadata({PARQUET_METADATA_KEY: provenance.to_json()})
        with (
            atomic_path(self._run.scores) as temporary,
            pq.ParquetWriter(
                temporary, schema, compression="zstd", write_page_checksum=True
            ) as writer,
        ):
            for table in self._ordered(pieces, keys):
                writer.write_table(table.cast(self._schema), row_group_size=_ROW_GROUP)
        remove_shards(self._run)

    def _ordered(self, pieces: Sequence[Piece], keys: np.ndarray) -> Iterator[pa.Table]:
        """The rows of the keys. Rows near each other come from few pieces, which are held."""
        read = lru_cache(maxsize=_PIECES_HELD)(lambda i: pieces[i].read())
        for start in range(0, len(keys), _ROW_GROUP):
            part = keys[start : start + _ROW_GROUP]
            needed, which = np.unique(part[:, 2], return_inverse=True)
            tables = [read(int(i)) for i in needed]
            begins = np.cumsum([0, *map(len, tables)])[:-1]
            yield pa.concat_tables(tables).take(pa.array(begins[which] + part[:, 3]))
