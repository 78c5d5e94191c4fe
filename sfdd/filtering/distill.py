"""The distilled data set: the kept records of every source, in the form they came in."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from sfdd.conversations.records import Source
from sfdd.errors import ArtifactError, DataError
from sfdd.filtering.budgets import Bools, Ints


@contextmanager
def unchanged(sources: Mapping[str, Source], fingerprints: Mapping[str, str]) -> Iterator[None]:
    """Refuse data that are not what was scored: a row number would then mean another record.

    Every byte is digested in a thread of its own while the block copies the data, so the check costs no
    second wait. Nothing that the block wrote may be used before it ends without an error.

    Raises:
        DataError: a data set has changed.
    """
    check: Future[None] = Future()

    def digest() -> None:
        try:
            for name, source in sources.items():
                if source.fingerprint() != fingerprints[name]:
                    raise DataError(
                        f"Data set {source.name} has changed since it was scored. "
                        "Run 'sfdd score' again."
                    )
            check.set_result(None)
        except BaseException as error:
            check.set_exception(error)

    threading.Thread(target=digest, daemon=True).start()  # a daemon, so that Ctrl-C does not wait
    try:
        yield
    except ArtifactError:  # a full disk: no reason to wait
        raise
    except Exception:
        check.result()  # that the data have changed explains whatever else went wrong
        raise
    check.result()


def distill(
    kept: Bools,
    origins: Ints,
    names: Sequence[str],
    rows: Ints,
    sources: Mapping[str, Source],
    to: Path,
) -> list[Path]:
    """Write the kept records; one file per source that has any, under the source's own file name.

    Args:
        kept: of every record of the score table. [records]
        origins: index of its source into `names`. [records]
        rows: its row there. [records]
        sources: by the name they were scored as.
        to: folder of the files.
    """
    order = np.argsort(origins, kind="stable")
    borders = np.searchsorted(origins[order], np.arange(len(names) + 1))
    parts = {name: order[borders[i] : borders[i + 1]] for i, name in enumerate(names)}
    written: list[Path] = []
    for scored_as, source in sources.items():
        records = parts.get(scored_as, order[:0])
        if not kept[records].any():
            continue
        keep = np.zeros(int(rows[records].max()) + 1, dtype=np.bool_)
        keep[rows[records]] = kept[records]
        destination = _unused(to / source.file_name, written)
        source.write_kept(keep.tolist().__getitem__, destination)  # faster than the array's own
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
