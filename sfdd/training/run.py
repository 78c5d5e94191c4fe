"""`sfdd train-draft`: from data and target to a drafter that is finished, or can be gone on with."""

import logging
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from math import inf

import torch

from sfdd.artifacts import Provenance, RunDirectory, ensure_writable, environment, exclusive
from sfdd.conversations.config import MAX_LENGTH
from sfdd.conversations.conversation import TokenizedConversation
from sfdd.conversations.pipeline import open_sources
from sfdd.drafters.drafter import Drafter, read_provenance
from sfdd.drafters.loading import load_drafter, new_drafter
from sfdd.drafters.serving import why_not_served
from sfdd.drafters.vocabulary import draft_vocabulary
from sfdd.errors import DataError
from sfdd.progress import ProgressCallback, silent
from sfdd.targets.transformers_target import TransformersTarget
from sfdd.training.batches import equal_weights, learnable_tokens
from sfdd.training.checkpoints import (
    Checkpoints,
    check_continuable,
    is_finished,
    remove_training,
)
from sfdd.training.config import EAGLE3, TrainConfig
from sfdd.training.data import (
    Split,
    check_selection,
    digest_conversations,
    read_training_data,
    split,
    supervised_counts,
    with_run_defaults,
)
from sfdd.training.distributed import ALONE, Ranks, together
from sfdd.training.failure import memory_running_out
from sfdd.training.loop import Trainer
from sfdd.training.report import TrainReport
from sfdd.training.states import states_dtype
from sfdd.training.supply import Supply, open_states, token_weights
from sfdd.training.trackers import require_tracker, start_tracker

log = logging.getLogger(__name__)


def train(config: TrainConfig, on_progress: ProgressCallback = silent) -> TrainReport:
    """Load the target, read the data and train; see `train_draft`, whose errors it shares.

    Every process that `torchrun` or `accelerate launch` started calls it.

    Raises:
        UsageError: no target or no data are given, and the run has none.
        TargetError: the target cannot be loaded.
        DataError: a data set cannot be read, or no record of it can be used.
        ArtifactError: the run's data were selected by another target, or another process trains here.
    """
    run, of_the_run = RunDirectory(config.run), not config.data
    config = with_run_defaults(config)
    sources = open_sources(config.data, config.format)
    require_tracker(config.tracker)
    ensure_writable(run.drafter)
    started = time.monotonic()
    with (
        together(config) as ranks,
        exclusive(run, "train-draft") if ranks.is_first else nullcontext(),
    ):
        target = TransformersTarget.load(
            config.target or "",
            dtype=config.dtype,
            device=str(ranks.device or config.device),
            attn_implementation=config.attn_implementation,
            trust_remote_code=config.trust_remote_code,
        )
        if of_the_run:
            check_selection(run, target.source.name, target.identity)
        max_length = target.usable_length(config.max_length or MAX_LENGTH)
        config = replace(config, max_length=max_length)
        data = read_training_data(sources, target.tokenizer, max_length, config.mask)
        report = train_draft(config, target, data.conversations, on_progress, ranks, started)
    return replace(report, skipped=data.skipped, truncated=data.truncated)


def train_draft(
    config: TrainConfig,
    target: TransformersTarget,
    conversations: Sequence[TokenizedConversation],
    on_progress: ProgressCallback = silent,
    ranks: Ranks = ALONE,
    started: float | None = None,
) -> TrainReport:
    """Train a drafter into the run's `drafter` directory, or go on with one begun there.

    On a CPU the weights are a function of config, target and conversations, whether or not the training
    was interrupted. Ctrl-C leaves a checkpoint and goes on as KeyboardInterrupt.

    Args:
        started: by `time.monotonic`, from when `max_hours` counts; None for now.

    Raises:
        DataError: there is nothing to train on.
        ArtifactError: the directory cannot be written, or holds a drafter of other settings, data or
            target; or the cache or the token weights cannot be used.
        DrafterError: the loss or its gradient is no longer finite, or memory ran out.
        OutOfTimeError: `max_hours` were over before the cache was filled.
    """
    started = time.monotonic() if started is None else started
    run = RunDirectory(config.run)
    usable = [c for c in conversations if learnable_tokens(c)]
    if not usable:
        raise DataError("No training data: no conversation has a supervised token to learn.")
    data = split(usable, config.held_out, config.seed)
    drafter = _untrained(config, target, data)
    if ranks.is_first and (reason := why_not_served(config.method, target.config.model_type)):
        log.warning(reason)
    config = replace(config, aux_layers=drafter.aux_layers or None)
    weights = token_weights(config, target, data)
    provenance = Provenance(
        {
            **target.identity,
            **config.identity(),
            "learning_rate": config.highest_learning_rate(target.hidden_size),
            "states_dtype": str(states_dtype(config.states_dtype, target)).removeprefix("torch."),
            "training_data": digest_conversations(usable),
            **({"token_weights": weights.digest} if weights else {}),
        },
        {"target": target.source.reference, "settings": config.to_json(), **environment()},
    )
    if ranks.is_first:
        ensure_writable(run.drafter)
        if config.overwrite:
            remove_training(run.drafter)
    ranks.wait()
    check_continuable(run.drafter, provenance)
    if is_finished(run.drafter):
        return _finished(run, target, ranks)

    deadline = started + 3600 * (config.max_hours or inf)
    with memory_running_out(config):
        states = open_states(config, target, data, ranks, on_progress, deadline)
        supply = Supply(data, states, weights or equal_weights)
        trainer = Trainer(config, target, drafter, supply, provenance, ranks)
        _warn_of_idle_processes(trainer)
        name = config.tracker if ranks.is_first else "none"
        with closing(start_tracker(name, run.root, trainer.resumed, config.to_json())) as tracker:
            trainer.run(on_progress, tracker, deadline)
    report = trainer.report()
    if report.is_finished:
        result = {**provenance.about, "result": report.to_json()}
        trainer.save(replace(provenance, about=result))
        if ranks.is_first:
            trainer.checkpoints.remove(but=report.best_step)
    return report


def _untrained(config: TrainConfig, target: TransformersTarget, data: Split) -> Drafter:
    """A new drafter; one of EAGLE-3 drafts the tokens that are supervised most often."""
    vocabulary = None
    if config.method == EAGLE3:
        counts = supervised_counts(data.training, target.vocab_size)
        vocabulary = draft_vocabulary(torch.from_numpy(counts), config.draft_vocab_size)
    return new_drafter(
        config.method,
        target,
        seed=config.seed,
        aux_layers=config.aux_layers,
        draft_to_target=vocabulary,
    )


def _warn_of_idle_processes(trainer: Trainer) -> None:
    processes, plan = trainer.ranks.count, trainer.plan
    in_a_step = len(trainer.supply.data.training) * plan.epochs / plan.epoch_ends[-1]
    if in_a_step < 2 * processes and processes > 1:
        log.warning(
            "A step of --batch-tokens %d has %.1f conversations for %d processes, so some are idle: give "
            "more --batch-tokens.",
            trainer.config.batch_tokens,
            in_a_step,
            processes,
        )


def _finished(run: RunDirectory, target: TransformersTarget, ranks: Ranks) -> TrainReport:
    load_drafter(run.drafter, target)  # whole, before it is called finished
    report = TrainReport.from_json(read_provenance(run.drafter).about["result"], run.drafter)
    if ranks.is_first:
        Checkpoints(run.drafter).remove(but=report.best_step)
    return report
