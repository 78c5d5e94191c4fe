import math

import torch
from training.helpers import conversation

from sfdd.training.batches import equal_weights
from sfdd.training.failure import REMEDY, NotFinite
from sfdd.training.module import Sums
from sfdd.training.steps import Step


def _sums(*losses: float) -> Sums:
    return Sums(torch.tensor(losses, dtype=torch.float64), {}, torch.zeros(1), torch.zeros(1))


def test_the_conversations_of_the_bad_micro_batch_are_named() -> None:
    """Two processes with two micro-batches of one conversation each, in turn: 0, 1 | 2, 3."""
    step = Step([conversation(n) for n in range(4)], [[[0], [2]], [[1], [3]]], 10.0)
    bad = NotFinite.among(step, _sums(1.0, 2.0, math.nan, 3.0), math.nan)
    assert bad is not None
    assert bad.message("of step 7", "") == (
        f"Training stopped: the loss of step 7 is nan, in the conversations made:2. {REMEDY}"
    )
    bad = NotFinite.among(step, _sums(1.0, 2.0, 3.0, math.inf), 1.0)
    assert bad is not None
    assert [c.id for c in bad.conversations] == ["made:3"]


def test_a_gradient_alone_names_the_step_and_long_lists_are_cut() -> None:
    step = Step.of([conversation(n) for n in range(12)], equal_weights, 1, 1000)
    bad = NotFinite.among(step, _sums(1.0), math.inf)
    assert bad is not None
    assert bad.message("of step 3", "here") == (
        "Training stopped: the gradient of step 3 is inf, in the conversations made:0, made:1, made:2, "
        "made:3, made:4, made:5, made:6, made:7 and 4 more. The state before it is kept in here. "
        f"{REMEDY}"
    )


def test_what_is_finite_is_no_failure() -> None:
    step = Step.of([conversation(0)], equal_weights, 1, 1000)
    assert NotFinite.among(step, _sums(1.0), 2.0) is None
