"""What kind of data was kept, and a warning where a kind all but went."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sfdd.filtering.budgets import Floats, Ints
from sfdd.filtering.config import BUDGETS, FilterConfig
from sfdd.filtering.groups import Grouping
from sfdd.filtering.scores import Scores
from sfdd.filtering.selection import Selection

_MOST_LISTED = 100  # kinds of a column; a column of prompts may have millions
_MOST_NAMED = 5
_LOST = 0.1  # a kind of which at most this share is kept is all but gone
_FEWEST = 20  # scored rows that a kind must have to be worth a warning


@dataclass(frozen=True)
class Share:
    """How much of a kind of conversations was kept.

    Attributes:
        name: of the kind; of a length, the supervised tokens of its shortest and longest.
        share: `kept` of `scored`.
        threshold: value of the last one kept, where the kind was a stratum of its own.
    """

    name: str
    scored: int
    kept: int
    share: float
    supervised_tokens: int
    supervised_tokens_kept: int
    threshold: float | None = None


@dataclass(frozen=True)
class FilterReport:
    """What was kept, in conversations and in supervised tokens; `scored` = `kept` + `dropped`.

    Attributes:
        keep: the budget, as are `keep_rows`, `keep_tokens` and `band`; one of them is set.
        threshold: value of the last conversation kept; None with strata and random draws of equal length.
        upper_threshold: of a band.
        without_value: dropped because the metric has no finite value for them.
        joined: conversations for which the joined table has a row; None without one.
        kept_share: by name of the kinds: source, length, turns, and columns.
        notes: what else the user should know of the outcome.
        warnings: kinds that all but went.
    """

    selection: Path
    distilled: list[Path]
    metric: str
    keep: float | None
    keep_rows: int | None
    keep_tokens: int | None
    band: tuple[float, float] | None
    low: bool
    by: str | None
    match_length: bool
    threshold: float | None
    upper_threshold: float | None
    scored: int
    skipped: int
    kept: int
    dropped: int
    without_value: int
    joined: int | None
    retention_ratio: float
    supervised_tokens_scored: int
    supervised_tokens_kept: int
    kept_share: dict[str, list[Share]]
    notes: list[str]
    warnings: list[str]


def report_of(
    scores: Scores,
    selection: Selection,
    config: FilterConfig,
    path: Path,
) -> FilterReport:
    """Count what a selection keeps of what; nothing is distilled yet."""
    budget, amount = config.budget
    scored, kept = int(selection.scored.sum()), int(selection.kept.sum())
    counts = [_count(kind, scores, selection) for kind in scores.kinds(config.by)]
    return FilterReport(
        selection=path,
        distilled=[],
        metric=config.metric,
        **dict.fromkeys(BUDGETS) | {budget: amount},
        low=config.low,
        by=config.by,
        match_length=config.match_length,
        threshold=selection.threshold,
        upper_threshold=selection.upper_threshold,
        scored=scored,
        skipped=len(scores) - scored,
        kept=kept,
        dropped=scored - kept,
        without_value=int(selection.without_value.sum()),
        joined=scores.joined.matched if scores.joined else None,
        retention_ratio=selection.retention_ratio,
        supervised_tokens_scored=int(scores.tokens[selection.scored].sum(dtype=np.int64)),
        supervised_tokens_kept=int(scores.tokens[selection.kept].sum(dtype=np.int64)),
        kept_share={
            count.kinds.name: count.listed(_thresholds(count.kinds, selection, config))
            for count in counts
        },
        notes=_notes(scores, selection, config),
        warnings=[w for count in counts if (w := _warning(count, selection, config))],
    )


@dataclass(frozen=True)
class _Count:
    """Conversations and supervised tokens of every kind, in the order of its labels. All [kinds]"""

    kinds: Grouping
    scored: Ints
    kept: Ints
    tokens: Ints
    tokens_kept: Ints

    def listed(self, thresholds: Floats) -> list[Share]:
        """Every kind that has scored conversations, or the largest, and the others together."""
        present = np.flatnonzero(self.scored)
        largest = present[np.argsort(-self.scored[present], kind="stable")]
        shown = np.sort(largest[:_MOST_LISTED])
        others = largest[_MOST_LISTED:]
        shares = [
            self._share(self.kinds.label(i), shown[at : at + 1], float(thresholds[i]))
            for at, i in enumerate(shown.tolist())
        ]
        if len(others):
            shares.append(self._share(f"{len(others):,} others", others))
        return shares

    def _share(self, name: str, some: Ints, threshold: float = math.nan) -> Share:
        scored, kept, tokens, tokens_kept = (
            int(numbers[some].sum())
            for numbers in (self.scored, self.kept, self.tokens, self.tokens_kept)
        )
        return Share(
            name,
            scored,
            kept,
            kept / scored,
            tokens,
            tokens_kept,
            None if math.isnan(threshold) else threshold,
        )


def _count(kinds: Grouping, scores: Scores, selection: Selection) -> _Count:
    scored, kept = np.flatnonzero(selection.scored), np.flatnonzero(selection.kept)
    of_scored, of_kept = kinds.strata(scored), kinds.strata(kept)
    return _Count(
        kinds,
        of_scored.sizes,
        of_kept.sizes,
        of_scored.sums(scores.tokens[scored]),
        of_kept.sums(scores.tokens[kept]),
    )


def _thresholds(kinds: Grouping, selection: Selection, config: FilterConfig) -> Floats:
    """Of every kind that was a stratum; NaN where it was none, or has none. [kinds]"""
    thresholds = np.full(len(kinds.labels), math.nan)
    if kinds.name == config.by and not config.match_length:
        kept = np.flatnonzero(selection.kept)
        last = np.fmin if config.ranking.keep_high else np.fmax
        last.at(thresholds, kinds.codes[kept], selection.values[kept])
    return thresholds


def _notes(scores: Scores, selection: Selection, config: FilterConfig) -> list[str]:
    notes = []
    budget, amount = config.budget
    has_value = selection.scored & ~selection.without_value
    rows, tokens = int(has_value.sum()), int(scores.tokens[has_value].sum(dtype=np.int64))
    if budget == "keep_rows" and amount > rows:
        notes.append(f"--keep-rows {amount:,} is more than the {rows:,} there are: all are kept.")
    if budget == "keep_tokens" and amount > tokens:
        notes.append(
            f"--keep-tokens {amount:,} is more than the {tokens:,} supervised tokens there are: "
            "all are kept."
        )
    if missing := int(selection.without_value.sum()):
        notes.append(f"{missing:,} scored conversations have no finite {config.metric}: dropped.")
    if config.match_length:
        notes.append(
            "Drawn at random, as many of every length"
            + (f" and {config.by}" if config.by else "")
            + " as flatness would keep there."
        )
    return notes


def _warning(count: _Count, selection: Selection, config: FilterConfig) -> str:
    """Names the kinds that all but went; "" if there are none.

    A small budget drops nine tenths of everything: then it takes less than half of the common share, too.
    """
    overall = selection.retention_ratio
    share = count.kept / np.maximum(count.scored, 1)
    lost = np.flatnonzero((count.scored >= _FEWEST) & (share <= _LOST) & (share < overall / 2))
    if not len(lost):
        return ""
    largest = lost[np.argsort(-count.scored[lost], kind="stable")]
    named = [
        f"{count.kinds.label(i)} keeps {count.kept[i]:,} of {count.scored[i]:,} ({share[i]:.1%})"
        for i in largest[:_MOST_NAMED].tolist()
    ]
    more = f", and {len(lost) - len(named):,} more like these" if len(lost) > len(named) else ""
    name = count.kinds.name
    remedy = (
        f"Their share by --by {name} was too small, or they have no {config.metric}."
        if name == config.by
        else f"--by {name} keeps a share of each."
    )
    return (
        f"By {name}, nine tenths or more are lost of what a drafter may need: "
        f"{', '.join(named)}{more}, while {overall:.1%} of all conversations are kept. {remedy}"
    )
