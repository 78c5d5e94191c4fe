import math

import numpy as np
import pytest
from filtering.helpers import choose, kept_rows, reasons, score_table

from sfdd.errors import UsageError

VALUES = [0.3, 0.1, 0.5, 0.2, 0.4]


class TestKeep:
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
    def test_keeps_what_reaches_the_quantile(
        self, keep: float, rows: list[int], threshold: float
    ) -> None:
        selection = choose(score_table(VALUES), keep=keep)
        assert kept_rows(selection) == rows
        assert selection.threshold == threshold

    @pytest.mark.parametrize("count", [1, 2, 3, 10, 11, 101, 1000])
    @pytest.mark.parametrize("keep", [0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
    def test_agrees_with_the_quantile_of_the_paper(self, count: int, keep: float) -> None:
        values = np.random.default_rng(count).permutation(count).astype(float)
        selection = choose(score_table(values.tolist()), keep=keep)
        quantile = np.quantile(values, 1 - keep)
        assert kept_rows(selection) == np.flatnonzero(values >= quantile - 1e-6).tolist()

    def test_ties_are_kept(self) -> None:
        selection = choose(score_table([0.1, 0.2, 0.2, 0.2]), keep=0.25)
        assert kept_rows(selection) == [1, 2, 3]
        assert selection.retention_ratio == 0.75

    def test_half_is_kept_when_nothing_is_said(self) -> None:
        assert kept_rows(choose(score_table(VALUES))) == [0, 2, 4]


@pytest.mark.parametrize(
    ("metric", "column", "high"),
    [
        ("flatness", "flatness", True),
        ("entropy", "entropy", True),
        ("top1", "top1", False),
        ("margin", "margin", False),
        ("energy", "energy", True),
        ("ppl", "nll", True),
        ("nll", "nll", True),
        ("own", "own", True),
    ],
)
@pytest.mark.parametrize("low", [False, True])
def test_directions(metric: str, column: str, high: bool, low: bool) -> None:
    selection = choose(score_table(VALUES, column), metric=metric, keep=0.4, low=low)
    assert kept_rows(selection) == ([2, 4] if high != low else [1, 3])
    assert selection.threshold == (0.4 if high != low else 0.2)


class TestKeepRows:
    @pytest.mark.parametrize(
        ("number", "rows"),
        [(1, [2]), (2, [2, 4]), (4, [0, 2, 3, 4]), (5, [0, 1, 2, 3, 4]), (6, [0, 1, 2, 3, 4])],
    )
    def test_the_flattest(self, number: int, rows: list[int]) -> None:
        assert kept_rows(choose(score_table(VALUES), keep_rows=number)) == rows

    def test_the_least_flat(self) -> None:
        assert kept_rows(choose(score_table(VALUES), keep_rows=2, low=True)) == [1, 3]

    def test_ties_are_drawn_by_lot(self) -> None:
        """All above the tie, and as many of it as there is room for: not always the first ones."""
        table = score_table([0.1, *[0.2] * 40, 0.3])
        drawn = [kept_rows(choose(table, keep_rows=21, seed=seed)) for seed in range(5)]
        for rows in drawn:
            assert len(rows) == 21
            assert 41 in rows
            assert 0 not in rows
        assert len({tuple(rows) for rows in drawn}) == 5
        assert drawn[0] == kept_rows(choose(table, keep_rows=21, seed=0))

    def test_one_row(self) -> None:
        assert kept_rows(choose(score_table([0.1]), keep_rows=1)) == [0]

    def test_all_equal(self) -> None:
        assert len(kept_rows(choose(score_table([0.5] * 7), keep_rows=3))) == 3


class TestKeepTokens:
    """Rows have 10, 20, 30, 40 and 50 tokens; from the flattest: row 2 (30), 4 (50), 0 (10), 3 (40)."""

    @pytest.mark.parametrize(
        ("number", "rows"),
        [
            (29, []),
            (30, [2]),
            (79, [2]),  # row 0 would fit, but row 4 is flatter and does not
            (80, [2, 4]),
            (90, [0, 2, 4]),
            (149, [0, 2, 3, 4]),
            (150, [0, 1, 2, 3, 4]),
            (10**15, [0, 1, 2, 3, 4]),
        ],
    )
    def test_up_to_the_first_that_does_not_fit(self, number: int, rows: list[int]) -> None:
        assert kept_rows(choose(score_table(VALUES), keep_tokens=number)) == rows

    def test_ties_are_drawn_by_lot(self) -> None:
        table = score_table([0.5] * 20, num_supervised_tokens=[10] * 20)
        drawn = {tuple(kept_rows(choose(table, keep_tokens=100, seed=s))) for s in range(4)}
        assert {len(rows) for rows in drawn} == {10}
        assert len(drawn) == 4


class TestBand:
    @pytest.mark.parametrize(
        ("band", "rows"),
        [
            ((0.0, 1.0), [0, 1, 2, 3, 4]),
            ((0.2, 0.8), [0, 3, 4]),  # ranks 0, 1/4, 1/2, 3/4, 1
            ((0.25, 0.75), [0, 3, 4]),
            ((0.26, 0.74), [0]),
            ((0.0, 0.25), [1, 3]),
            ((0.5, 1.0), [0, 2, 4]),
            ((0.51, 0.6), []),
        ],
    )
    def test_between_two_quantiles(self, band: tuple[float, float], rows: list[int]) -> None:
        assert kept_rows(choose(score_table(VALUES), band=band)) == rows

    def test_says_both_thresholds(self) -> None:
        selection = choose(score_table(VALUES), band=(0.2, 0.8))
        assert (selection.threshold, selection.upper_threshold) == (0.2, 0.4)

    def test_ties_are_kept_at_both_ends(self) -> None:
        values = [0.1, 0.2, 0.2, 0.3, 0.4, 0.4, 0.5]
        assert kept_rows(choose(score_table(values), band=(0.3, 0.7))) == [1, 2, 3, 4, 5]

    @pytest.mark.parametrize("keep", [0.1, 0.3, 0.5, 0.7, 1.0])
    def test_up_to_the_top_it_is_keep(self, keep: float) -> None:
        table = score_table(np.random.default_rng(0).random(101).tolist())
        whole = choose(table, band=(1 - keep, 1.0)) if keep < 1 else choose(table, band=(0.0, 1.0))
        assert kept_rows(whole) == kept_rows(choose(table, keep=keep))

    def test_quantiles_are_those_of_the_metric_whichever_end_is_kept(self) -> None:
        table = score_table(VALUES, "top1")
        assert kept_rows(choose(table, metric="top1", band=(0.0, 0.25))) == [1, 3]


class TestBy:
    TOPICS = ("maths", "maths", "talk", "talk", "talk", None, "maths", "talk")
    FLAT = (0.11, 0.12, 0.81, 0.82, 0.83, 0.5, 0.13, 0.84)

    def test_keep_is_a_fraction_of_each(self) -> None:
        table = score_table(self.FLAT, topic=self.TOPICS)
        # maths 0.12 and 0.13 of three; talk the upper two of four; the only one without a topic.
        assert kept_rows(choose(table, by="topic", keep=0.5)) == [1, 4, 5, 6, 7]
        assert kept_rows(choose(table, keep=0.5)) == [2, 3, 4, 7]

    def test_rows_are_shared_in_proportion(self) -> None:
        """Three rows of 8: maths 9/8, talk 12/8, none 3/8: 1 + 1 + 0, and one more for talk."""
        table = score_table(self.FLAT, topic=self.TOPICS)
        assert kept_rows(choose(table, by="topic", keep_rows=3)) == [4, 6, 7]

    def test_tokens_are_shared_in_proportion(self) -> None:
        """Tokens 10 20 30 40 50 60 70 80: maths 100, talk 200, none 60 of 360; of 180: 50, 100, 30.

        Nothing fits into 50 (row 6 has 70) nor into 30 (row 5 has 60); row 7 (80) fits into 100.
        """
        table = score_table(self.FLAT, topic=self.TOPICS)
        assert kept_rows(choose(table, by="topic", keep_tokens=180)) == [7]
        # Of 288: 80, 160, 48: row 6; rows 7 (80) and 4 (50), and 3 (40) does not fit.
        assert kept_rows(choose(table, by="topic", keep_tokens=288)) == [4, 6, 7]

    def test_band_of_each(self) -> None:
        table = score_table(self.FLAT, topic=self.TOPICS)
        # maths: the middle one; talk: ranks 1/3 and 2/3; one alone is rank 0, outside of 0.3.
        assert kept_rows(choose(table, by="topic", band=(0.3, 0.7))) == [1, 3, 4, 5]

    def test_low(self) -> None:
        table = score_table(self.FLAT, topic=self.TOPICS)
        assert kept_rows(choose(table, by="topic", keep_rows=3, low=True)) == [0, 2, 3]

    def test_a_stratum_in_which_nothing_was_scored(self) -> None:
        table = score_table([0.1, 0.2, None, math.nan, 0.3], topic=["a", "a", "b", "b", "c"])
        for budget in ({"keep": 1.0}, {"keep_rows": 3}, {"keep_tokens": 10**6}, {"band": (0, 1)}):
            assert kept_rows(choose(table, by="topic", **budget)) == [0, 1, 4]

    @pytest.mark.parametrize(
        "column", [[1, 1, 2, 2], [True, True, False, False], [0.5, 0.5, math.nan, math.nan]]
    )
    def test_values_of_any_kind(self, column: list[object]) -> None:
        table = score_table([0.1, 0.2, 0.8, 0.9], kind=column)
        assert kept_rows(choose(table, by="kind", keep_rows=2)) == [1, 3]

    def test_length(self) -> None:
        """Ten deciles of two rows each; the flatter of each is kept."""
        flat = [0.1, 0.2] * 5 + [0.9, 0.8] * 5
        selection = choose(score_table(flat), by="length", keep_rows=10)
        assert kept_rows(selection) == [1, 3, 5, 7, 9, 10, 12, 14, 16, 18]

    def test_turns(self) -> None:
        table = score_table([0.1, 0.2, 0.8, 0.9], num_turns=[3, 4, 9, 100])
        assert kept_rows(choose(table, by="turns", keep_rows=2)) == [1, 3]

    def test_strata_have_no_common_threshold(self) -> None:
        assert choose(score_table(VALUES), by="source").threshold is None

    def test_one_stratum_is_no_strata(self) -> None:
        for budget in ({"keep": 0.3}, {"keep_rows": 3}, {"keep_tokens": 90}, {"band": (0.2, 0.9)}):
            table = score_table(VALUES)
            assert kept_rows(choose(table, by="source", **budget)) == kept_rows(
                choose(table, **budget)
            )

    def test_as_many_strata_as_rows(self) -> None:
        assert kept_rows(choose(score_table(VALUES), by="id", keep=0.1)) == [0, 1, 2, 3, 4]
        assert len(kept_rows(choose(score_table(VALUES), by="id", keep_rows=3))) == 3

    def test_lists_form_no_strata(self) -> None:
        table = score_table([0.1, 0.2], tags=[["a"], ["b"]])
        with pytest.raises(UsageError, match=r"'tags' holds list<.*> values, which form no strata"):
            choose(table, by="tags")


class TestRandom:
    def test_is_seeded_and_blind_to_scores(self) -> None:
        table = score_table([float(i) for i in range(1000)])
        first, again, other = (
            kept_rows(choose(table, metric="random", keep=0.5, seed=seed)) for seed in (1, 1, 2)
        )
        assert first == again != other
        assert len(first) == 500
        assert abs(np.mean(first) - 499.5) < 40


class TestMatchLength:
    def tokens_and_flatness(self) -> dict[str, list[float]]:
        random = np.random.default_rng(0)
        tokens = random.integers(1, 500, 1000)
        return {
            "values": (tokens / 1000 + random.random(1000) / 2).tolist(),  # long ones are flatter
            "num_supervised_tokens": tokens.tolist(),
        }

    @pytest.mark.parametrize(
        "settings", [{}, {"keep": 0.2}, {"keep_rows": 123}, {"keep_tokens": 50_000}, {"low": True}]
    )
    def test_as_many_of_every_length_as_by_flatness(self, settings: dict[str, object]) -> None:
        table = score_table(**self.tokens_and_flatness())
        flat = choose(table, **settings)
        drawn = choose(table, metric="random", match_length=True, **settings)
        tokens = table["num_supervised_tokens"].to_numpy()
        borders = np.quantile(tokens, np.arange(1, 10) / 10, method="inverted_cdf")
        deciles = np.searchsorted(borders, tokens)
        assert np.array_equal(
            np.bincount(deciles[flat.kept], minlength=10),
            np.bincount(deciles[drawn.kept], minlength=10),
        )
        assert kept_rows(drawn) != kept_rows(flat)
        assert drawn.threshold is None

    def test_is_seeded(self) -> None:
        table = score_table(**self.tokens_and_flatness())
        first, again, other = (
            kept_rows(choose(table, metric="random", match_length=True, seed=seed))
            for seed in (1, 1, 2)
        )
        assert first == again != other

    def test_within_strata(self) -> None:
        table = score_table(**self.tokens_and_flatness(), topic=["a", "b", "b", "b"] * 250)
        flat = choose(table, by="topic", keep=0.3)
        drawn = choose(table, by="topic", keep=0.3, metric="random", match_length=True)
        topic_a = np.arange(1000) % 4 == 0
        assert (flat.kept & topic_a).sum() == (drawn.kept & topic_a).sum() == 75
        assert flat.kept.sum() == drawn.kept.sum()

    def test_does_not_look_at_flatness(self) -> None:
        """All are of one length, so the draw is that of --metric random."""
        table = score_table([float(i) for i in range(100)], num_supervised_tokens=[7] * 100)
        matched = choose(table, metric="random", match_length=True, seed=3)
        assert kept_rows(matched) == kept_rows(choose(table, metric="random", keep_rows=50, seed=3))


class TestWithoutValue:
    def test_skipped_and_non_finite_records_are_never_kept(self) -> None:
        table = score_table([None, 0.1, math.nan, 0.3, math.inf, -math.inf])
        selection = choose(table, keep=1.0)
        assert kept_rows(selection) == [1, 3]
        assert selection.dropped.nonzero()[0].tolist() == [2, 4, 5]
        assert selection.without_value.nonzero()[0].tolist() == [2, 4, 5]
        assert selection.retention_ratio == 0.4
        missing = "no finite flatness"
        assert reasons(selection, table) == [
            "no_assistant_turn", None, missing, None, missing, missing,
        ]  # fmt: skip

    def test_the_fraction_is_of_those_with_a_value(self) -> None:
        table = score_table([0.1, 0.2, 0.3, 0.4, math.nan, math.nan])
        assert kept_rows(choose(table, keep=0.5)) == [2, 3]

    def test_every_scored_record_is_kept_or_dropped_with_a_reason(self) -> None:
        table = score_table([*VALUES, None])
        for settings, reason in (
            ({"keep": 0.4}, "flatness beyond the threshold"),
            ({"keep_rows": 2}, "flatness beyond the budget"),
            ({"keep_tokens": 80}, "flatness beyond the budget"),
            ({"band": (0.7, 1.0)}, "flatness outside the band"),
        ):
            selection = choose(table, **settings)
            assert kept_rows(selection) == [2, 4]
            assert reasons(selection, table) == [
                reason, reason, None, reason, None, "no_assistant_turn",
            ]  # fmt: skip

    def test_nothing_scored(self) -> None:
        for budget in ({}, {"keep_rows": 3}, {"keep_tokens": 3}, {"band": (0.2, 0.8)}):
            selection = choose(score_table([None]), **budget)
            assert kept_rows(selection) == []
            assert selection.threshold is None
            assert selection.retention_ratio == 0.0

    def test_no_rows_at_all(self) -> None:
        for budget in ({}, {"keep_rows": 3}, {"keep_tokens": 3}, {"band": (0.2, 0.8)}):
            for by in (None, "source", "length"):
                assert kept_rows(choose(score_table([]), by=by, **budget)) == []

    def test_a_metric_that_is_no_number(self) -> None:
        with pytest.raises(UsageError, match="--metric is 'id', whose values are string"):
            choose(score_table(VALUES), metric="id")
