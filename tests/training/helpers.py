"""Conversations a tiny drafter can learn, and what a training run left behind."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sfdd.artifacts import Provenance
from sfdd.conversations.conversation import Origin, TokenizedConversation
from sfdd.drafters.loading import new_drafter
from sfdd.targets.transformers_target import TransformersTarget
from sfdd.training.config import TrainConfig
from sfdd.training.data import Split
from sfdd.training.loop import Trainer
from sfdd.training.supply import Supply, open_states


def conversation(number: int, length: int | None = None) -> TokenizedConversation:
    """A counting sequence of 6 to 24 tokens, of which the second half is supervised."""
    length = length or 6 + number * 5 % 19
    ids = (np.arange(length, dtype=np.int32) * (1 + number % 3) + number) % 250 + 3
    mask = np.arange(length) >= length // 2
    return TokenizedConversation(Origin("made", number), f"made:{number}", ids, mask)


def trainer(config: TrainConfig, target: TransformersTarget, data: Split) -> Trainer:
    """A training of EAGLE that `train_draft` would make, before its first step."""
    supply = Supply(data, open_states(config, target, data))
    drafter = new_drafter(config.method, target, seed=config.seed)
    return Trainer(config, target, drafter, supply, Provenance({}))


def weights(run: Path) -> dict[str, Tensor]:
    """The trained weights of a run directory."""
    return load_file(run / "drafter/model.safetensors")


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two sets of weights are the same to the last bit."""
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def log_lines(run: Path) -> list[dict[str, object]]:
    """The training log of a run directory."""
    text = (run / "drafter/training_log.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def assert_same_course(run: Path, expected: Path, rel: float = 2e-5) -> None:
    """Whether two logs tell of the same steps and measurements, up to the order of sums."""
    lines, wanted = log_lines(run), log_lines(expected)
    assert [line["kind"] for line in lines] == [line["kind"] for line in wanted]
    for line, other in zip(lines, wanted, strict=True):
        assert line.keys() == other.keys()
        for name in line.keys() - {"kind", "seconds"}:
            assert line[name] == pytest.approx(other[name], rel=rel, abs=1e-9), (line["step"], name)


def assert_same_weights(run: Path, expected: Path, atol: float = 1e-4) -> None:
    """Whether two trainings came to the same drafter, up to the order of sums."""
    ours, wanted = weights(run), weights(expected)
    assert ours.keys() == wanted.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-3, atol=atol)
