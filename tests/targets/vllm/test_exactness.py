"""However the engine cuts, mixes and repeats its work, the numbers are those of transformers."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import Statistics, assert_equal, in_transformers, in_vllm

from sfdd.conversations.conversation import TokenizedConversation
from sfdd.errors import TargetError

CHUNKS = {"max_num_seqs": 8, "block_size": 32}


@pytest.fixture(scope="module")
def expected(qwen2: Path, samples: list[TokenizedConversation]) -> Statistics:
    return in_transformers(qwen2, samples)


def test_prompts_in_pieces_and_several_at_once(
    qwen2: Path, samples: list[TokenizedConversation], expected: Statistics
) -> None:
    """64 tokens a step: pieces of some prompts beside the end of others."""
    found = in_vllm(qwen2, samples, batch_tokens=64, engine_args=CHUNKS, logits_memory=1)
    assert_equal(found, expected)


def test_prompts_put_aside_and_started_again(
    qwen2: Path, samples: list[TokenizedConversation], expected: Statistics
) -> None:
    """A KV cache of 576 tokens for prompts of 2,527, none of them given its room beforehand."""

    def preempted(backend: Any) -> None:
        counters = {m.name: m for m in backend._engine.get_metrics()}
        assert counters["vllm:num_preemptions"].value > 5

    tiny_cache = CHUNKS | {
        "num_gpu_blocks_override": 18,
        "scheduler_reserve_full_isl": False,
        "long_prefill_token_threshold": 16,
        "disable_log_stats": False,
    }
    found = in_vllm(qwen2, samples, preempted, batch_tokens=64, engine_args=tiny_cache)
    assert_equal(found, expected)


@pytest.mark.parametrize("caching", [True, False])
def test_prefix_caching(
    caching: bool, qwen2: Path, samples: list[TokenizedConversation], expected: Statistics
) -> None:
    """Every prompt three times, and one that begins as another: none may come out shorter."""
    longer, extended = samples[3], samples[3]
    copies = [
        TokenizedConversation(s.origin, f"{s.id}-{i}", s.input_ids, s.loss_mask)
        for i in range(3)
        for s in (longer, *samples)
    ]
    begins_alike = TokenizedConversation(
        extended.origin, "begins alike", extended.input_ids[:300], extended.loss_mask[:300]
    )
    found = in_vllm(
        qwen2, [*copies, begins_alike], engine_args=CHUNKS | {"enable_prefix_caching": caching}
    )
    cut = found.pop("begins alike")
    for i in range(3):
        assert_equal({s.id: found[f"{s.id}-{i}"] for s in samples}, expected)
    whole = expected[extended.id].flatness
    np.testing.assert_allclose(cut.flatness, whole[: len(cut)], rtol=1e-4)


def test_two_ranks(qwen2: Path, samples: list[TokenizedConversation], expected: Statistics) -> None:
    """The vocabulary of 260 is padded and split; the logits are gathered and cut."""
    assert_equal(in_vllm(qwen2, samples, tensor_parallel_size=2), expected)


def test_soft_capped_logits(gemma2: Path, samples: list[TokenizedConversation]) -> None:
    assert_equal(in_vllm(gemma2, samples), in_transformers(gemma2, samples))


def test_half_precision(
    qwen2: Path, samples: list[TokenizedConversation], expected: Statistics, caplog: Any
) -> None:
    """Named in a warning; near float32, and as near as transformers' own bfloat16."""
    found = in_vllm(qwen2, samples, dtype="bfloat16")
    assert "is stored in float32 and scored in bfloat16" in caplog.text
    theirs = in_transformers(qwen2, samples, "bfloat16")

    def error(statistics: Statistics) -> float:
        parts = [statistics[i].flatness / expected[i].flatness - 1 for i in expected]
        return float(np.median(np.abs(np.concatenate(parts))))

    assert 1e-4 < error(found) < 1.5 * error(theirs) < 0.1


def test_in_process(qwen2: Path, samples: list[TokenizedConversation]) -> None:
    """No processes of the engine's own."""
    program = """
import os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from helpers import random_conversation
from engines import assert_equal, in_transformers, in_vllm
samples = [random_conversation(n, 3, seed=n) for n in (24, 300, 9, 77)]
assert_equal(in_vllm(Path(sys.argv[1]), samples), in_transformers(sys.argv[1], samples))
print("equal")
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(qwen2), str(Path(__file__).parents[2])],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("equal\n"), done.stderr


def test_a_request_that_cannot_be_is_the_engines_fault_said_once(
    qwen2: Path, samples: list[TokenizedConversation]
) -> None:
    """What was given before stays given."""
    too_long = TokenizedConversation(
        samples[0].origin, "long", np.full(600, 5, np.int32), np.ones(600, np.bool_)
    )
    with pytest.raises(TargetError, match=r"vLLM's engine stopped: .*600.*run the same command"):
        in_vllm(qwen2, [samples[0], too_long])
