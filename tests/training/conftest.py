"""Small training runs on the tiny target."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from training.helpers import conversation

from sfdd.conversations.conversation import TokenizedConversation
from sfdd.targets.transformers_target import TransformersTarget
from sfdd.training.config import TrainConfig


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A tiny model is slower on many threads, the more so beside other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def conversations() -> list[TokenizedConversation]:
    return [conversation(number) for number in range(16)]


@pytest.fixture
def make_config(tiny_target: TransformersTarget, tmp_path: Path) -> Callable[..., TrainConfig]:
    """Settings for a dozen steps on the tiny target, in a run directory of the given name."""

    def make(run: str = "run", **changes: object) -> TrainConfig:
        settings: dict[str, object] = {
            "target": tiny_target.source.name,
            "run": tmp_path / run,
            "batch_tokens": 96,
            "epochs": 2,
            "learning_rate": 3e-3,
            "checkpoint_every": 2,
        }
        return TrainConfig(**(settings | changes))

    return make
