"""A target so small that its distributions can be written out, and the test they are put to."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from sfdd.targets.transformers_target import TransformersTarget


@pytest.fixture(scope="session")
def target_of_8_tokens(tiny_target: TransformersTarget) -> TransformersTarget:
    """8 tokens, distributions that depend on what came before."""
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(3)
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    return TransformersTarget(model, tiny_target.tokenizer, tiny_target.source)


@pytest.fixture(scope="session")
def p_value() -> Callable[[Tensor, Tensor], float]:
    """Pearson's chi-square test of observed against expected counts, both [cells]."""

    def test(observed: Tensor, expected: Tensor) -> float:
        statistic = ((observed - expected) ** 2 / expected).sum()
        half_freedom = torch.tensor((len(expected) - 1) / 2)
        return float(torch.special.gammaincc(half_freedom, statistic / 2))

    assert test(torch.tensor([60.0, 40.0]), torch.tensor([50.0, 50.0])) == pytest.approx(
        0.0455, abs=1e-4
    )
    return test
