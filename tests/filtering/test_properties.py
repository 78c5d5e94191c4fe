"""What holds for every score table, budget and strata."""

import math
from typing import Any

import numpy as np
import pyarrow as pa
from filtering.helpers import choose, score_table
from hypothesis import given
from hypothesis import strategies as st

# Few different values, so that many tie.
VALUES = st.one_of(st.none(), st.just(math.nan), st.integers(0, 4).map(float))
ROWS = st.lists(
    st.tuples(
        VALUES, st.sampled_from(["a", "b", None]), st.integers(1, 30), st.sampled_from(["x", "y"])
    ),
    max_size=40,
)
FRACTIONS = st.integers(0, 20).map(lambda n: n / 20)
BUDGETS = st.one_of(
    st.builds(lambda f: {"keep": f}, FRACTIONS.filter(bool)),
    st.builds(lambda n: {"keep_rows": n}, st.integers(1, 50)),
    st.builds(lambda n: {"keep_tokens": n}, st.integers(1, 500)),
    st.builds(lambda a, b: {"band": (min(a, b), max(a, b))}, FRACTIONS, FRACTIONS).filter(
        lambda budget: budget["band"][0] < budget["band"][1]
    ),
)
STRATA = st.sampled_from([None, "kind", "source", "length"])


def table_of(rows: list[tuple[Any, ...]]) -> pa.Table:
    values, kinds, tokens, sources = zip(*rows, strict=True) if rows else ([],) * 4
    numbers = {"x": iter(range(len(rows))), "y": iter(range(len(rows)))}
    return score_table(
        values,
        kind=pa.array(kinds, pa.string()),
        num_supervised_tokens=pa.array(tokens, pa.int32()),
        source=pa.array(sources, pa.string()),
        row=pa.array([next(numbers[source]) for source in sources], pa.int64()),
    )


@given(ROWS, BUDGETS, STRATA)
def test_every_row_is_kept_dropped_or_skipped(
    rows: list[Any], budget: dict[str, Any], by: str | None
) -> None:
    selection = choose(table_of(rows), by=by, **budget)
    skipped = ~selection.scored
    outcomes = selection.kept.astype(int) + selection.dropped + skipped
    assert (outcomes == 1).all()
    assert not (selection.kept & np.isnan(selection.values)).any()
    assert skipped.sum() == sum(value is None for value, *_ in rows)


@given(ROWS, BUDGETS, STRATA)
def test_the_budget_is_respected(rows: list[Any], budget: dict[str, Any], by: str | None) -> None:
    table = table_of(rows)
    kept = choose(table, by=by, **budget).kept
    there = np.array([value is not None and math.isfinite(value) for value, *_ in rows], bool)
    tokens = table["num_supervised_tokens"].to_numpy()
    if "keep_rows" in budget:
        assert kept.sum() == min(budget["keep_rows"], there.sum())
    elif "keep_tokens" in budget:
        assert tokens[kept].sum() <= budget["keep_tokens"]
        if budget["keep_tokens"] >= tokens[there].sum():
            assert (kept == there).all()
    elif "keep" in budget:
        assert kept.sum() >= math.floor(budget["keep"] * there.sum())


@given(ROWS, BUDGETS, STRATA, st.booleans(), st.randoms(use_true_random=False))
def test_the_order_of_the_rows_is_nothing(
    rows: list[Any], budget: dict[str, Any], by: str | None, low: bool, random: Any
) -> None:
    table = table_of(rows)
    order = list(range(len(rows)))
    random.shuffle(order)
    settings = {**budget, "by": by, "low": low and "band" not in budget}
    kept = choose(table, **settings).kept
    shuffled = choose(table.take(pa.array(order, pa.int64())), **settings).kept
    assert shuffled.tolist() == kept[order].tolist()


@given(ROWS, BUDGETS)
def test_within_a_stratum_nothing_dropped_ranks_above_what_is_kept(
    rows: list[Any], budget: dict[str, Any]
) -> None:
    if "band" in budget:
        return
    selection = choose(table_of(rows), by="kind", **budget)
    kinds = np.array([str(kind) for _, kind, *_ in rows], str)
    for kind in set(kinds):
        kept = selection.values[selection.kept & (kinds == kind)]
        dropped = selection.values[selection.dropped & (kinds == kind)]
        dropped = dropped[~np.isnan(dropped)]
        assert not len(kept) or not len(dropped) or kept.min() >= dropped.max()


@given(
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=60),
    st.integers(1, 60),
    FRACTIONS.filter(bool),
)
def test_strata_are_within_one_row_of_their_share(
    kinds: list[str], number: int, fraction: float
) -> None:
    values = np.random.default_rng(0).permutation(len(kinds)).astype(float).tolist()
    table = score_table(values, kind=kinds)
    names, sizes = np.unique(kinds, return_counts=True)
    codes = np.searchsorted(names, kinds)
    by_fraction = choose(table, by="kind", keep=fraction).kept
    by_number = choose(table, by="kind", keep_rows=number).kept
    number = min(number, len(kinds))
    assert (
        np.abs(np.bincount(codes[by_fraction], minlength=len(names)) - fraction * sizes) <= 1
    ).all()
    exact = number * sizes / len(kinds)
    assert (np.abs(np.bincount(codes[by_number], minlength=len(names)) - exact) < 1).all()


@given(ROWS, BUDGETS, st.sampled_from([None, "kind"]), st.integers(0, 3))
def test_matched_lengths_keep_as_many_rows(
    rows: list[Any], budget: dict[str, Any], by: str | None, seed: int
) -> None:
    table = table_of(rows)
    flat = choose(table, by=by, seed=seed, **budget).kept
    drawn = choose(table, by=by, seed=seed, metric="random", match_length=True, **budget)
    assert drawn.kept.sum() == flat.sum()
    assert not (drawn.kept & ~drawn.scored).any()
