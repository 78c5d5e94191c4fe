import math

import numpy as np
import pyarrow as pa
import pytest

from sfdd.filtering.selection import Selection, select

VALUES = [0.3, 0.1, 0.5, 0.2, 0.4]


def score_table(values: list[float | None], column: str = "flatness") -> pa.Table:
    """A score table; None is a skipped record."""
    count = len(values)
    return pa.table(
        {
            "id": [str(i) for i in range(count)],
            "source": ["data"] * count,
            "row": range(count),
            "status": ["skipped" if v is None else "scored" for v in values],
            "reason": pa.array(
                ["no_assistant_turn" if v is None else None for v in values], pa.string()
            ),
            "num_supervised_tokens": pa.array([10 * (i + 1) for i in range(count)], pa.int32()),
            column: pa.array(values, pa.float64()),
        }
    )


def kept_rows(selection: Selection) -> list[int]:
    return selection.kept["row"].to_pylist()


@pytest.mark.parametrize(
    ("keep", "rows", "threshold"),
    [
        (1.0, [0, 1, 2, 3, 4], 0.1),
        (0.8, [0, 2, 3, 4], 0.2),
        (0.5, [0, 2, 4], 0.3),  # the median itself is kept
        (0.4, [2, 4], 0.4),
        (0.2, [2], 0.5),
        (1e-9, [2], 0.5),
    ],
)
def test_keeps_what_reaches_the_quantile(keep: float, rows: list[int], threshold: float) -> None:
    selection = select(score_table(VALUES), "flatness", keep)
    assert kept_rows(selection) == rows
    assert selection.threshold == threshold


@pytest.mark.parametrize("count", [1, 2, 3, 10, 11, 101, 1000])
@pytest.mark.parametrize("keep", [0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
def test_agrees_with_the_quantile_of_the_paper(count: int, keep: float) -> None:
    values = np.random.default_rng(count).permutation(count).astype(float)
    selection = select(score_table(values.tolist()), "flatness", keep)
    quantile = np.quantile(values, 1 - keep)
    assert kept_rows(selection) == np.flatnonzero(values >= quantile - 1e-6).tolist()


def test_ties_are_kept() -> None:
    selection = select(score_table([0.1, 0.2, 0.2, 0.2]), "flatness", keep=0.25)
    assert kept_rows(selection) == [1, 2, 3]
    assert selection.retention_ratio == 0.75


@pytest.mark.parametrize(
    ("metric", "column", "rows"),
    [
        ("flatness", "flatness", [2, 4]),
        ("entropy", "entropy", [2, 4]),
        ("top1", "top1", [1, 3]),
        ("margin", "margin", [1, 3]),
        ("energy", "energy", [2, 4]),
        ("ppl", "nll", [2, 4]),
    ],
)
def test_directions(metric: str, column: str, rows: list[int]) -> None:
    selection = select(score_table(VALUES, column), metric, keep=0.4)
    assert kept_rows(selection) == rows
    assert selection.threshold == (0.4 if rows == [2, 4] else 0.2)


def test_random_is_seeded_and_blind_to_scores() -> None:
    table = score_table([float(i) for i in range(1000)])
    first, again, other = (kept_rows(select(table, "random", 0.5, seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert len(first) == 500
    assert abs(np.mean(first) - 499.5) < 40


def test_skipped_and_non_finite_records_are_never_kept() -> None:
    table = score_table([None, 0.1, math.nan, 0.3, math.inf])
    selection = select(table, "flatness", keep=1.0)
    assert kept_rows(selection) == [1, 3]
    assert selection.dropped.num_rows == 0
    assert selection.retention_ratio == 1.0
    reasons = selection.table["reason"].to_pylist()
    assert reasons == ["no_assistant_turn", None, "not scored", None, "not scored"]


def test_every_scored_record_is_kept_or_dropped_with_a_reason() -> None:
    selection = select(score_table([*VALUES, None]), "flatness", keep=0.4)
    assert selection.dropped["row"].to_pylist() == [0, 1, 3]
    assert set(selection.dropped["reason"].to_pylist()) == {"flatness beyond the threshold"}
    assert selection.kept["reason"].null_count == 2
    assert selection.table.num_rows == 6


def test_nothing_scored() -> None:
    selection = select(score_table([None]), "flatness", keep=0.5)
    assert kept_rows(selection) == []
    assert math.isnan(selection.threshold)
    assert selection.retention_ratio == 0.0
