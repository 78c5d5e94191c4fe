import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import save_tiny_target
from helpers import random_conversation

from sfdd.scoring.config import ScoreConfig
from sfdd.targets.backend import open_backend
from sfdd.targets.transformers_backend import (
    TransformersBackend,
    by_length,
    next_batch,
    ran_out_of_memory,
)
from sfdd.targets.transformers_target import TransformersTarget


def sizes(lengths: list[int], batch_tokens: int) -> list[list[int]]:
    samples = by_length([random_conversation(n, 1, seed=i) for i, n in enumerate(lengths)])
    made = []
    while samples:
        count = next_batch(samples, batch_tokens)
        made.append([len(sample) for sample in samples[:count]])
        samples = samples[count:]
    return made


def test_batches_hold_every_sample_within_the_budget() -> None:
    assert sizes([5, 90, 40, 7, 200], 100) == [[200], [90], [40], [7], [5]]
    # A batch of an eighth of the budget may be padded; a larger one hardly.
    assert sizes([100, 99, 97, 96, 95, 80], 1000) == [[100, 99, 97, 96, 95], [80]]
    assert sizes([25] * 9, 100) == [[25] * 4, [25] * 4, [25]]


class TestMemory:
    def test_a_batch_that_does_not_fit_is_halved(self, tmp_path: Path) -> None:
        """The address space of a real process is bounded; a smaller batch fits into it."""
        code = """
import resource, sys
sys.path.insert(0, "tests")
from pathlib import Path
from helpers import random_conversation
from sfdd.targets.transformers_backend import TransformersBackend
from sfdd.targets.transformers_target import TransformersTarget
target = TransformersTarget.load(sys.argv[1])
samples = [random_conversation(500, 490, seed=i) for i in range(64)]
expected = {c.id: target.token_stats([c])[0].flatness for c in samples}
target.token_stats(samples[:2])
size = int(Path("/proc/self/status").read_text().partition("VmSize:")[2].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + 300 * 2**20, resource.RLIM_INFINITY))
backend = TransformersBackend(target, 32_000)
got = {c.id: s.flatness for batch, stats in backend.token_stats(samples) for c, s in zip(batch, stats)}
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
assert got.keys() == expected.keys()
assert max(abs(got[i] / expected[i] - 1).max() for i in got) < 1e-5
print(backend.batch_tokens)
"""
        target = save_tiny_target(tmp_path / "wide", hidden_size=256, intermediate_size=8192)
        done = subprocess.run(
            [sys.executable, "-c", code, str(target)],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parents[2],
        )
        assert done.returncode == 0, done.stderr
        assert 64 <= int(done.stdout) <= 16_000
        assert "Memory ran out; going on with --batch-tokens" in done.stderr

    def test_the_budget_of_the_logits_reaches_the_target(self, tiny_directory: Path) -> None:
        config = ScoreConfig(("data",), str(tiny_directory), logits_memory=7)
        backend = open_backend(config.target, config, 100)
        assert isinstance(backend, TransformersBackend)
        assert backend._target.logits_memory == 7

    def test_what_counts_as_memory_that_ran_out(self) -> None:
        assert ran_out_of_memory(MemoryError())
        assert ran_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
        assert not ran_out_of_memory(RuntimeError("size mismatch"))

    def test_other_errors_come_out(self, tiny_target: TransformersTarget) -> None:
        wrong = random_conversation(10, 3, seed=0, vocab_size=100_000)  # ids that do not exist
        with pytest.raises((IndexError, RuntimeError)):
            list(TransformersBackend(tiny_target, 100).token_stats([wrong]))

    def test_logits_stay_within_their_memory(self, tmp_path: Path) -> None:
        """152,000 tokens of vocabulary, 8,192 supervised tokens: 5 GB of logits, never there at once."""
        code = """
import sys
sys.path.insert(0, "tests")
from pathlib import Path
from helpers import random_conversation
from sfdd.targets import statistics, transformers_target
statistics._CHUNK_BYTES["cpu"] = 2**40  # the budget alone decides
target = transformers_target.TransformersTarget.load(sys.argv[1])
target.logits_memory = int(sys.argv[2])
target.token_stats([random_conversation(64, 1, seed=0)])
sample = random_conversation(8192, 1, seed=1)
def peak():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
Path("/proc/self/clear_refs").write_text("5")
before = peak()
target.token_stats([sample], prefill_tokens=1024)
print(peak() - before)
"""
        target = save_tiny_target(
            tmp_path / "target", vocab_size=152_000, hidden_size=16, num_attention_heads=2,
            max_position_embeddings=8192,
        )  # fmt: skip
        for budget in (64, 256):
            done = subprocess.run(
                [sys.executable, "-c", code, str(target), str(budget)],
                capture_output=True,
                text=True,
                check=True,
                cwd=Path(__file__).parents[2],
            )
            assert budget / 4 < float(done.stdout) < budget + 24  # and the body's activations


def test_padding_is_counted(tiny_target: TransformersTarget) -> None:
    backend = TransformersBackend(tiny_target, 100)
    samples = [random_conversation(n, 1, seed=n) for n in (50, 48, 10)]
    assert [len(batch) for batch, _ in backend.token_stats(samples)] == [2, 1]
    assert backend.computed_tokens == 2 * 50 + 10
