"""Engines as a user starts them: processes of their own, on a CPU. Run by 'make test-vllm'."""

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
from engines import save_family
from helpers import random_conversation

from sfdd.conversations.conversation import TokenizedConversation

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",  # GiB
    VLLM_CPU_OMP_THREADS_BIND="nobind",  # two ranks on two cores
)
LENGTHS = (24, 300, 9, 511, 77, 400, 401, 402, 403)


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("targets") / "qwen2", "qwen2")


@pytest.fixture(scope="session")
def gemma2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("targets") / "gemma2", "gemma2")


@pytest.fixture(scope="session")
def samples() -> list[TokenizedConversation]:
    """Of different lengths, with several supervised runs each."""
    made = []
    for length in LENGTHS:
        sample = random_conversation(length, 3, seed=length)
        mask = sample.loss_mask & (np.arange(length) % 50 < 30)
        made.append(TokenizedConversation(sample.origin, sample.id, sample.input_ids, mask))
    return made
