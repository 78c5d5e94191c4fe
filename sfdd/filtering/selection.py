"""The paper's rule (arXiv 2601.18902, section 4.3): keep what is at least as flat as the quantile."""

import math
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sfdd.filtering.config import METRICS


@dataclass(frozen=True)
class Selection:
    """What was decided about every record of a score table.

    Attributes:
        table: one row a record, in the order of the scores: id, source, row, num_supervised_tokens,
            value (of the metric, null where not scored), kept, reason (null where kept).
        threshold: value of the last conversation kept; NaN where nothing was scored.
    """

    table: pa.Table
    threshold: float

    @property
    def kept(self) -> pa.Table:
        return self.table.filter(self.table["kept"])

    @property
    def dropped(self) -> pa.Table:
        """Scored, but on the other side of the threshold."""
        scored = pc.is_valid(self.table["value"])
        return self.table.filter(pc.and_(scored, pc.invert(self.table["kept"])))

    @property
    def retention_ratio(self) -> float:
        """Kept share of the scored conversations; above `keep` where values tie."""
        scored = self.table.num_rows - self.table["value"].null_count
        return self.kept.num_rows / scored if scored else 0.0


def select(scores: pa.Table, metric: str, keep: float, seed: int = 0) -> Selection:
    """Decide about every record of a score table.

    Kept is { S : value(S) >= the (1 - keep) quantile }, or <= the keep quantile for a metric of which
    the low end is kept; ties are kept. Skipped records and values that are not finite are never kept.

    Args:
        scores: columns id, source, row, status, reason, num_supervised_tokens, and the metric's.
        metric: a name in `METRICS`.
        keep: fraction in (0, 1].
        seed: of the metric `random`.
    """
    values = _values(scores, metric, seed)
    scored = np.isfinite(values)
    ranks = values if METRICS[metric].keep_high else -values
    lowest_kept = _quantile_above(ranks[scored], 1 - keep)
    kept = scored & (np.nan_to_num(ranks, nan=-np.inf) >= lowest_kept)

    threshold = lowest_kept if METRICS[metric].keep_high else -lowest_kept
    reason = pc.if_else(
        pa.array(scored),
        f"{metric} beyond the threshold",
        pc.fill_null(scores["reason"], "not scored"),
    )
    table = scores.select(["id", "source", "row", "num_supervised_tokens"])
    table = table.append_column("value", pa.array(values, mask=~scored))
    table = table.append_column("kept", pa.array(kept))
    table = table.append_column("reason", pc.if_else(pa.array(kept), None, reason))
    return Selection(table.replace_schema_metadata(None), float(threshold))


def _values(scores: pa.Table, metric: str, seed: int) -> np.ndarray:
    """float64 [rows]; NaN where the record was not scored."""
    scored = pc.equal(scores["status"], "scored").to_numpy()
    column = METRICS[metric].column
    if column is None:
        values = np.random.default_rng(seed).random(len(scored))
    else:
        values = pc.fill_null(scores[column], math.nan).to_numpy()
    return np.where(scored, values, math.nan)


def _quantile_above(values: np.ndarray, fraction: float) -> float:
    """The lowest value at or above the linear-interpolation quantile.

    Comparing with it or with the interpolated quantile selects the same values, but it is exact: an
    interpolated one can come out a rounding error above the value it falls on, and drop it.
    """
    if not len(values):
        return math.nan
    position = math.ceil(fraction * (len(values) - 1) - 1e-9)
    return float(np.partition(values, position)[position])
