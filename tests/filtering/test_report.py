import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from filtering.helpers import make_run, score_table

from sfdd.artifacts import read_parquet_provenance
from sfdd.filtering.config import FilterConfig
from sfdd.filtering.report import FilterReport, Share, report_of
from sfdd.filtering.run import filter_data
from sfdd.filtering.scores import Scores
from sfdd.filtering.selection import select


def report(values: Sequence[float | None], settings: Any = None, **columns: Any) -> FilterReport:
    scores, config = Scores(score_table(values, **columns)), FilterConfig(**(settings or {}))
    return report_of(scores, select(scores, config), config, Path("selection.parquet"))


def spread(count: int, start: float) -> list[float]:
    return [start + i / 10_000 for i in range(count)]


class TestKeptShare:
    def test_by_source_length_and_turns(self) -> None:
        result = report(
            [0.1, 0.2, 0.3, 0.4, None],
            source=["a", "b", "a", "b", "c"],
            num_turns=[1, 3, 4, 12, 0],
        )
        assert result.kept_share == {
            "source": [Share("a", 2, 1, 0.5, 40, 30), Share("b", 2, 1, 0.5, 60, 40)],
            "length": [
                Share("10", 1, 0, 0.0, 10, 0),
                Share("20", 1, 0, 0.0, 20, 0),
                Share("30", 1, 1, 1.0, 30, 30),
                Share("40", 1, 1, 1.0, 40, 40),
            ],
            "turns": [
                Share("1", 1, 0, 0.0, 10, 0),
                Share("3-4", 2, 1, 0.5, 50, 30),
                Share("9+", 1, 1, 1.0, 40, 40),
            ],
        }
        assert (result.scored, result.skipped, result.kept, result.dropped) == (4, 1, 2, 2)
        assert (result.supervised_tokens_scored, result.supervised_tokens_kept) == (100, 70)

    def test_a_table_without_turns(self) -> None:
        assert list(report([0.1, 0.2]).kept_share) == ["source", "length"]

    def test_strata_say_their_thresholds(self) -> None:
        for low, thresholds in ((False, (0.3, 0.4)), (True, (0.1, 0.2))):
            settings = {"by": "topic", "low": low}
            result = report([0.1, 0.2, 0.3, 0.4], settings, topic=["a", "b", "a", "b"])
            assert tuple(share.threshold for share in result.kept_share["topic"]) == thresholds

    def test_of_many_kinds_the_largest_are_listed(self) -> None:
        topics = [f"{i:03}" for i in range(150)] + ["120"] * 50
        result = report(spread(200, 0.1), {"by": "topic"}, topic=topics)
        shares = result.kept_share["topic"]
        assert len(shares) == 101
        assert [shares[0].name, shares[-2].name, shares[-1].name] == ["000", "120", "50 others"]
        assert sum(share.kept for share in shares) == result.kept
        assert sum(share.scored for share in shares) == 200
        assert json.dumps([share.name for share in shares])


class TestNotes:
    @pytest.mark.parametrize(
        ("settings", "note"),
        [
            ({"keep_rows": 3}, "--keep-rows 3 is more than the 2 there are: all are kept."),
            (
                {"keep_tokens": 31},
                "--keep-tokens 31 is more than the 30 supervised tokens there are: all are kept.",
            ),
        ],
    )
    def test_more_than_there_is(self, settings: dict[str, int], note: str) -> None:
        result = report([0.1, 0.2, None], settings)
        assert result.kept == 2
        assert result.notes == [note]

    def test_exactly_what_there_is(self) -> None:
        for settings in ({"keep_rows": 2}, {"keep_tokens": 30}):
            result = report([0.1, 0.2, None], settings)
            assert (result.kept, result.notes) == (2, [])

    def test_matched_lengths(self) -> None:
        settings = {"metric": "random", "match_length": True, "by": "source"}
        assert report([0.1, 0.2], settings).notes == [
            "Drawn at random, as many of every length and source as flatness would keep there."
        ]


class TestWarning:
    """300 of talk are flat; maths and code are not, apart from a few."""

    KINDS = (*["maths"] * 100, *["code"] * 60, *["few"] * 19, *["talk"] * 300)
    FLAT = (*spread(100, 0.1), *spread(60, 0.2), *spread(19, 0.3), *spread(300, 0.8))

    def of(self, **settings: Any) -> list[str]:
        return report(
            self.FLAT,
            settings,
            source=self.KINDS,
            num_supervised_tokens=[i % 97 + 1 for i in range(len(self.FLAT))],
        ).warnings

    def test_names_what_all_but_went(self) -> None:
        assert self.of() == [
            "By source, nine tenths or more are lost of what a drafter may need: maths keeps 0 of "
            "100 (0.0%), code keeps 0 of 60 (0.0%), while 50.1% of all conversations are kept. "
            "--by source keeps a share of each."
        ]

    def test_by_is_the_remedy(self) -> None:
        assert self.of(by="source") == []

    def test_whatever_drops_it(self) -> None:
        for settings in ({"keep_rows": 200}, {"keep_tokens": 10_000}, {"band": (0.5, 1.0)}):
            assert len(self.of(**settings)) == 1
        assert "talk keeps 0 of 300" in self.of(low=True, keep=0.3)[0]
        assert self.of(metric="random") == []

    def test_a_tenth_is_lost_and_more_is_not(self) -> None:
        """Of 40 conversations of a kind 4 are kept, or 5."""
        for kept, count in ((4, 1), (5, 0)):
            flat = [*spread(40 - kept, 0.1), *spread(160 + kept, 0.5)]
            result = report(
                flat,
                {"keep_rows": 160 + kept},
                source=["a"] * 40 + ["b"] * 160,
                num_supervised_tokens=[7] * 200,
            )
            assert len(result.warnings) == count

    def test_a_small_budget_does_not_warn_of_everything(self) -> None:
        flat = spread(400, 0.1)
        kinds = ["ab"[i % 2] for i in range(400)]
        tokens = [i % 7 + 1 for i in range(400)]
        assert (
            report(flat, {"keep": 0.05}, source=kinds, num_supervised_tokens=tokens).warnings == []
        )

    def test_length_and_turns_and_columns(self) -> None:
        flat = spread(400, 0.1)
        result = report(
            flat,
            num_turns=[1] * 100 + [5] * 300,
            num_supervised_tokens=range(1, 401),
        )
        by_length, by_turns = result.warnings
        assert by_length.startswith("By length, nine tenths or more are lost")
        assert "1-40 keeps 0 of 40 (0.0%)" in by_length
        assert by_length.endswith("--by length keeps a share of each.")
        assert "1 keeps 0 of 100 (0.0%), while 50.0%" in by_turns
        assert by_turns.endswith("--by turns keeps a share of each.")

    def test_names_the_largest(self) -> None:
        kinds = [f"k{i % 8}" for i in range(200)] + ["talk"] * 300
        flat = [*spread(200, 0.1), *spread(300, 0.8)]
        (warning,) = report(flat, source=kinds, num_supervised_tokens=[3] * 500).warnings
        assert "k4 keeps 0 of 25 (0.0%), and 3 more like these, while 50.0%" in warning

    def test_strata_that_still_lost_theirs(self) -> None:
        """No row of maths fits into its share of the tokens."""
        tokens = [50] * 20 + [1] * 10_000
        (warning,) = report(
            spread(10_020, 0.1),
            {"by": "source", "keep_tokens": 500},
            source=["maths"] * 20 + ["talk"] * 10_000,
            num_supervised_tokens=tokens,
        ).warnings[:1]
        assert "maths keeps 0 of 20" in warning
        assert warning.endswith(
            "Their share by --by source was too small, or they have no flatness."
        )


def test_a_mixed_data_set(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On stderr, in the report, and with the selection, so that training can show it."""
    run = make_run(tmp_path, {"maths.jsonl": spread(40, 0.1), "talk.jsonl": spread(60, 0.5)})
    with caplog.at_level(logging.WARNING):
        result = filter_data(FilterConfig(run=run))
    maths, talk = tmp_path / "maths.jsonl", tmp_path / "talk.jsonl"
    assert [path.name for path in result.distilled] == ["talk.jsonl"]
    (warning,) = [w for w in result.warnings if w.startswith("By source")]
    assert f"{maths} keeps 0 of 40 (0.0%), while 50.0% of all" in warning
    assert [record.getMessage() for record in caplog.records] == result.warnings
    about = read_parquet_provenance(result.selection).about
    assert about["warnings"] == result.warnings
    assert [(s["name"], s["kept"], s["scored"]) for s in about["kept_share"]["source"]] == [
        (str(maths), 0, 40),
        (str(talk), 50, 60),
    ]
    caplog.clear()
    result = filter_data(FilterConfig(run=run, by="source"))
    assert not [w for w in result.warnings if w.startswith("By source")]
    assert [share.kept for share in result.kept_share["source"]] == [20, 30]
    table = pq.read_table(result.selection)
    assert table["kept"].to_pylist() == [False] * 20 + [True] * 20 + [False] * 30 + [True] * 30
