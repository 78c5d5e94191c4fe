"""Which records have their row already, and what they said when it was made."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sfdd.conversations.conversation import Origin
from sfdd.errors import ArtifactError, DataError
from sfdd.scoring.pieces import Piece

_KEYS = ("source", "row", "content_hash")


class Finished:
    """Row numbers and content hashes, 16 bytes a record, so that millions can be held."""

    def __init__(
        self,
        pieces: Iterable[Piece],
        sources: Sequence[str],
        run: str,
        takes: Callable[[int], bool] = lambda row: True,
    ) -> None:
        """Read the finished rows of a run.

        Args:
            sources: names of the data sets to be scored, in order.
            takes: whether a record is to be looked after at all.

        Raises:
            ArtifactError: there are rows of a data set that is not to be scored.
        """
        rows: dict[str, list[np.ndarray]] = {name: [] for name in sources}
        hashes: dict[str, list[np.ndarray]] = {name: [] for name in sources}
        for piece in pieces:
            table = piece.read(_KEYS)
            for name, of_source in _by_source(table):
                if name not in rows:
                    raise ArtifactError(
                        f"{run} holds scores of {name}. Name all data sets of the run, start again "
                        "with --overwrite, or choose another --run."
                    )
                rows[name].append(of_source["row"].to_numpy())
                hashes[name].append(_short(of_source["content_hash"]))
        self._rows: dict[str, np.ndarray] = {}  # [N] sorted, each once
        self._short: dict[str, np.ndarray] = {}  # [N]
        self._seen: dict[str, np.ndarray] = {}  # [N]
        for name in sources:
            all_rows = np.concatenate([np.empty(0, np.int64), *rows[name]])
            all_hashes = np.concatenate([np.empty(0, np.uint64), *hashes[name]])
            self._rows[name], first = np.unique(all_rows, return_index=True)
            self._short[name] = all_hashes[first]
            mine = np.fromiter(map(takes, self._rows[name].tolist()), np.bool_, len(first))
            self._seen[name] = ~mine

    def __len__(self) -> int:
        """How many there are that were not asked for yet."""
        return sum(int((~seen).sum()) for seen in self._seen.values())

    def holds(self, origin: Origin, content_hash: str) -> bool:
        """Whether the row of a record is finished.

        Raises:
            DataError: the record's content is not what was scored.
        """
        rows = self._rows[origin.source]
        at = int(np.searchsorted(rows, origin.row))
        if at == len(rows) or rows[at] != origin.row:
            return False
        self._seen[origin.source][at] = True
        if self._short[origin.source][at] != _as_number(content_hash):
            raise DataError(
                f"Data set {origin.source} has changed since it was scored: record "
                f"{origin.row} differs. Score it again with --overwrite, or into another --run."
            )
        return True

    def require_all_seen(self) -> None:
        """Raise DataError if there are rows of records that the data no longer hold."""
        for name, seen in self._seen.items():
            if gone := int((~seen).sum()):
                first = int(self._rows[name][~seen][0])
                raise DataError(
                    f"Data set {name} has changed since it was scored: {gone} records are gone "
                    f"(first: record {first}). Score it again with --overwrite, or into another --run."
                )


def _by_source(table: pa.Table) -> list[tuple[str, pa.Table]]:
    names = table["source"].unique().to_pylist()
    if len(names) == 1:
        return [(names[0], table)]
    return [(name, table.filter(pc.equal(table["source"], name))) for name in names]


def _short(hashes: pa.ChunkedArray) -> np.ndarray:
    return np.fromiter(map(_as_number, hashes.to_pylist()), np.uint64, len(hashes))


def _as_number(content_hash: str) -> int:
    """64 bits of it tell an edit from none."""
    return int(content_hash[:16] or "0", 16)
