"""selection.parquet: what was decided about every record of a score table."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sfdd.artifacts import PARQUET_METADATA_KEY, Provenance, atomic_path
from sfdd.errors import ArtifactError
from sfdd.filtering.groups import TOKENS_COLUMN
from sfdd.filtering.scores import SOURCE, Scores
from sfdd.filtering.selection import Selection

_ROWS_AT_ONCE = 2**17
_REPEATING = [SOURCE, "reason"]
_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string()),
        pa.field(SOURCE, pa.string()),
        pa.field("row", pa.int64()),
        pa.field(TOKENS_COLUMN, pa.int32()),
        pa.field("value", pa.float64()),
        pa.field("kept", pa.bool_()),
        pa.field("reason", pa.string()),
    ]
)


def write_selection(
    path: Path, scores_path: Path, scores: Scores, selection: Selection, provenance: Provenance
) -> None:
    """One row a record, in the order of the scores: `value` is null for none, `reason` where kept.

    The ids are copied from file to file: of a large table they would take more memory than all the rest.

    Raises:
        ArtifactError: the ids cannot be read, or the selection not be written.
    """
    schema = _SCHEMA.with_metadata({PARQUET_METADATA_KEY: provenance.to_json()})
    with (
        atomic_path(path) as temporary,
        pq.ParquetWriter(temporary, schema, use_dictionary=_REPEATING) as writer,
    ):
        start = 0
        for ids in _ids(scores_path):
            rows = scores.table.slice(start, len(ids))
            columns = {"id": ids, **selection.columns(start, rows["reason"])}
            columns |= {name: rows[name] for name in (SOURCE, "row", TOKENS_COLUMN)}
            table = pa.table({name: columns[name] for name in schema.names})
            writer.write_table(table.cast(schema), row_group_size=_ROWS_AT_ONCE)
            start += len(ids)


def _ids(path: Path) -> Iterator[pa.Array]:
    try:
        file = pq.ParquetFile(path, pre_buffer=False)
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=["id"]):
            yield batch["id"]
    except (OSError, pa.ArrowException) as error:
        raise ArtifactError(
            f"{path} is damaged ({error}). Score again with --overwrite."
        ) from error
