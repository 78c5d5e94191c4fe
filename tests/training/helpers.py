"""Conversations a tiny drafter can learn, and what a training run left behind."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from sfdd.conversations.conversation import Origin, TokenizedConversation


def conversation(number: int, length: int | None = None) -> TokenizedConversation:
    """A counting sequence of 6 to 24 tokens, of which the second half is supervised."""
    length = length or 6 + number * 5 % 19
    ids = (np.arange(length, dtype=np.int32) * (1 + number % 3) + number) % 250 + 3
    mask = np.arange(length) >= length // 2
    return TokenizedConversation(Origin("made", number), f"made:{number}", ids, mask)


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
