"""Scores -> which conversations to keep, by any metric, budget and strata."""

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sfdd.filtering.budgets import (
    Bools,
    Floats,
    Ints,
    Strata,
    band,
    best_fraction,
    best_rows,
    best_tokens,
    draw_lots,
    shares,
)
from sfdd.filtering.config import FilterConfig
from sfdd.filtering.groups import crossed
from sfdd.filtering.scores import FLATNESS, Scores


@dataclass(frozen=True)
class Selection:
    """What was decided about every record of a score table, in its order.

    Attributes:
        values: of the metric; NaN where the record was not scored, or has no finite value. [rows]
        scored: the others are skipped. [rows]
        kept: only scored ones with a value are. [rows]
        metric: what `values` are.
        reason: of the dropped ones that have a value.
        threshold: value of the last conversation kept; None where it would mean nothing: for strata, and
            for a random draw.
        upper_threshold: of a band.
    """

    values: Floats
    scored: Bools
    kept: Bools
    metric: str
    reason: str
    threshold: float | None = None
    upper_threshold: float | None = None

    @property
    def dropped(self) -> Bools:
        """Scored, and not kept."""
        return self.scored & ~self.kept

    @property
    def without_value(self) -> Bools:
        """Dropped because there is nothing to rank them by."""
        return self.scored & np.isnan(self.values)

    @property
    def retention_ratio(self) -> float:
        """Kept share of the scored conversations; above `keep` where values tie."""
        scored = int(self.scored.sum())
        return int(self.kept.sum()) / scored if scored else 0.0

    def columns(self, start: int, reasons: pa.ChunkedArray) -> dict[str, pa.Array]:
        """Value (null for none), kept and reason (null where kept) of some rows.

        Args:
            start: the first of them.
            reasons: why each of them was skipped, if it was.
        """
        rows = slice(start, start + len(reasons))
        values, kept = self.values[rows], pa.array(self.kept[rows])
        has_value, scored = pa.array(~np.isnan(values)), pa.array(self.scored[rows])
        dropped = pc.if_else(has_value, self.reason, f"no finite {self.metric}")
        skipped = pc.fill_null(pc.cast(reasons, pa.string()), "not scored")
        reason = pc.if_else(scored, dropped, skipped)
        return {
            "value": pa.array(values, mask=np.isnan(values)),
            "kept": kept,
            "reason": pc.if_else(kept, None, reason),
        }


def select(scores: Scores, config: FilterConfig) -> Selection:
    """Decide about every record of a score table.

    Raises:
        UsageError: the metric is not numeric, or the strata are not made of single values.
    """
    values = _values(scores, config)
    rows = np.flatnonzero(~np.isnan(values))
    kept = np.zeros(len(scores), np.bool_)
    if config.match_length:
        kept[rows] = _matched(scores, values, rows, config)
        return Selection(values, scores.scored, kept, config.metric, "not drawn")
    strata = _strata(scores, config, rows)
    kept[rows] = _chosen(values[rows], strata, scores, rows, config)
    selection = Selection(values, scores.scored, kept, config.metric, _reason(config))
    return selection if config.by else _with_threshold(selection, config)


def _values(scores: Scores, config: FilterConfig) -> Floats:
    column = config.ranking.column
    if column is not None:
        return scores.values(column)
    drawn = np.random.default_rng(config.seed).random(len(scores))
    return np.where(scores.scored, drawn, np.nan)


def _strata(scores: Scores, config: FilterConfig, rows: Ints) -> Strata:
    return scores.grouping(config.by).strata(rows) if config.by else Strata.one(len(rows))


def _chosen(
    values: Floats, strata: Strata, scores: Scores, rows: Ints, config: FilterConfig
) -> Bools:
    """Which of the `rows`, of which these are the values, the budget has room for."""
    budget, amount = config.budget
    ranks = values if config.ranking.keep_high else -values
    if budget == "band":
        return band(values, strata, *amount)
    if budget == "keep":
        return best_fraction(ranks, strata, amount)
    lots = draw_lots(scores.sources.codes, scores.table["row"].to_numpy(), config.seed)[rows]
    if budget == "keep_rows":
        return best_rows(ranks, strata, shares(amount, strata.sizes), lots)
    tokens = scores.tokens[rows]
    return best_tokens(ranks, strata, shares(amount, strata.sums(tokens)), lots, tokens)


def _matched(scores: Scores, drawn: Floats, rows: Ints, config: FilterConfig) -> Bools:
    """As many of every length, and stratum, as flatness would keep there, whichever they are."""
    flattest = select(scores, replace(config, metric=FLATNESS, match_length=False))
    flat_rows = np.flatnonzero(flattest.kept)
    if config.by:
        kinds = scores.grouping(config.by)
        cells, flat = (crossed(kinds, scores.lengths, some) for some in (rows, flat_rows))
    else:
        cells, flat = (scores.lengths.strata(some) for some in (rows, flat_rows))
    return best_rows(drawn[rows], cells, flat.sizes, drawn[rows])


def _reason(config: FilterConfig) -> str:
    budget, _ = config.budget
    ends = {"keep": "beyond the threshold", "band": "outside the band"}
    return f"{config.metric} {ends.get(budget, 'beyond the budget')}"


def _with_threshold(selection: Selection, config: FilterConfig) -> Selection:
    kept = selection.values[selection.kept]
    if not len(kept):
        return selection
    lowest, highest = float(kept.min()), float(kept.max())
    if config.budget[0] == "band":
        return replace(selection, threshold=lowest, upper_threshold=highest)
    return replace(selection, threshold=lowest if config.ranking.keep_high else highest)
