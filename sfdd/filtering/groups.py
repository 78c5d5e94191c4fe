"""Kinds of conversations: by data set, by length, by number of turns, or by a column.

A kind is what the report counts, what a warning names, and what `--by` makes a stratum of.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sfdd.errors import UsageError
from sfdd.filtering.budgets import Bools, Ints, Strata

LENGTH, TURNS = "length", "turns"
TOKENS_COLUMN, TURNS_COLUMN = "num_supervised_tokens", "num_turns"

_DECILES = 10
_FEWEST_TURNS = (1, 2, 3, 5, 9)
_TURNS = ("1", "2", "3-4", "5-8", "9+")


@dataclass(frozen=True)
class Grouping:
    """The kind of every row of a score table.

    Attributes:
        name: what it goes by: `source`, `length`, `turns`, or a column.
        labels: strings, in the natural order; what has no value is a kind of its own, the last. There may
            be millions.
        codes: index into `labels`. [rows]
    """

    name: str
    labels: pa.Array
    codes: Ints

    def label(self, kind: int) -> str:
        """What a kind is called."""
        return str(self.labels[kind].as_py())

    def strata(self, rows: Ints) -> Strata:
        """Of some of the rows."""
        return Strata(self.codes[rows], len(self.labels))


def by_column(name: str, column: pa.ChunkedArray) -> Grouping:
    """Equal values are one kind.

    Raises:
        UsageError: the values are lists or the like.
    """
    if is_nested(column.type):
        raise UsageError(f"Column {name!r} holds {column.type} values, which form no strata.")
    encoded = encode(column)
    labels = encoded.dictionary
    order = pc.sort_indices(labels)
    place = np.empty(len(labels), np.int64)
    place[order.to_numpy()] = np.arange(len(labels))
    has_null = encoded.null_count > 0
    place = np.append(place, len(labels)).astype(_smallest(len(labels)))
    codes = place[pc.fill_null(encoded.indices, len(labels)).to_numpy(zero_copy_only=False)]
    names = pc.cast(labels.take(order), pa.string())
    null = pa.array(["null"] if has_null else [], pa.string())
    return Grouping(name, pa.concat_arrays([names, null]), codes)


def encode(column: pa.ChunkedArray) -> pa.DictionaryArray:
    """One array with one dictionary."""
    if pa.types.is_null(column.type):
        column = pc.cast(column, pa.string())
    if not pa.types.is_dictionary(column.type):
        column = pc.dictionary_encode(column)
    return column.unify_dictionaries().combine_chunks()


def is_nested(type: pa.DataType) -> bool:
    """Whether a column holds more than single values."""
    return bool(pa.types.is_nested(type))


def by_length(tokens: Ints, scored: Bools) -> Grouping:
    """Deciles of the supervised tokens of the scored rows; equal lengths are never parted.

    Where a tenth of the rows or more have one length, there are fewer than ten kinds.
    """
    lengths = np.sort(tokens[scored])
    if not len(lengths):
        return Grouping(LENGTH, pa.array(["0"]), np.zeros(len(tokens), np.int8))
    last = np.ceil(np.arange(1, _DECILES + 1) / _DECILES * len(lengths) - 1e-9).astype(np.int64) - 1
    longest = np.unique(lengths[np.maximum(last, 0)])
    shortest = lengths[np.searchsorted(lengths, [-1, *longest[:-1]], side="right")]
    labels = [
        f"{low:,}" if low == high else f"{low:,}-{high:,}"
        for low, high in zip(shortest.tolist(), longest.tolist(), strict=True)
    ]
    codes = np.searchsorted(longest, np.minimum(tokens, longest[-1]))
    return Grouping(LENGTH, pa.array(labels), codes.astype(np.int8))


def by_turns(turns: pa.ChunkedArray) -> Grouping:
    """How many assistant turns: 1, 2, 3-4, 5-8, 9 and more; 0 and unknown are of one kind."""
    known = pc.cast(pc.fill_null(turns, 0), pa.int64()).to_numpy()
    codes = np.searchsorted(_FEWEST_TURNS, known, side="right") - 1
    codes[codes < 0] = len(_TURNS)
    labels = [*_TURNS, "null"] if (codes == len(_TURNS)).any() else _TURNS
    return Grouping(TURNS, pa.array(labels), codes.astype(np.int8))


def crossed(first: Grouping, second: Grouping, rows: Ints) -> Strata:
    """A stratum for every pair of kinds, of some of the rows."""
    codes = first.codes[rows].astype(np.int64) * len(second.labels) + second.codes[rows]
    return Strata(codes, len(first.labels) * len(second.labels))


def _smallest(count: int) -> Any:
    """The narrowest type of codes from 0 to `count`: it halves the memory, and NumPy sorts it faster."""
    return np.min_scalar_type(-count - 1)
