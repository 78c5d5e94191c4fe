import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sfdd.training.schedule import BatchPlan, cut, deal, learning_rate_factor, uniform_noise

LENGTHS = [5 + number * 7 % 40 for number in range(300)]


def _plan(**changes: int) -> BatchPlan:
    return BatchPlan(LENGTHS, **{"batch_tokens": 200, "epochs": 2, "seed": 0} | changes)


def test_learning_rate_by_hand() -> None:
    factors = [learning_rate_factor(step, 10, 0.2) for step in range(10)]
    assert factors == [1 / 2, 1, 8 / 8, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]


def test_learning_rate_without_warmup_and_of_a_single_step() -> None:
    assert [learning_rate_factor(step, 4, 0.0) for step in range(4)] == [1, 3 / 4, 2 / 4, 1 / 4]
    assert learning_rate_factor(0, 1, 0.9) == 1


def test_cut_by_padded_size() -> None:
    # 3 x 4 tokens fit in 12; a conversation of 20 does not fit and is a batch of its own.
    assert cut([0, 1, 2, 3, 4], [4, 4, 4, 4, 20], 12) == [[0, 1, 2], [3], [4]]


def test_every_epoch_reads_every_conversation_once() -> None:
    plan = _plan()
    first, both = plan.epoch_ends
    for steps in (range(first), range(first, both)):
        assert sorted(i for step in steps for i in plan.batch(step)) == list(range(300))


def test_batches_keep_to_the_budget_and_pad_little() -> None:
    plan = _plan()
    batches = [plan.batch(step) for step in range(plan.total_steps)]
    sizes = [max(LENGTHS[i] for i in batch) * len(batch) for batch in batches]
    assert max(sizes) <= 200
    assert 2 * sum(LENGTHS) / sum(sizes) > 0.9


def test_a_large_budget_is_filled() -> None:
    lengths = [100] * 5000
    plan = BatchPlan(lengths, batch_tokens=50_000, epochs=1, seed=0)
    assert [len(plan.batch(step)) for step in range(plan.total_steps)] == [500] * 10


def test_order_is_fixed_by_seed_and_epoch() -> None:
    def batches(plan: BatchPlan) -> list[list[int]]:
        return [plan.batch(step) for step in range(plan.total_steps)]

    assert batches(_plan()) == batches(_plan())
    assert batches(_plan()) != batches(_plan(seed=1))
    first, both = _plan().epoch_ends
    assert batches(_plan())[:first] != batches(_plan())[first:both]


def test_a_step_in_the_middle_needs_no_steps_before_it() -> None:
    whole, fresh = _plan(), _plan()
    expected = [whole.batch(step) for step in range(whole.total_steps)]
    assert fresh.batch(40) == expected[40]
    assert fresh.batch(3) == expected[3]


def test_max_steps_ends_the_plan() -> None:
    assert _plan(max_steps=3).total_steps == 3
    assert _plan(max_steps=10**6).total_steps == _plan().total_steps
    assert _plan().epoch_of(_plan().epoch_ends[0] - 1) == 0
    assert _plan().epoch_of(_plan().epoch_ends[0]) == 1


def _lengths(dealt: list[list[list[int]]], lengths: list[int]) -> list[list[list[int]]]:
    return [[[lengths[i] for i in places] for places in of_rank] for of_rank in dealt]


def test_dealing_by_hand() -> None:
    lengths = [30, 10, 20, 10]
    # All at once, shortest first: 4 x 30 tokens.
    assert _lengths(deal(lengths, 1, 120), lengths) == [[[10, 10, 20, 30]]]
    # 60 tokens are 3 x 20, and 1 x 30 is left.
    assert _lengths(deal(lengths, 1, 60), lengths) == [[[10, 10, 20], [30]]]
    # Two processes share them as evenly as two micro-batches can.
    assert _lengths(deal(lengths, 2, 120), lengths) == [[[10, 10, 20]], [[30]]]
    # With 30 tokens at most it takes two rounds, so there is room for all to be alone.
    assert _lengths(deal(lengths, 2, 30), lengths) == [[[10], [20]], [[10], [30]]]
    # Three for two processes in two rounds: one has nothing to do in the second.
    assert _lengths(deal(lengths[:3], 2, 30), lengths) == [[[10], [30]], [[20], []]]


def test_a_process_may_be_left_with_nothing() -> None:
    assert deal([7], 3, 100) == [[[0]], [[]], [[]]]


@given(
    lengths=st.lists(st.integers(3, 60), min_size=1, max_size=40),
    ranks=st.integers(1, 4),
    budget=st.integers(2, 200),
)
def test_dealing_is_whole_even_and_within_the_budget(
    lengths: list[int], ranks: int, budget: int
) -> None:
    dealt = deal(lengths, ranks, budget)
    micro_batches = [places for of_rank in dealt for places in of_rank]
    assert sorted(i for places in micro_batches for i in places) == list(range(len(lengths)))
    assert len({len(of_rank) for of_rank in dealt}) == 1
    assert all(
        len(places) < 2 or len(places) * max(lengths[i] for i in places) <= budget
        for places in micro_batches
    )
    fewest = len(cut(sorted(range(len(lengths)), key=lengths.__getitem__), lengths, budget))
    assert len(dealt[0]) == -(-fewest // ranks)


def _noise(lengths: list[int], places: list[int], width: float = 0.2, **which: int) -> torch.Tensor:
    like = torch.zeros(len(lengths), max(lengths), 50)
    return uniform_noise(like, lengths, places, width=width, **{"seed": 0, "step": 0} | which)


def test_noise_is_uniform_and_wider_for_short_conversations() -> None:
    noise = _noise([512, 128], [0, 1])
    for row, length, half_width in ((0, 512, 0.1), (1, 128, 0.4)):
        of_one = noise[row, :length]
        assert of_one.abs().max().item() == pytest.approx(half_width, rel=1e-3)
        # A uniform variable on [-a, a] has the standard deviation a / sqrt(3).
        assert of_one.std().item() == pytest.approx(half_width / 3**0.5, rel=0.02)
    assert not noise[1, 128:].any()


def test_noise_is_fixed_by_seed_step_and_place_in_the_step() -> None:
    noise = _noise([3], [4], step=5)
    assert torch.equal(noise, _noise([3], [4], step=5))
    assert not torch.equal(noise, _noise([3], [4], step=6))
    assert not torch.equal(noise, _noise([3], [4], step=5, seed=1))
    assert not torch.equal(noise, _noise([3], [3], step=5))
    # Nothing else: not what it is padded or computed with.
    assert torch.equal(noise[0], _noise([9, 3], [0, 4], step=5)[1, :3])
