"""What varies from step to step, as a function of the seed and the step alone.

Nothing here has a state, so a checkpoint holds no random generator and no scheduler: a run continued at
step 700 sees what an uninterrupted one sees there, with however many processes and micro-batches.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

# Conversations of similar length are put together within windows of so many batches, and so many
# conversations at least: little padding, and yet batches that differ from epoch to epoch.
_WINDOW_BATCHES, _WINDOW = 8, 128

# Keeps the streams of random numbers drawn from one seed apart.
_ORDER, _NOISE = 1, 2

# The length at which a conversation's noise has the configured width (EAGLE's AddUniformNoise).
_NOISE_LENGTH = 512


class BatchPlan:
    """Which conversations make up which step, known from their lengths before training starts."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        batch_tokens: int,
        epochs: int,
        seed: int,
        max_steps: int | None = None,
    ) -> None:
        self._lengths = lengths
        self._window = max(_WINDOW, _WINDOW_BATCHES * batch_tokens * len(lengths) // sum(lengths))
        self._batch_tokens = batch_tokens
        self._seed = seed
        self._max_steps = max_steps
        self.epochs = epochs
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)  # two: the next step is looked up, too

    @cached_property
    def epoch_ends(self) -> list[int]:
        """Number of steps done at the end of each epoch, whether or not `max_steps` cuts it short."""
        counts = [len(self._make_epoch(epoch)) for epoch in range(self.epochs)]
        return np.cumsum(counts).tolist()

    @property
    def total_steps(self) -> int:
        steps = self.epoch_ends[-1]
        return steps if self._max_steps is None else min(steps, self._max_steps)

    def epoch_of(self, step: int) -> int:
        """The 0-based epoch to which the 0-based step belongs."""
        return int(np.searchsorted(self.epoch_ends, step, side="right"))

    def batch(self, step: int) -> list[int]:
        """Indices of the conversations of the 0-based step."""
        epoch = self.epoch_of(step)
        start = self.epoch_ends[epoch - 1] if epoch else 0
        return self._epoch(epoch)[step - start]

    def _make_epoch(self, epoch: int) -> list[list[int]]:
        random = np.random.default_rng([_ORDER, self._seed, epoch])
        order = random.permutation(len(self._lengths)).tolist()
        batches = []
        for start in range(0, len(order), self._window):
            window = sorted(order[start : start + self._window], key=self._lengths.__getitem__)
            batches += cut(window, self._lengths, self._batch_tokens)
        return [batches[i] for i in random.permutation(len(batches))]


def cut(order: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Split `order` into runs whose padded size, count times longest, stays within `batch_tokens`."""
    batches: list[list[int]] = []
    widest = 0
    for index in order:
        widest = max(widest, lengths[index])
        if not batches or widest * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
            widest = lengths[index]
        batches[-1].append(index)
    return batches


def deal(lengths: Sequence[int], ranks: int, micro_batch_tokens: int) -> list[list[list[int]]]:
    """Divide conversations of these lengths among processes and micro-batches.

    Every process gets the same number of micro-batches, and no more than the budget asks for; they are
    about equal in size, and the last may be empty.

    Returns:
        For each process and each of its micro-batches, indices into `lengths`.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    rounds = -(-len(cut(order, lengths, micro_batch_tokens)) // ranks)
    too_small, enough = 0, micro_batch_tokens
    while enough - too_small > 1:  # the smallest budget that takes no more of them
        budget = (too_small + enough) // 2
        if len(cut(order, lengths, budget)) <= rounds * ranks:
            enough = budget
        else:
            too_small = budget
    micro_batches = cut(order, lengths, enough)
    micro_batches += [[] for _ in range(rounds * ranks - len(micro_batches))]
    return [micro_batches[rank::ranks] for rank in range(ranks)]


def learning_rate_factor(step: int, total: int, warmup: float) -> float:
    """Rises to 1 over the first `warmup` of the `total` steps, then falls linearly to 1/rest."""
    warmup_steps = min(round(warmup * total), total - 1)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return (total - step) / (total - warmup_steps)


def uniform_noise(
    like: Tensor,
    lengths: Sequence[int],
    places: Sequence[int],
    *,
    width: float,
    seed: int,
    step: int,
) -> Tensor:
    """EAGLE's noise: uniform, wider for short conversations, whose states are fewer.

    That of a conversation depends on its place in the step alone, not on the micro-batch it is in.

    Args:
        like: [B, T, H], whose shape and device the noise takes.
        lengths: tokens of each conversation. [B]
        places: where each stands in the step. [B]
        width: of a conversation of 512 tokens.

    Returns:
        float32 [B, T, H], 0 on padding.
    """
    noise = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    for row, (length, place) in enumerate(zip(lengths, places, strict=True)):
        seeds = np.random.SeedSequence([_NOISE, seed, step, place])
        generator = torch.Generator(like.device)
        generator.manual_seed(int(seeds.generate_state(1, np.uint64)[0]))
        noise[row, :length].uniform_(-0.5, 0.5, generator=generator)
        noise[row, :length] *= width * _NOISE_LENGTH / length
    return noise
