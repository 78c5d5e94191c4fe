"""Which rows a budget keeps: pure arithmetic on arrays, for any number of rows and strata.

Ranks are high for what is to be kept. A stratum is a number from 0; every budget is applied within each.
Nothing here depends on the order of the rows.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

Floats: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]
Ints: TypeAlias = np.ndarray[tuple[int], np.dtype[Any]]
Bools: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool_]]

# A quantile's position is a product of decimal fractions: 0.7 * 10 must not come out above 7.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Strata:
    """The stratum of every row, [rows], numbered from 0 to `count` - 1; one may be empty."""

    codes: Ints
    count: int

    @classmethod
    def one(cls, rows: int) -> "Strata":
        """All rows together."""
        return cls(np.zeros(rows, np.int8), 1)

    @cached_property
    def sizes(self) -> Ints:
        """Rows of each. [strata]"""
        return np.bincount(self.codes, minlength=self.count)

    @cached_property
    def starts(self) -> Ints:
        """Where each would begin if the rows were sorted by stratum. [strata]"""
        return np.cumsum(self.sizes) - self.sizes

    def sums(self, weights: Ints) -> Ints:
        """Of one whole number a row. [strata]"""
        return np.bincount(self.codes, weights, minlength=self.count).astype(np.int64)

    def sorted_by(self, *keys: Floats) -> Ints:
        """Row numbers, stratum after stratum, ascending in the first key, then in the next. [rows]"""
        strata = () if self.count == 1 else (self.codes,)
        return np.lexsort((*reversed(keys), *strata))


def best_fraction(ranks: Floats, strata: Strata, fraction: float) -> Bools:
    """{ row : rank >= the (1 - fraction) quantile } (arXiv 2601.18902, section 4.3); ties are kept.

    The quantile is the lowest rank at or above the linear-interpolation one. Comparing with either
    selects the same rows, but it is exact: an interpolated one can come out a rounding error above the
    rank it falls on, and drop it.
    """
    return ranks >= _quantiles_above(ranks, strata, 1 - fraction)[strata.codes]


def band(values: Floats, strata: Strata, low: float, high: float) -> Bools:
    """The rows at or above the `low` quantile and at or below the `high` one; ties are kept.

    A stratum may have no row between the two: of two rows none is in the middle half.
    """
    lowest = _quantiles_above(values, strata, low)
    highest = -_quantiles_above(-values, strata, 1 - high)
    return (values >= lowest[strata.codes]) & (values <= highest[strata.codes])


def best_rows(ranks: Floats, strata: Strata, quotas: Ints, lots: Floats) -> Bools:
    """As many rows of each stratum as its quota says: the best, and of those that tie the lowest lots.

    Args:
        quotas: none above the stratum's size. [strata]
        lots: which of several equal rows come first. [rows]
    """
    last = _at(-ranks, strata, quotas - 1)[strata.codes]
    wanted = (quotas > 0)[strata.codes]
    kept = wanted & (-ranks < last)
    tied = np.flatnonzero(wanted & (-ranks == last))
    missing = quotas - Strata(strata.codes[kept], strata.count).sizes
    ties = Strata(strata.codes[tied], strata.count)
    order = ties.sorted_by(lots[tied])
    place = np.arange(len(tied)) - ties.starts[ties.codes[order]]
    kept[tied[order[place < missing[ties.codes[order]]]]] = True
    return kept


def best_tokens(ranks: Floats, strata: Strata, quotas: Ints, lots: Floats, tokens: Ints) -> Bools:
    """The best rows of each stratum, up to the first with which their tokens would exceed its quota.

    What follows that one is dropped however short it is, so that everything kept ranks above everything
    dropped.
    """
    order = strata.sorted_by(-ranks, lots)
    codes = strata.codes[order]
    spent = np.cumsum(tokens[order], dtype=np.int64)
    before = np.concatenate(([0], spent))[strata.starts]
    kept = np.zeros(len(ranks), np.bool_)
    kept[order] = spent - before[codes] <= quotas[codes]
    return kept


def shares(budget: int, sizes: Ints) -> Ints:
    """A budget in proportion to some sizes, in whole numbers that add up to it (largest remainder).

    Of equal remainders the first gets more. More than there is gives everything.
    """
    total = int(sizes.sum())
    if budget >= total:
        return sizes
    fits = budget * int(sizes.max()) < 2**63
    products = sizes.astype(np.int64 if fits else object) * budget
    quotas = (products // total).astype(np.int64)
    largest = np.argsort(-(products % total).astype(np.float64), kind="stable")
    quotas[largest[: budget - int(quotas.sum())]] += 1
    return quotas


def draw_lots(sources: Ints, rows: Ints, seed: int) -> Floats:
    """A number in [0, 1) for every record, which depends on nothing but its source, row and the seed."""
    lengths = np.zeros(int(sources.max(initial=-1)) + 1, np.int64)
    np.maximum.at(lengths, sources, rows + 1)
    starts = np.cumsum(lengths) - lengths
    return np.random.default_rng(seed).random(int(lengths.sum()))[starts[sources] + rows]


def _quantiles_above(values: Floats, strata: Strata, fraction: float) -> Floats:
    """The lowest value at or above the quantile of each stratum. [strata]"""
    return _at(values, strata, np.ceil(fraction * (strata.sizes - 1) - _ROUNDING).astype(np.int64))


def _at(values: Floats, strata: Strata, positions: Ints) -> Floats:
    """The value at a position of each stratum, in ascending order; NaN in one that is empty. [strata]"""
    if not len(values):
        return np.full(strata.count, math.nan)
    places = strata.starts + np.clip(positions, 0, np.maximum(strata.sizes - 1, 0))
    places = np.minimum(places, len(values) - 1)  # those of empty strata
    if strata.count == 1:
        found = np.partition(values, places[0])[places]
    else:
        found = values[strata.sorted_by(values)[places]]
    return np.where(strata.sizes > 0, found, math.nan)
