import pytest
import torch

from sfdd.training.schedule import BatchPlan, cut, learning_rate_factor, uniform_noise

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


def test_noise_is_uniform_and_wider_for_short_conversations() -> None:
    like = torch.zeros(2, 200, 50)
    noise = uniform_noise(like, torch.tensor([512, 128]), width=0.2, seed=0, step=0)
    for row, half_width in ((0, 0.1), (1, 0.4)):
        assert noise[row].abs().max().item() == pytest.approx(half_width, rel=1e-3)
        # A uniform variable on [-a, a] has the standard deviation a / sqrt(3).
        assert noise[row].std().item() == pytest.approx(half_width / 3**0.5, rel=0.02)


def test_noise_is_fixed_by_seed_and_step() -> None:
    def noise(seed: int, step: int) -> torch.Tensor:
        return uniform_noise(
            torch.zeros(1, 3, 4), torch.tensor([3]), width=0.2, seed=seed, step=step
        )

    assert torch.equal(noise(0, 5), noise(0, 5))
    assert not torch.equal(noise(0, 5), noise(0, 6))
    assert not torch.equal(noise(0, 5), noise(1, 5))
