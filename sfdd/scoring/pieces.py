"""Files of finished rows: written whole, known by their content, and read without trusting them.

The name of a shard ends in the digest of its bytes. So the folder is its own manifest: a shard that was
cut, emptied or altered does not match its name, and no second file can disagree with it.
"""

import logging
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sfdd.artifacts import (
    Provenance,
    RunDirectory,
    atomic_path,
    digest_bytes,
    read_parquet_provenance,
)
from sfdd.errors import ArtifactError

log = logging.getLogger(__name__)

_SHARD_NAME = re.compile(r"\d+-\d+-([0-9a-f]{32})\.parquet")
_UNFINISHED_NAME = re.compile(rf"\.{_SHARD_NAME.pattern}\.\d+\.tmp")
_UNREADABLE = (ArtifactError, OSError, ValueError, KeyError, pa.ArrowException)


@dataclass(frozen=True)
class Piece:
    """A row group of a file of finished rows."""

    path: Path
    group: int

    def read(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Its rows; the checksums of its pages are compared."""
        with pq.ParquetFile(self.path, page_checksum_verification=True) as file:
            return file.read_row_group(self.group, columns=columns).replace_schema_metadata(None)


def write_shard(folder: Path, worker: int, table: pa.Table) -> None:
    """Write some rows as one shard, atomically."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=len(table), write_page_checksum=True)
    data = sink.getvalue().to_pybytes()
    name = f"{worker}-{time.time_ns()}-{digest_bytes(data)}.parquet"
    with atomic_path(folder / name) as temporary:
        temporary.write_bytes(data)


def remove_shards(run: RunDirectory) -> None:
    """Remove what `write_shard` wrote, killed or not, and the folder if nothing else is in it."""
    unfinished = [path for path in run.shards.glob("*") if _UNFINISHED_NAME.fullmatch(path.name)]
    for path in [*_shards(run), *unfinished]:
        path.unlink(missing_ok=True)
    try:
        run.shards.rmdir()
    except OSError:
        return  # there is none, or there is something of the user's in it


def finished_pieces(run: RunDirectory, provenance: Provenance) -> Iterator[Piece]:
    """Every piece of finished rows in a run; damaged shards are removed, with a warning.

    Raises:
        ArtifactError: the finished table is damaged, or something was made with another provenance.
    """
    if run.scores.exists():
        try:
            groups = _groups(run, run.scores, provenance)
            for group in range(groups):
                Piece(run.scores, group).read()
        except _UNREADABLE as error:
            if isinstance(error, ArtifactError) and not error.__cause__:
                raise
            raise ArtifactError(
                f"The scores in {run.scores} are damaged ({error}). Start again with --overwrite."
            ) from error
        yield from (Piece(run.scores, group) for group in range(groups))
    for path in _shards(run):
        match = _SHARD_NAME.fullmatch(path.name)
        if match and match[1] == digest_bytes(path.read_bytes()):
            yield from (Piece(path, group) for group in range(_groups(run, path, provenance)))
        else:
            log.warning("%s is damaged; its records are scored again.", path)
            path.unlink()


def _shards(run: RunDirectory) -> list[Path]:
    return sorted(path for path in run.shards.glob("*.parquet") if _SHARD_NAME.fullmatch(path.name))


def _groups(run: RunDirectory, path: Path, provenance: Provenance) -> int:
    """Number of row groups of a file, refused if it is not what this run would make."""
    found = read_parquet_provenance(path)
    if differences := found.differences(provenance):
        raise ArtifactError(
            f"{run.root} holds scores made with another {'; '.join(differences)}. "
            "Start again with --overwrite, or choose another --run."
        )
    return pq.read_metadata(path).num_row_groups
