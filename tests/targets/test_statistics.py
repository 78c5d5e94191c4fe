import math

import numpy as np
import pytest
import torch

from sfdd.targets.statistics import STATISTICS, as_token_stats, logits_statistics


def reference(logits: torch.Tensor, next_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The plain way, in float64: softmax, cosine with the uniform distribution, and so on."""
    z = logits.double()
    p = z.softmax(-1)
    uniform = torch.full_like(p, 1 / p.shape[-1])
    first, second = p.topk(2).values.unbind(-1)
    return {
        "flatness": torch.nn.functional.cosine_similarity(p, uniform, dim=-1),
        "entropy": -torch.xlogy(p, p).sum(-1),
        "top1": first,
        "margin": first - second,
        "energy": -z.logsumexp(-1),
        "nll": -z.log_softmax(-1).gather(-1, next_ids[:, None])[:, 0],
    }


@pytest.mark.parametrize("vocab_size", [2, 260, 49_152, 151_936])
def test_every_statistic_against_float64(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-2, 1.5, 64)[:, None]  # from almost uniform to almost one-hot
    logits = torch.randn(64, vocab_size, generator=generator) * scale + 30
    next_ids = torch.randint(0, vocab_size, (64,), generator=generator)
    expected = reference(logits, next_ids)

    values = dict(zip(STATISTICS, logits_statistics(logits.clone(), next_ids), strict=True))

    relative = (values["flatness"] / expected["flatness"] - 1).abs().max()
    assert relative <= 1e-5
    for name in STATISTICS:
        torch.testing.assert_close(values[name].double(), expected[name], rtol=1e-5, atol=2e-5)


def test_hand_worked_distribution() -> None:
    """p = (1/2, 1/4, 1/8, 1/8): sum p^2 = 11/32, V = 4."""
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log() + 3
    flatness, entropy, top1, margin, energy, nll = logits_statistics(logits, torch.tensor([2]))[
        :, 0
    ]
    assert flatness.item() == pytest.approx(1 / (math.sqrt(4) * math.sqrt(11 / 32)))
    assert entropy.item() == pytest.approx(1.75 * math.log(2))
    assert top1.item() == pytest.approx(0.5)
    assert margin.item() == pytest.approx(0.25)
    assert energy.item() == pytest.approx(-3)
    assert nll.item() == pytest.approx(math.log(8))


def test_uniform_is_one_and_one_hot_is_the_lower_bound() -> None:
    logits = torch.zeros(2, 100)
    logits[1, 7] = 1e4
    flatness = logits_statistics(logits, torch.tensor([0, 7]))[0]
    assert flatness.tolist() == pytest.approx([1.0, 0.1])


def test_masked_vocabulary_counts_as_probability_zero() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf, -math.inf]])
    flatness, entropy, *_ = logits_statistics(logits, torch.tensor([0]))[:, 0]
    assert flatness.item() == pytest.approx(1 / math.sqrt(2))
    assert entropy.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_seen(poison: float) -> None:
    logits = torch.zeros(3, 10)
    logits[1, 4] = poison
    values = logits_statistics(logits, torch.zeros(3, dtype=torch.int64))
    assert as_token_stats(values[:, [0, 2]]).all_finite()
    assert not as_token_stats(values).all_finite()


def test_means_are_over_tokens() -> None:
    stats = as_token_stats(torch.arange(12, dtype=torch.float32).reshape(6, 2))
    assert len(stats) == 2
    assert stats.means() == {name: 2 * i + 0.5 for i, name in enumerate(STATISTICS)}
    assert stats.flatness.dtype == np.float32
