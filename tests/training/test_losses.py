"""Losses by hand, and their gradients against finite differences and plain autograd."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sfdd.drafters.drafter import Head
from sfdd.targets.transformers_target import TransformersTarget
from sfdd.training.losses import LOSSES, Supervision, token_losses


def identity(states: Tensor) -> Tensor:
    return states


def logits_of(*rows: tuple[float, ...]) -> Tensor:
    """Logits whose softmax are the rows."""
    return torch.tensor(rows, dtype=torch.float64).log()


def loss_of(name: str, p: Tensor, q: Tensor, weights: Tensor | None = None) -> float:
    """The sum over rows of logits p and q [N, V], without any head."""
    weights = torch.ones(1, len(p)) if weights is None else weights[None]
    supervision = Supervision(p, identity, None, 8)
    total, _, _ = token_losses(q[None], weights.double(), Head(identity), supervision, LOSSES[name])
    return total.item()


HALF = (1 / 2, 1 / 2)
P, Q = logits_of((3 / 4, 1 / 4), HALF), logits_of(HALF, HALF)


def test_kl_by_hand() -> None:
    """p = (3/4, 1/4) against q = (1/2, 1/2), and p = q = (1/2, 1/2): ln 2 both times."""
    assert loss_of("kl", P, Q) == pytest.approx(2 * math.log(2), rel=1e-12)
    # and the other way round: -(1/2 ln 3/4 + 1/2 ln 1/4), then ln 2
    expected = -(math.log(3 / 4) + math.log(1 / 4)) / 2 + math.log(2)
    assert loss_of("kl", Q, P) == pytest.approx(expected, rel=1e-12)


def test_tv_by_hand() -> None:
    """1/2 (|3/4 - 1/2| + |1/4 - 1/2|) = 1/4, the other way round too; 0 where they are equal."""
    assert loss_of("tv", P, Q) == pytest.approx(1 / 4, rel=1e-12)
    assert loss_of("tv", Q, P) == pytest.approx(1 / 4, rel=1e-12)
    three = logits_of((0.5, 0.3, 0.2)), logits_of((0.2, 0.2, 0.6))
    assert loss_of("tv", *three) == pytest.approx((0.3 + 0.1 + 0.4) / 2, rel=1e-12)
    far = logits_of((1 - 1e-12, 1e-12)), logits_of((1e-12, 1 - 1e-12))
    assert loss_of("tv", *far) == pytest.approx(1.0, rel=1e-9)


def test_lk_by_hand() -> None:
    """tv = 1/4, so w = exp(-3 * 3/4); KL(p || q) = 3/4 ln 3/2 + 1/4 ln 1/2; nothing where p = q."""
    weight = math.exp(-9 / 4)
    kl = 3 / 4 * math.log(3 / 2) + 1 / 4 * math.log(1 / 2)
    assert loss_of("lk", P, Q) == pytest.approx(weight * kl + (1 - weight) / 4, rel=1e-12)
    far = logits_of((1 - 1e-12, 1e-12)), logits_of((1e-12, 1 - 1e-12))
    assert loss_of("lk", *far) == pytest.approx(12 * math.log(10), rel=1e-9)  # w = 1: all KL


@pytest.mark.parametrize(
    ("name", "slope"),
    [
        ("kl", (-1 / 4, 1 / 4)),  # q - p
        ("tv", (-1 / 4, 1 / 4)),  # q_v (s_v - sum q s), s = (-1/2, 1/2), sum q s = 0
        ("lk", (-1 / 4, 1 / 4)),  # any mean of the two
    ],
)
def test_gradients_by_hand(name: str, slope: tuple[float, float]) -> None:
    q = Q[:1].clone().requires_grad_()
    supervision = Supervision(P[:1], identity, None, 8)
    weights = torch.tensor([[3.0]], dtype=torch.float64)
    total, _, _ = token_losses(q[None], weights, Head(identity), supervision, LOSSES[name])
    (gradient,) = torch.autograd.grad(total, q)
    torch.testing.assert_close(gradient, 3 * torch.tensor([slope], dtype=torch.float64))


@pytest.mark.parametrize("name", LOSSES)
def test_a_sum_of_weighted_tokens(name: str) -> None:
    torch.manual_seed(0)
    p, q = torch.randn(2, 3, 5, dtype=torch.float64)
    each = [loss_of(name, p[i : i + 1], q[i : i + 1]) for i in range(3)]
    weights = torch.tensor([1.0, 0.0, 2.5])
    expected = each[0] + 2.5 * each[2]
    assert loss_of(name, p, q, weights) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_restricted_vocabulary_by_hand(name: str) -> None:
    """Tokens 1 and 3 of four can be drafted; p over them is renormalised, (3/4, 1/4) and (1/4, 3/4).

    The third token's first choice is 0, which cannot be drafted: no loss, no gradient, no agreement.
    """
    p = logits_of((0.2, 0.45, 0.2, 0.15), (0.1, 0.2, 0.1, 0.6), (0.6, 0.3, 0.05, 0.05))
    q = logits_of((0.3, 0.7), (0.8, 0.2), (0.9, 0.1)).requires_grad_()
    supervision = Supervision(p, identity, torch.tensor([1, 3]), 8)
    weights = torch.ones(1, 3, dtype=torch.float64)
    total, steps, agreeing = token_losses(
        q[None], weights, Head(identity), supervision, LOSSES[name]
    )
    renormalised = logits_of((3 / 4, 1 / 4), (1 / 4, 3 / 4))
    assert total.item() == pytest.approx(loss_of(name, renormalised, q[:2]), rel=1e-12)
    assert steps.tolist() == [total.item()]
    assert agreeing.tolist() == [[False, False, False]]
    (gradient,) = torch.autograd.grad(total, q)
    assert gradient[2].tolist() == [0.0, 0.0]
    assert gradient[:2].abs().min() > 0


def test_agreement_by_hand() -> None:
    """Draft ids 0, 1, 2 are tokens 0, 2, 3. Choices of the target: 3, 0, 1 (not drafted), 2."""
    p = torch.tensor([[0, 1, 2, 9], [9, 1, 2, 0], [0, 9, 2, 1], [0, 1, 9, 2]], dtype=torch.float32)
    first = torch.tensor([[0, 0, 1], [1, 0, 0], [1, 0, 0], [1, 0, 0]], dtype=torch.float32)
    second = torch.tensor([[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0]], dtype=torch.float32)
    supervision = Supervision(p, identity, torch.tensor([0, 2, 3]), 3)
    _, _, agreeing = token_losses(
        torch.stack([first, second]), torch.ones(2, 4), Head(identity), supervision, LOSSES["kl"]
    )
    assert agreeing.int().tolist() == [[1, 1, 0, 0], [0, 1, 0, 1]]


def plain(name: str, p: Tensor, z: Tensor) -> Tensor:
    """The loss of each row by its formula, for autograd."""
    q = z.softmax(-1)
    cross_entropy = -(p * q.log()).sum(-1)
    tv = (p - q).abs().sum(-1) / 2
    if name == "lk":
        weight = torch.exp(-3 * torch.minimum(p, q).sum(-1)).detach()
        return weight * (cross_entropy + (p * p.log()).sum(-1)) + (1 - weight) * tv
    return {"kl": cross_entropy, "tv": tv}[name]


@pytest.mark.parametrize("rows_per_chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_chunks_change_nothing_and_gradients_are_right(
    name: str, restricted: bool, rows_per_chunk: int
) -> None:
    """Value, and gradients by states and by a trained head, against autograd in float64."""
    torch.manual_seed(0)
    chosen = torch.tensor([0, 2, 3, 7]) if restricted else None
    target_head = torch.nn.Linear(5, 13).double().requires_grad_(False)
    weight = torch.randn(4 if restricted else 13, 5, dtype=torch.float64, requires_grad=True)
    states = torch.randn(4, 7, 5, dtype=torch.float64, requires_grad=True)
    wanted = torch.randn(7, 5, dtype=torch.float64)
    weights = torch.rand(4, 7, dtype=torch.float64)
    weights[2, 3] = 0

    supervision = Supervision(wanted, target_head, chosen, rows_per_chunk)
    total, steps, agreeing = token_losses(
        states, weights, Head(F.linear, (weight,)), supervision, LOSSES[name]
    )
    gradients = torch.autograd.grad(total * 2, (states, weight))

    logits = target_head(wanted)
    p = (logits if chosen is None else logits[:, chosen]).softmax(-1)
    choice = logits.argmax(-1)
    possible = torch.ones(7) if chosen is None else torch.isin(choice, chosen)
    z = states @ weight.T
    expected = plain(name, p, z) * weights * possible
    drafted = z.argmax(-1) if chosen is None else chosen[z.argmax(-1)]
    torch.testing.assert_close(steps, expected.sum(-1), rtol=1e-12, atol=1e-13)
    assert total.item() == pytest.approx(expected.sum().item(), rel=1e-12)
    assert torch.equal(agreeing, drafted == choice)
    assert 0 < possible.sum() <= 7
    plain_gradients = torch.autograd.grad(expected.sum() * 2, (states, weight))
    for gradient, plain_gradient in zip(gradients, plain_gradients, strict=True):
        torch.testing.assert_close(gradient, plain_gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["kl", "tv"])
def test_gradients_equal_finite_differences(name: str) -> None:
    torch.manual_seed(1)
    target_head = torch.nn.Linear(3, 6).double().requires_grad_(False)
    weight = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    states = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(2, 4, dtype=torch.float64)
    wanted = torch.randn(4, 3, dtype=torch.float64)
    supervision = Supervision(wanted, target_head, torch.tensor([0, 1, 2, 5]), 3)

    def total(states: Tensor, weight: Tensor) -> Tensor:
        head = Head(F.linear, (weight,))
        return token_losses(states, weights, head, supervision, LOSSES[name])[0]

    assert total(states, weight) > 0
    assert torch.autograd.gradcheck(total, (states, weight))


def test_lk_gradient_equals_finite_differences_of_the_loss_with_its_weight_held() -> None:
    torch.manual_seed(1)
    p, z = torch.randn(5, dtype=torch.float64).softmax(-1), torch.randn(5, dtype=torch.float64)
    overlap = torch.minimum(p, z.softmax(-1)).sum()
    held = torch.exp(-3 * overlap)

    def value(z: Tensor) -> Tensor:
        q = z.softmax(-1)
        kl = (p * (p / q).log()).sum()
        return held * kl + (1 - held) * (p - q).abs().sum() / 2

    _, slope = LOSSES["lk"](p[None], z.log_softmax(-1)[None])
    step = 1e-6
    for i in range(5):
        offset = torch.zeros(5, dtype=torch.float64)
        offset[i] = step
        difference = (value(z + offset) - value(z - offset)) / (2 * step)
        assert slope[0, i].item() == pytest.approx(difference.item(), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_through_a_real_head(tiny_target: TransformersTarget, name: str) -> None:
    """EAGLE's: the target's own, frozen, with its own post-processing."""
    torch.manual_seed(2)
    states = torch.randn(1, 9, tiny_target.hidden_size, requires_grad=True)
    wanted = torch.randn(9, tiny_target.hidden_size)
    supervision = Supervision(wanted, tiny_target.logits, None, 4)
    total, _, _ = token_losses(
        states, torch.ones(1, 9), Head(tiny_target.logits), supervision, LOSSES[name]
    )
    (gradient,) = torch.autograd.grad(total, states)
    head: Callable[[Tensor], Tensor] = tiny_target.model.lm_head
    expected = plain(name, head(wanted).softmax(-1), head(states[0])).sum()
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, states)[0])


def test_heads_never_see_more_than_a_chunk() -> None:
    """As many logits at once as the target's: of a vocabulary half as large, two steps together."""
    seen: dict[str, list[tuple[int, ...]]] = {"target": [], "drafter": []}

    def target(states: Tensor) -> Tensor:
        seen["target"].append(tuple(states.shape))
        return states @ torch.ones(2, 8)

    def drafter(states: Tensor) -> Tensor:
        seen["drafter"].append(tuple(states.shape))
        return states @ torch.ones(2, 4)

    states = torch.randn(3, 7, 2, requires_grad=True)
    supervision = Supervision(torch.randn(7, 2), target, torch.arange(4), 5)
    token_losses(states, torch.ones(3, 7), Head(drafter), supervision, LOSSES["kl"])
    assert seen["target"] == [(5, 2), (2, 2)]  # once for all steps
    assert seen["drafter"] == [(10, 2), (5, 2), (4, 2), (2, 2)]


def test_nothing_is_kept_for_a_gradient_nobody_asks_for() -> None:
    states = torch.ones(1, 2, 3, requires_grad=True)
    supervision = Supervision(torch.zeros(2, 3), identity, None, 3)
    with torch.no_grad():
        total, _, _ = token_losses(
            states, torch.ones(1, 2), Head(identity), supervision, LOSSES["kl"]
        )
    assert not total.requires_grad


def test_no_tokens_at_all() -> None:
    weight = torch.ones(4, 3, requires_grad=True)
    states = torch.ones(2, 0, 3, requires_grad=True)
    supervision = Supervision(torch.zeros(0, 3), identity, None, 3)
    total, steps, _ = token_losses(
        states, torch.ones(2, 0), Head(F.linear, (weight,)), supervision, LOSSES["kl"]
    )
    assert (total.item(), steps.tolist()) == (0.0, [0.0, 0.0])
    total.backward()
    assert weight.grad.abs().sum() == 0
