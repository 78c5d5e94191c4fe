"""Training-time test: draft steps at all base positions at once are what drafting from each one gives."""

import pytest
import torch
from drafters.targets import make_target
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from sfdd.drafters import attention
from sfdd.drafters.drafter import Drafter
from sfdd.drafters.layer import token_embeddings
from sfdd.drafters.loading import METHODS, new_drafter
from sfdd.targets.body import new_cache

STEPS = 5
NAMES = ["llama", "llama, one key head", "llama, wide heads", "llama, yarn", "gemma3"]


@pytest.fixture(autouse=True)
def _norms_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' RMSNorm computes in float32 whatever it is given, too coarse to compare gradients."""

    def forward(self: LlamaRMSNorm, states: Tensor) -> Tensor:
        scale = (states.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        return self.weight * (states * scale)

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


def prepared(name: str, method: str, length: int, batch: int) -> tuple[Drafter, Tensor, Tensor]:
    """A drafter in float64, embeddings [B, P, H] of tokens 1 … P, and states [B, P, H] to begin with."""
    target = make_target(name)
    drafter = new_drafter(method, target, seed=1).double()
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(3, 260, (batch, length))
    with torch.no_grad():
        hidden, aux = target.hidden_and_aux_states(ids, aux_layers=drafter.aux_layers)
    read = (hidden if aux is None else aux).double()
    return drafter, token_embeddings(target.embedding, ids[:, 1:-1]).double(), read[:, :-2]


def at_once(drafter: Drafter, embeddings: Tensor, read: Tensor, steps: int) -> list[Tensor]:
    """States of each step j, [B, P - j, H]."""
    states, rolled, earlier = drafter.fuse(read), [], []
    for step in range(steps):
        states, own = drafter.draft_step(embeddings[:, step:], states, earlier)
        earlier.append(own)
        rolled.append(states)
        states = states[:, :-1]
    return rolled


def one_by_one(drafter: Drafter, embeddings: Tensor, read: Tensor, steps: int) -> list[Tensor]:
    """The same by drafting from each base position, token by token, with a KV cache."""
    positions = embeddings.shape[1]
    found: list[list[Tensor]] = [[] for _ in range(steps)]
    for base in range(positions):
        cache = new_cache()
        states = drafter.fuse(read[:, : base + 1])
        states = drafter(embeddings[:, : base + 1], states, cache=cache)[:, -1:]
        found[0].append(states)
        for step in range(1, min(steps, positions - base)):
            token = embeddings[:, base + step : base + step + 1]
            states = drafter(token, states, cache=cache)
            found[step].append(states)
    return [torch.cat(states, dim=1) for states in found]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_steps_at_once_equal_drafting_from_each_position(
    name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_ROWS", 4)  # 11 positions: blocks of 4, 4 and 3
    drafter, embeddings, read = prepared(name, method, length=13, batch=2)
    expected = one_by_one(drafter, embeddings, read, STEPS)
    found = at_once(drafter, embeddings, read, STEPS)
    for step in range(STEPS):
        assert found[step].shape == (2, 11 - step, 32)
        torch.testing.assert_close(found[step], expected[step], rtol=1e-10, atol=1e-12)
    assert (found[1] - found[0][:, :-1]).abs().mean() > 0.1  # steps do differ


@pytest.mark.parametrize("method", METHODS)
def test_gradients_equal_those_of_drafting(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the drafter's own states, keys and values of all earlier steps."""
    monkeypatch.setattr(attention, "_ROWS", 3)
    drafter, embeddings, read = prepared("llama", method, length=10, batch=2)
    probes = [torch.randn(2, 8 - step, 32, dtype=torch.float64) for step in range(4)]
    gradients = []
    for roll in (at_once, one_by_one):
        rolled = roll(drafter, embeddings, read, 4)
        loss = sum((states * probe).sum() for states, probe in zip(rolled, probes, strict=True))
        used = [
            p for n, p in drafter.named_parameters() if n not in ("norm.weight", "lm_head.weight")
        ]
        gradients.append(torch.autograd.grad(loss, used))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8)
        assert expected.abs().sum() > 0


@pytest.mark.parametrize("method", METHODS)
def test_blocks_of_rows_change_nothing(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, embeddings, read = prepared("llama", method, length=40, batch=1)
    whole = at_once(drafter, embeddings, read, 3)
    for rows in (1, 7, 37, 38):
        monkeypatch.setattr(attention, "_ROWS", rows)
        for found, expected in zip(at_once(drafter, embeddings, read, 3), whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_a_base_position_sees_nothing_later(method: str) -> None:
    """Changing tokens and states from position 6 on leaves all drafts that end before as they are."""
    drafter, embeddings, read = prepared("llama", method, length=14, batch=1)
    before = at_once(drafter, embeddings, read, 4)
    embeddings, read = embeddings.clone(), read.clone()
    embeddings[:, 6:] += 1
    read[:, 6:] += 1
    after = at_once(drafter, embeddings, read, 4)
    for step in range(4):
        # Step j of base i reads embedding columns up to i + j.
        assert torch.equal(before[step][:, : 6 - step], after[step][:, : 6 - step])
        assert not torch.isclose(before[step][:, 6 - step :], after[step][:, 6 - step :]).all()


def test_bfloat16_autocast_stays_close() -> None:
    """Mixed precision: some of what attention is given is float32, some bfloat16."""
    drafter, embeddings, read = prepared("llama", "eagle3", length=20, batch=2)
    drafter, embeddings, read = drafter.float(), embeddings.float(), read.float()
    plain = at_once(drafter, embeddings, read, 3)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = at_once(drafter, embeddings, read, 3)
        sum(states.float().sum() for states in mixed).backward()
    for found, expected in zip(mixed, plain, strict=True):
        assert (found - expected).norm() / expected.norm() < 0.05
    assert all(p.grad.isfinite().all() for p in drafter.parameters() if p.grad is not None)


def test_no_scores_are_kept_for_the_gradient() -> None:
    """What autograd saves grows with T, not with its square."""
    drafter, embeddings, read = prepared("llama", "eagle3", length=1202, batch=1)
    sizes: list[int] = []

    def record(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        at_once(drafter, embeddings, read, 3)
    assert max(sizes) == 1200 * 96  # the target's states: the widest of all that is read
