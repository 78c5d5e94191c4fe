"""Bringing the hidden states that a run will read into the cache: what is missing, and no more."""

import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from math import inf

import torch
from torch import Tensor

from sfdd.artifacts import RunDirectory, exclusive
from sfdd.conversations.conversation import TokenizedConversation
from sfdd.errors import ArtifactError, OutOfTimeError, TargetError
from sfdd.progress import Progress, ProgressCallback
from sfdd.targets.transformers_target import TransformersTarget
from sfdd.training.batches import pad
from sfdd.training.cache import StatesCache
from sfdd.training.distributed import Ranks
from sfdd.training.schedule import cut
from sfdd.training.states import OnlineStates, fault_of_states

log = logging.getLogger(__name__)

_SHARD_BYTES, _SHARD_SECONDS = 2**27, 60.0
_HEADERS = 1.02  # what files take beyond the states in them


def complete(
    cache: StatesCache,
    target: TransformersTarget,
    conversations: Sequence[TokenizedConversation],
    ranks: Ranks,
    on_progress: ProgressCallback,
    batch_tokens: int,
    deadline: float = inf,
) -> None:
    """Compute the missing states of some conversations; each process takes its part.

    Another run that fills the same cache is waited for.

    Args:
        deadline: by `time.monotonic`.

    Raises:
        OutOfTimeError: it came before all was done; what was done is in the cache.
        ArtifactError: the disk has no room, or the directory cannot be written.
        TargetError: the states of a conversation are not finite, or too large for the cache's dtype.
    """
    if ranks.is_first:
        cache.start()
    alone = exclusive(RunDirectory(cache.directory), "cache", wait=True)
    with alone if ranks.is_first else nullcontext():
        if ranks.is_first:
            cache.remove_damaged(on_progress)
            _require_room(cache, list(cache.missing(conversations).values()))
        ranks.wait()
        missing = cache.missing(conversations)
        mine = dict(list(missing.items())[ranks.index :: ranks.count])
        ranks.wait()  # all have looked before anyone writes
        _compute(cache, target, mine, on_progress, batch_tokens, deadline)
        late = ranks.highest(int(time.monotonic() >= deadline))
    lost = cache.missing(conversations)
    if lost and late:
        raise OutOfTimeError(
            f"Stopped after --max-hours: {len(lost):,} samples are still missing in the cache "
            f"{cache.directory}. Run the same command again to continue."
        )
    if lost:
        raise ArtifactError(
            f"{len(lost)} samples of the cache {cache.directory} were lost while this ran. Run the same "
            "command again: it computes them alone."
        )


def _require_room(cache: StatesCache, missing: Sequence[TokenizedConversation]) -> None:
    """Say what the cache will take, and refuse where the disk has less."""
    if not missing:
        return
    needed = int(sum(map(len, missing)) * cache.row_bytes * _HEADERS)
    free = shutil.disk_usage(cache.directory).free
    what = f"The hidden states of {len(missing):,} samples take {_size(needed)}"
    log.warning("%s in %s, where %s are free.", what, cache.directory, _size(free))
    if needed > free:
        raise ArtifactError(
            f"{what}, and {cache.directory} has {_size(free)} free. Name a directory with more room with "
            "--cache, or leave it out: the states are then computed in every epoch."
        )


def _size(count: int) -> str:
    """Bytes for people."""
    power = min((max(count, 1).bit_length() - 1) // 10, 4)
    return f"{count / 2 ** (10 * power):.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _compute(
    cache: StatesCache,
    target: TransformersTarget,
    missing: Mapping[str, TokenizedConversation],
    on_progress: ProgressCallback,
    batch_tokens: int,
    deadline: float,
) -> None:
    online = OnlineStates(target, cache.aux_layers, cache.dtype)
    keys, conversations = list(missing), list(missing.values())
    lengths = [len(conversation) for conversation in conversations]
    samples: dict[str, Tensor] = {}
    done = tokens = 0
    started = time.monotonic()
    for rows in cut(range(len(keys)), lengths, batch_tokens):
        states = _states(online, [conversations[i] for i in rows], target)  # [B, T, (1 + A) * H]
        for i, of_one in zip(rows, states, strict=True):
            if not bool(of_one[: lengths[i]].isfinite().all()):
                fault = fault_of_states(target, conversations[i], cache.aux_layers, cache.dtype)
                raise TargetError(f"Cannot cache these data: {fault}")
            samples[keys[i]] = of_one[: lengths[i]].clone()
            tokens += lengths[i]
        done += len(rows)
        size = sum(states.nbytes for states in samples.values())
        now = time.monotonic()
        is_last = done == len(keys) or now >= deadline
        if is_last or size > _SHARD_BYTES or now - started > _SHARD_SECONDS:
            cache.write(samples)
            samples, started = {}, now
        on_progress(Progress("caching", "samples", done, len(keys), tokens))
        if is_last:
            return


def _states(
    online: OnlineStates, conversations: Sequence[TokenizedConversation], target: TransformersTarget
) -> Tensor:
    input_ids = pad(conversations).input_ids.to(target.device)
    hidden, aux = online.read(conversations, input_ids)
    return (hidden if aux is None else torch.cat([hidden, aux], dim=-1)).cpu()
