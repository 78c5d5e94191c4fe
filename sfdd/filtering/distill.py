"""The distilled data set: the kept records of every source, in the form they came in."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sfdd.conversations.records import Source
from sfdd.errors import DataError


def check_unchanged(source: Source, fingerprint: str) -> None:
    """Refuse data that are not what was scored: a row number would then mean another record."""
    if source.fingerprint() != fingerprint:
        raise DataError(
            f"Data set {source.name} has changed since it was scored. Run 'sfdd score' again."
        )


def distill(selection: pa.Table, sources: Mapping[str, Source], directory: Path) -> list[Path]:
    """Write the kept records; one file per source that has any, under the source's own file name.

    Args:
        selection: columns source, row and kept.
        sources: by the name they were scored as.
    """
    written: list[Path] = []
    for scored_as, source in sources.items():
        rows = selection.filter(pc.equal(selection["source"], scored_as))
        if not pc.any(rows["kept"]).as_py():
            continue
        kept = np.zeros(len(rows), dtype=np.bool_)
        kept[rows["row"].to_numpy()] = rows["kept"].to_numpy()
        destination = _unused(directory / source.file_name, written)
        source.write_kept(kept.__getitem__, destination)
        written.append(destination)
    return written


def _unused(path: Path, taken: list[Path]) -> Path:
    """Two sources in different folders may have the same file name."""
    number = 2
    free = path
    while free in taken:
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
        number += 1
    return free
