"""Counts and the ratios made of them."""

import pytest

from sfdd.evaluation.acceptance import AcceptanceStats


def test_l_and_tau_of_a_known_pattern() -> None:
    stats = AcceptanceStats.from_counts(proposed=[5, 5, 5], accepted=[3, 0, 2])
    assert stats.mean_accepted == 5 / 3
    assert stats.acceptance_length == 8 / 3
    assert (stats.num_drafts, stats.num_proposed, stats.num_accepted) == (3, 15, 5)
    assert stats.acceptance_rate == 1 / 3
    assert stats.accepted_by_position == (2, 2, 1, 0, 0)
    assert stats.acceptance_rate_by_position == (2 / 3, 2 / 3, 1 / 3, 0, 0)


def test_a_position_is_judged_by_the_drafts_that_reached_it() -> None:
    stats = AcceptanceStats.from_counts(proposed=[3, 1], accepted=[3, 0])
    assert stats.proposed_by_position == (2, 1, 1)
    assert stats.acceptance_rate_by_position == (0.5, 1, 1)


@pytest.mark.parametrize("split", [0, 1, 2, 3])
def test_sums_equal_counting_at_once(split: int) -> None:
    proposed, accepted = [5, 4, 1], [3, 0, 1]
    parts = [
        AcceptanceStats.from_counts(proposed[part], accepted[part])
        for part in (slice(split), slice(split, None))
    ]
    assert parts[0] + parts[1] == AcceptanceStats.from_counts(proposed, accepted)


def test_nothing_measured_gives_no_ratios() -> None:
    stats = AcceptanceStats()
    assert stats.num_drafts == 0
    assert stats.acceptance_length is stats.mean_accepted is stats.acceptance_rate is None
    assert stats.acceptance_rate_by_position == ()
