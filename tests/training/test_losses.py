import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sfdd.targets.transformers_target import TransformersTarget
from sfdd.training.losses import draft_losses


def _plain_token_loss(predicted: Tensor, target: Tensor, head: torch.nn.Module) -> Tensor:
    wanted = head(target).softmax(-1)
    return -(wanted * head(predicted).log_softmax(-1)).sum(-1).mean()


def test_hidden_loss_by_hand() -> None:
    """Differences 0.5 and 3 give 0.5 * 0.25 and 3 - 0.5: (0.125 + 2.5) / 2; the second row is right."""
    predicted = torch.tensor([[0.5, 3.0], [1.0, 1.0]])
    target = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    losses = draft_losses(predicted, target, lambda states: states, 8)
    assert losses.hidden.item() == (0.125 + 2.5) / 2 / 2


def test_token_loss_by_hand() -> None:
    """p = (3/4, 1/4) against q = (1/2, 1/2), and p = q = (1/2, 1/2): ln 2 both times."""
    target = torch.tensor([[math.log(3), 0.0], [0.0, 0.0]])
    predicted = torch.zeros(2, 2)
    losses = draft_losses(predicted, target, lambda states: states, 8)
    assert losses.token.item() == pytest.approx(math.log(2), rel=1e-6)
    # and the other way round: -(1/2 ln 3/4 + 1/2 ln 1/4), then ln 2
    losses = draft_losses(target, predicted, lambda states: states, 8)
    expected = (-(math.log(3 / 4) + math.log(1 / 4)) / 2 + math.log(2)) / 2
    assert losses.token.item() == pytest.approx(expected, rel=1e-6)


def test_agreement_by_hand() -> None:
    target = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0], [0.0, 3.0, 1.0], [1.0, 0.0, 0.0]])
    predicted = torch.tensor([[5.0, 1.0, 2.0], [3.0, 1.0, 2.0], [0.0, 1.0, 0.5], [0.0, 0.0, 9.0]])
    losses = draft_losses(predicted, target, lambda states: states, 3)
    assert losses.top1_agreement.item() == 0.5


def test_weights_of_the_total() -> None:
    losses = draft_losses(torch.ones(1, 2), torch.zeros(1, 2), lambda states: states, 3)
    total = losses.total(2.0, 0.1)
    assert total.item() == pytest.approx(2 * 0.5 + 0.1 * math.log(2), rel=1e-6)


@pytest.mark.parametrize("rows_per_chunk", [1, 3, 7, 100])
def test_value_and_gradient_equal_the_plain_computation_in_float64(rows_per_chunk: int) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(5, 11).double().requires_grad_(False)
    predicted = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    target = torch.randn(7, 5, dtype=torch.float64)

    losses = draft_losses(predicted, target, head, rows_per_chunk)
    (gradient,) = torch.autograd.grad(losses.total(1.0, 0.1), predicted)

    plain = F.smooth_l1_loss(predicted, target) + 0.1 * _plain_token_loss(predicted, target, head)
    (plain_gradient,) = torch.autograd.grad(plain, predicted)
    assert losses.total(1.0, 0.1).item() == pytest.approx(plain.item(), rel=1e-14)
    torch.testing.assert_close(gradient, plain_gradient, rtol=1e-12, atol=1e-15)


def test_gradient_passes_gradcheck() -> None:
    torch.manual_seed(1)
    head = torch.nn.Linear(3, 6).double().requires_grad_(False)
    predicted = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    target = torch.randn(4, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: draft_losses(x, target, head, 3).token, predicted)


def test_through_a_real_head(tiny_target: TransformersTarget) -> None:
    torch.manual_seed(2)
    predicted = torch.randn(9, tiny_target.hidden_size, requires_grad=True)
    target = torch.randn(9, tiny_target.hidden_size)
    losses = draft_losses(predicted, target, tiny_target.logits, 4)
    (gradient,) = torch.autograd.grad(losses.token, predicted)
    plain = _plain_token_loss(predicted, target, tiny_target.model.lm_head)
    (plain_gradient,) = torch.autograd.grad(plain, predicted)
    torch.testing.assert_close(losses.token, plain)
    torch.testing.assert_close(gradient, plain_gradient)


def test_nothing_is_kept_for_a_gradient_nobody_asks_for() -> None:
    with torch.no_grad():
        losses = draft_losses(torch.ones(2, 3), torch.zeros(2, 3), lambda states: states, 3)
    assert not losses.token.requires_grad
