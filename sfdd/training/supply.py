"""What a training consumes: conversations, their hidden states, the weights of their tokens."""

from dataclasses import dataclass
from math import inf
from typing import Any

from sfdd.artifacts import RunDirectory
from sfdd.progress import ProgressCallback, silent
from sfdd.targets.transformers_target import TransformersTarget
from sfdd.training.batches import TokenWeights, equal_weights
from sfdd.training.cache import StatesCache
from sfdd.training.caching import complete
from sfdd.training.config import FLATNESS, TrainConfig
from sfdd.training.data import Split
from sfdd.training.distributed import ALONE, Ranks
from sfdd.training.flatness import FlatnessWeights, flatness_weights
from sfdd.training.states import OnlineStates, States, states_dtype


@dataclass(frozen=True)
class Supply:
    """What a training consumes."""

    data: Split
    states: States
    weights: TokenWeights = equal_weights


def token_weights(
    config: TrainConfig, target: TransformersTarget, data: Split
) -> FlatnessWeights | None:
    """The weights that the run's scores hold; None where every token counts the same.

    Raises:
        ArtifactError: the run has no flatness of these tokens.
    """
    if config.token_weight != FLATNESS:
        return None
    identity: dict[str, Any] = {**target.identity, **config.mask.identity()}
    return flatness_weights(RunDirectory(config.run), [*data.training, *data.held_out], identity)


def open_states(
    config: TrainConfig,
    target: TransformersTarget,
    data: Split,
    ranks: Ranks = ALONE,
    on_progress: ProgressCallback = silent,
    deadline: float = inf,
) -> States:
    """The source of hidden states that the settings name; a cache is filled first.

    Args:
        config: with the aux layers of an EAGLE-3 drafter.
        deadline: by `time.monotonic`, for filling the cache.

    Raises:
        OutOfTimeError: the deadline came first.
        ArtifactError: the cache cannot be used, or the disk has no room for it.
        TargetError: hidden states are not finite.
    """
    aux_layers, dtype = config.aux_layers or (), states_dtype(config.states_dtype, target)
    if config.cache is None:
        return OnlineStates(target, aux_layers, dtype)
    cache = StatesCache(config.cache, target, aux_layers, dtype, config.max_length)
    samples = [*data.training, *data.held_out]
    complete(cache, target, samples, ranks, on_progress, config.tokens_at_once, deadline)
    return cache
