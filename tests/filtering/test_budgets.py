import numpy as np
import pytest

from sfdd.filtering.budgets import draw_lots, shares


@pytest.mark.parametrize(
    ("budget", "sizes", "expected"),
    [
        (10, [10, 20, 70], [1, 2, 7]),
        (1, [1, 1, 1], [1, 0, 0]),  # of equal remainders the first
        (2, [1, 1, 1], [1, 1, 0]),
        (5, [3, 3, 4], [2, 1, 2]),  # 1.5 1.5 2
        (7, [50, 30, 20], [4, 2, 1]),  # 3.5 2.1 1.4
        (3, [0, 4, 0, 4], [0, 2, 0, 1]),  # nothing for what is empty
        (8, [0, 4, 0, 4], [0, 4, 0, 4]),
        (9, [3, 4], [3, 4]),  # more than there is
        (5, [], []),
        (0, [3, 4], [0, 0]),
        (10**12, [10**12, 10**12, 10**12], [333333333334, 333333333333, 333333333333]),
    ],
)
def test_shares_add_up(budget: int, sizes: list[int], expected: list[int]) -> None:
    assert shares(budget, np.array(sizes, np.int64)).tolist() == expected


def test_a_lot_depends_on_the_record_alone() -> None:
    sources, rows = np.array([0, 0, 0, 1, 1]), np.array([0, 1, 2, 0, 1])
    lots = draw_lots(sources, rows, seed=5)
    order = np.array([3, 0, 4, 2, 1])
    assert np.array_equal(draw_lots(sources[order], rows[order], seed=5), lots[order])
    assert len(set(lots)) == 5
    assert not np.array_equal(draw_lots(sources, rows, seed=6), lots)
