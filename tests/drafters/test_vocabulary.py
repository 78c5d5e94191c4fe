import pytest
import torch

from sfdd.drafters.vocabulary import draft_vocabulary
from sfdd.errors import DataError, UsageError


def test_most_frequent_first_ties_by_lower_id_result_ascending() -> None:
    """Counts 5 4 4 1 0 4: token 0, then 1, 2 and 5 of the same count, then 3; 4 never occurs."""
    counts = torch.tensor([5, 4, 4, 1, 0, 4])
    chosen = {size: draft_vocabulary(counts, size).tolist() for size in (1, 2, 3, 4, 5, 6, 100)}
    assert chosen == {
        1: [0],
        2: [0, 1],
        3: [0, 1, 2],
        4: [0, 1, 2, 5],
        5: [0, 1, 2, 3, 5],
        6: [0, 1, 2, 3, 5],
        100: [0, 1, 2, 3, 5],
    }
    assert draft_vocabulary(counts, 2).dtype == torch.int64


def test_ties_among_many_tokens() -> None:
    counts = torch.ones(100_000, dtype=torch.int64)
    assert draft_vocabulary(counts, 50_000).tolist() == list(range(50_000))


def test_nothing_to_choose_from() -> None:
    with pytest.raises(DataError, match="no supervised token"):
        draft_vocabulary(torch.zeros(5, dtype=torch.int64), 3)
    with pytest.raises(UsageError, match="--draft-vocab-size is 0"):
        draft_vocabulary(torch.ones(5, dtype=torch.int64), 0)
