import numpy as np
import pyarrow as pa
import pytest

from sfdd.filtering.groups import Grouping, by_column, by_length, by_turns


def kinds(grouping: Grouping) -> list[str]:
    return [grouping.label(code) for code in grouping.codes]


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        (["b", "a", None, "b"], ["a", "b", "null"]),
        ([10, 9, 10, 100], ["9", "10", "100"]),
        ([True, None, False], ["false", "true", "null"]),
        ([None, None], ["null"]),
    ],
)
def test_equal_values_are_a_kind_in_their_natural_order(
    values: list[object], labels: list[str]
) -> None:
    grouping = by_column("x", pa.chunked_array([values[:2], values[2:]], pa.array(values).type))
    assert grouping.labels.to_pylist() == labels
    names = {None: "null", True: "true", False: "false"}
    assert kinds(grouping) == [
        names.get(v, str(v)) if not isinstance(v, str) else v for v in values
    ]


def test_the_word_null_is_not_null() -> None:
    grouping = by_column("x", pa.chunked_array([["null", None]]))
    assert grouping.codes.tolist() == [0, 1]


def test_dictionaries_of_several_chunks() -> None:
    chunks = [pa.array(part).dictionary_encode() for part in (["b", "a"], ["c", None, "a"])]
    grouping = by_column("x", pa.chunked_array(chunks))
    assert kinds(grouping) == ["b", "a", "c", "null", "a"]


class TestLength:
    def test_deciles_say_their_bounds(self) -> None:
        tokens = np.arange(1, 101, dtype=np.int32)
        grouping = by_length(tokens, np.ones(100, bool))
        assert grouping.labels.to_pylist()[::3] == ["1-10", "31-40", "61-70", "91-100"]
        assert np.bincount(grouping.codes).tolist() == [10] * 10

    def test_equal_lengths_are_not_parted(self) -> None:
        grouping = by_length(np.array([5] * 35 + [6] * 5), np.ones(40, bool))
        assert grouping.labels.to_pylist() == ["5", "6"]

    def test_only_scored_rows_count(self) -> None:
        tokens = np.array([0, 1, 2, 0, 1000])
        grouping = by_length(tokens, np.array([False, True, True, False, False]))
        assert grouping.labels.to_pylist() == ["1", "2"]

    @pytest.mark.parametrize("count", range(1, 45))
    def test_every_tenth_has_its_share(self, count: int) -> None:
        grouping = by_length(np.random.default_rng(0).permutation(count), np.ones(count, bool))
        sizes = np.bincount(grouping.codes, minlength=len(grouping.labels))
        assert len(sizes) == min(count, 10)
        assert sizes.max() - sizes.min() <= 1


def test_turns() -> None:
    grouping = by_turns(pa.chunked_array([[1, 2, 3, 4, 5, 8, 9, 1000]]))
    assert kinds(grouping) == ["1", "2", "3-4", "3-4", "5-8", "5-8", "9+", "9+"]
    assert kinds(by_turns(pa.chunked_array([[0, None, 1]], pa.int32()))) == ["null", "null", "1"]


def test_no_rows() -> None:
    for type in (pa.string(), pa.int64(), pa.null()):
        assert len(by_column("x", pa.chunked_array([], type)).labels) == 0
