import pytest
from helpers import random_conversation

from sfdd.errors import DataError
from sfdd.scoring import batching
from sfdd.scoring.batching import batches, windows


def test_batches_hold_every_conversation_within_the_budget() -> None:
    window = [
        random_conversation(length, 1, seed=i) for i, length in enumerate([5, 90, 40, 7, 200])
    ]
    made = list(batches(window, batch_tokens=100))
    assert [[len(c) for c in batch] for batch in made] == [[200], [90], [40, 7], [5]]


def test_equal_lengths_fill_the_budget_exactly() -> None:
    window = [random_conversation(25, 1, seed=i) for i in range(9)]
    assert [len(batch) for batch in batches(window, batch_tokens=100)] == [4, 4, 1]


def test_what_was_read_before_damage_still_comes_out() -> None:
    def damaged():
        yield random_conversation(5, 1, seed=0)
        raise DataError("the rest is damaged")

    made = windows(damaged())
    assert [len(c) for c in next(made)] == [5]
    with pytest.raises(DataError):
        next(made)


def test_windows_keep_the_order_and_stay_small(monkeypatch) -> None:
    monkeypatch.setattr(batching, "_WINDOW_CONVERSATIONS", 3)
    monkeypatch.setattr(batching, "_WINDOW_TOKENS", 100)
    lengths = [10, 10, 10, 95, 5, 200, 1, 1]
    made = windows(random_conversation(n, 0, seed=i) for i, n in enumerate(lengths))
    assert [[len(c) for c in window] for window in made] == [[10, 10, 10], [95, 5], [200], [1, 1]]
