"""The columns of a score table, and of the user's own, that one selection looks at."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sfdd.errors import ArtifactError, UsageError
from sfdd.filtering.budgets import Bools, Floats, Ints
from sfdd.filtering.config import METRICS, FilterConfig
from sfdd.filtering.groups import (
    LENGTH,
    TOKENS_COLUMN,
    TURNS,
    TURNS_COLUMN,
    Grouping,
    by_column,
    by_length,
    by_turns,
    encode,
)
from sfdd.filtering.joining import Joined, column_names, join

SOURCE, FLATNESS = "source", "flatness"
OWN = "joined."  # before the name of a column that both tables have
_ALWAYS = (SOURCE, "row", "status", "reason", TOKENS_COLUMN)
_DICTIONARIES = [SOURCE, "status", "reason"]


@dataclass(frozen=True)
class Scores:
    """What a selection is made from, one row a record.

    Attributes:
        table: the columns read: those of every selection, the metric's, and so on.
        joined: the user's own, in the same order.
    """

    table: pa.Table
    joined: Joined | None = None

    def __len__(self) -> int:
        return self.table.num_rows

    @cached_property
    def scored(self) -> Bools:
        """Whether a row was scored."""
        return pc.equal(self.table["status"], "scored").to_numpy()

    @cached_property
    def tokens(self) -> Ints:
        """Supervised tokens of each row."""
        return self.table[TOKENS_COLUMN].to_numpy()

    @cached_property
    def lengths(self) -> Grouping:
        """Kinds by supervised tokens."""
        return by_length(self.tokens, self.scored)

    @cached_property
    def sources(self) -> Grouping:
        """Kinds by data set."""
        return by_column(SOURCE, self.table[SOURCE])

    def column(self, name: str) -> pa.ChunkedArray:
        """A column of either table."""
        if self.joined and name in self.joined.columns.column_names:
            return self.joined.columns[name]
        return self.table[name]

    def values(self, name: str) -> Floats:
        """A numeric column; NaN where the row was not scored, or has no finite value."""
        column = self.column(name)
        if not _is_numeric(column.type):
            raise UsageError(
                f"--metric is {name!r}, whose values are {column.type}. Give a numeric column."
            )
        numbers = pc.fill_null(pc.cast(column, pa.float64()), np.nan).to_numpy()
        return np.where(self.scored & np.isfinite(numbers), numbers, np.nan)

    def grouping(self, name: str) -> Grouping:
        """The kinds that a name stands for.

        Raises:
            UsageError: there are no such kinds.
        """
        if name == SOURCE:
            return self.sources
        if name == LENGTH:
            return self.lengths
        if name == TURNS:
            return by_turns(self.table[TURNS_COLUMN])
        return by_column(name, self.column(name))

    def kinds(self, by: str | None) -> list[Grouping]:
        """What to tell the user about: all that is known of the conversations' kinds."""
        turns = [TURNS] if TURNS_COLUMN in self.table.column_names else []
        joined = self.joined.kinds if self.joined else ()
        chosen = [by] if by else []
        return [
            self.grouping(name)
            for name in dict.fromkeys([SOURCE, LENGTH, *turns, *joined, *chosen])
        ]


def read_scores(path: Path, config: FilterConfig) -> Scores:
    """Read the columns that a selection needs, and no other: every token's flatness may be large.

    Raises:
        ArtifactError: the table is damaged.
        DataError: the table to join cannot be used.
        UsageError: a column that the settings name is in neither table, or in both.
    """
    own = column_names(config.join) if config.join else []
    try:
        here = pq.read_schema(path).names
        names = _Names(here, own)
        wanted = names.wanted(config)
        joined = None
        if config.join:  # before the rest is read: it takes the most memory
            ids = pq.read_table(path, columns=["id"])["id"]
            joined = join(config.join, ids, {names.alias(name): name for name in own}, wanted)
            del ids
        columns = [name for name in wanted if name in here]
        table = pq.read_table(path, columns=columns, read_dictionary=_DICTIONARIES)
    except (OSError, pa.ArrowException) as error:
        raise ArtifactError(
            f"{path} is damaged ({error}). Score again with --overwrite."
        ) from error
    return Scores(_unified(table), joined)


@dataclass(frozen=True)
class _Names:
    """What columns can be called: those of the score table, and the user's own.

    One of the user's whose name the score table or a kind has goes by `joined.NAME`.
    """

    scores: Sequence[str]
    own: Sequence[str]

    def alias(self, own: str) -> str:
        return f"{OWN}{own}" if own in (*self.scores, LENGTH, TURNS) else own

    def wanted(self, config: FilterConfig) -> list[str]:
        """Names of the columns that the settings need, of either table."""
        turns = [TURNS_COLUMN] if TURNS_COLUMN in self.scores else []
        metric = config.ranking.column
        if config.metric not in METRICS:  # those are always the score table's
            self._check("--metric", config.metric, METRICS)
        if config.match_length:
            metric = FLATNESS
        if config.by:
            self._check("--by", config.by, [LENGTH, *([TURNS] if turns else [])])
        named = [name for name in (metric, config.by) if name and name not in (LENGTH, TURNS)]
        return list(dict.fromkeys([*_ALWAYS, *turns, *named]))

    def _check(self, option: str, name: str, others: Iterable[str]) -> None:
        if name in self.own and self.alias(name) != name:
            raise UsageError(
                f"{option} is {name!r}, which the joined table has, too. "
                f"Write {OWN}{name} for that one, or rename it to mean the other."
            )
        known = [*others, *self.scores, *map(self.alias, self.own)]
        if name not in known:
            raise UsageError(
                f"{option} is {name!r}; choose one of {', '.join(dict.fromkeys(known))}."
            )


def _unified(table: pa.Table) -> pa.Table:
    """With one dictionary for all of a column, so that codes can be compared."""
    for i, name in enumerate(table.column_names):
        if pa.types.is_dictionary(table.schema.field(name).type):
            table = table.set_column(i, name, encode(table[name]))
    return table


def _is_numeric(type: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(type) or pa.types.is_floating(type) or pa.types.is_decimal(type)
    )
