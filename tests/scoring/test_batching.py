from collections.abc import Iterator

import pytest
from helpers import random_conversation

from sfdd.conversations.conversation import Origin, Skipped
from sfdd.errors import DataError
from sfdd.scoring import batching
from sfdd.scoring.batching import Window, ahead, windows


def test_windows_keep_the_order_and_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_WINDOW_RECORDS", 4)
    monkeypatch.setattr(batching, "_FIRST_WINDOW_TOKENS", 50)
    monkeypatch.setattr(batching, "_WINDOW_TOKENS", 100)
    skipped = Skipped(Origin("s", 0), "s", "unreadable")
    records = [
        [random_conversation(10, 0, seed=1)],
        None,
        skipped,
        None,
        [random_conversation(30, 0, seed=2), random_conversation(70, 0, seed=3)],
        [random_conversation(5, 0, seed=4)],
    ]
    first, second, third = windows(records)
    assert (first.resumed, first.skipped, first.tokens) == (2, [skipped], 10)
    assert [len(sample) for sample in second.samples] == [30, 70]
    assert [len(sample) for sample in third.samples] == [5]


def test_the_first_windows_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_FIRST_WINDOW_TOKENS", 10)
    records = ([random_conversation(5, 0, seed=i)] for i in range(100))
    assert [window.tokens for window in windows(records)][:4] == [10, 20, 40, 80]


def damaged() -> Iterator[list]:
    yield [random_conversation(5, 1, seed=0)]
    raise DataError("the rest is damaged")


def test_what_was_read_before_damage_still_comes_out() -> None:
    made = ahead(lambda: windows(damaged()))
    assert [len(sample) for sample in next(made).samples] == [5]
    with pytest.raises(DataError, match="the rest is damaged"):
        next(made)


def test_reading_ahead_is_bounded_and_ends_with_its_reader() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for i in range(1000):
            made.append(i)
            yield i

    reader = ahead(items)
    assert [next(reader) for _ in range(3)] == [0, 1, 2]
    reader.close()
    assert len(made) < 10
    assert list(ahead(lambda: iter(range(50)))) == list(range(50))
    assert list(ahead(lambda: iter([Window()]))) == [Window()]
