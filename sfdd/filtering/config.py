"""What `sfdd filter` can be told, and what it does when told nothing."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sfdd.artifacts import DEFAULT_RUN
from sfdd.errors import UsageError

DEFAULT_KEEP = 0.5
BUDGETS = ("keep", "keep_rows", "keep_tokens", "band")


@dataclass(frozen=True)
class Metric:
    """A value of a conversation by which to rank: its column, and which end to keep.

    `column` is None where the value is drawn at random.
    """

    column: str | None
    keep_high: bool = True


# Directions as in the paper's comparison: every metric keeps what the target is least sure of.
METRICS = {
    "flatness": Metric("flatness"),
    "entropy": Metric("entropy"),
    "top1": Metric("top1", keep_high=False),
    "margin": Metric("margin", keep_high=False),
    "energy": Metric("energy"),
    "ppl": Metric("nll"),  # exp is monotonic: the order of perplexities is that of the mean nll
    "random": Metric(None),
}


@dataclass(frozen=True)
class FilterConfig:
    """Settings of one selection. Of the four budgets one is set; without any, half is kept.

    Attributes:
        keep: fraction of the scored conversations to keep, in (0, 1]; ties are kept.
        keep_rows: how many conversations to keep; ties are drawn by lot.
        keep_tokens: how many supervised tokens to keep at most.
        band: quantiles of the metric between which to keep.
        low: keep the other end of the metric.
        by: what forms strata, each with its share of the budget: `source`, `length`, `turns` or a column.
        metric: one of `METRICS`, or a numeric column of the score table or of `join`.
        match_length: draw as many at random from every length as flatness would keep there.
        join: the user's own table, whose column `id` names the conversations.
        seed: of the metric `random` and of the lots.
        scores: score table; None is the run's.
        data: where the scored data sets are now, in order; empty is where they were scored.
    """

    keep: float | None = None
    keep_rows: int | None = None
    keep_tokens: int | None = None
    band: tuple[float, float] | None = None
    low: bool = False
    by: str | None = None
    metric: str = "flatness"
    match_length: bool = False
    join: Path | None = None
    seed: int = 0
    run: Path = DEFAULT_RUN
    scores: Path | None = None
    data: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_budget()
        if self.seed < 0:
            raise UsageError(f"--seed is {self.seed}; it must be 0 or above.")
        if self.match_length and self.metric != "random":
            raise UsageError(
                f"--match-length draws at random, but --metric is {self.metric!r}. "
                "Give --metric random with it."
            )
        if self.low and self.band:
            raise UsageError("--band names both of its ends, so --low has no meaning with it.")
        if self.low and self.metric == "random" and not self.match_length:
            raise UsageError("--low has no meaning with --metric random, whose ends are alike.")

    @property
    def budget(self) -> tuple[str, Any]:
        """Name and value of the budget that is set."""
        given = [(name, getattr(self, name)) for name in BUDGETS if getattr(self, name) is not None]
        return given[0] if given else ("keep", DEFAULT_KEEP)

    @property
    def ranking(self) -> Metric:
        """The metric's column, and the end to keep of it. The high end of an own column is kept."""
        metric = METRICS.get(self.metric, Metric(self.metric))
        return Metric(metric.column, metric.keep_high != self.low)

    def _check_budget(self) -> None:
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(given) > 1:
            named = " and ".join(map(_option, given))
            raise UsageError(
                f"{named} exclude each other. Give one of {', '.join(map(_option, BUDGETS))}."
            )
        if self.keep is not None and not 0 < self.keep <= 1:
            raise UsageError(
                f"--keep is {self.keep}; it is the fraction to keep, above 0 and at most 1."
            )
        for name in ("keep_rows", "keep_tokens"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise UsageError(f"{_option(name)} is {number}; it must be 1 or above.")
        if self.band is not None and not 0 <= self.band[0] < self.band[1] <= 1:
            low, high = self.band
            raise UsageError(
                f"--band is {low:g}:{high:g}; it is two fractions from 0 to 1, the lower one first."
            )


def parse_band(text: str) -> tuple[float, float]:
    """`0.2:0.8` -> (0.2, 0.8)

    Raises:
        UsageError: the text is something else.
    """
    try:
        low, high = map(float, text.split(":"))
    except ValueError:
        low = high = math.nan
    if math.isnan(low + high):
        raise UsageError(f"--band is {text!r}; write two fractions, such as 0.2:0.8.")
    return low, high


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
