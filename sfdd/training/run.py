"""`sfdd train-draft`: from data and target to a drafter that is finished, or can be gone on with."""

from collections.abc import Sequence
from dataclasses import replace

from sfdd.artifacts import Provenance, RunDirectory, ensure_writable, environment, exclusive
from sfdd.conversations.conversation import TokenizedConversation
from sfdd.conversations.pipeline import open_sources
from sfdd.drafters.eagle import EagleDrafter, read_provenance
from sfdd.errors import DataError
from sfdd.progress import ProgressCallback, silent
from sfdd.targets.transformers_target import TransformersTarget
from sfdd.training.batches import learnable_tokens
from sfdd.training.checkpoints import (
    Checkpoints,
    check_continuable,
    is_finished,
    remove_training,
)
from sfdd.training.config import TrainConfig
from sfdd.training.data import (
    check_selection,
    digest_conversations,
    read_training_data,
    split,
    with_run_defaults,
)
from sfdd.training.loop import Trainer
from sfdd.training.report import TrainReport


def train(config: TrainConfig, on_progress: ProgressCallback = silent) -> TrainReport:
    """Load the target, read the data and train; see `train_draft`, whose errors it shares.

    Raises:
        UsageError: no target or no data are given, and the run has none.
        TargetError: the target cannot be loaded.
        DataError: a data set cannot be read, or no record of it can be used.
        ArtifactError: the run's data were selected by another target, or another process trains here.
    """
    run, of_the_run = RunDirectory(config.run), not config.data
    config = with_run_defaults(config)
    sources = open_sources(config.data, config.format)
    ensure_writable(run.drafter)
    with exclusive(run, "train-draft"):
        target = TransformersTarget.load(
            config.target or "",
            dtype=config.dtype,
            device=config.device,
            attn_implementation=config.attn_implementation,
            trust_remote_code=config.trust_remote_code,
        )
        if of_the_run:
            check_selection(run, target.source.name, target.identity)
        config = replace(config, max_length=target.usable_length(config.max_length))
        data = read_training_data(sources, target.tokenizer, config.max_length, config.mask)
        report = train_draft(config, target, data.conversations, on_progress)
    return replace(report, skipped=data.skipped, truncated=data.truncated)


def train_draft(
    config: TrainConfig,
    target: TransformersTarget,
    conversations: Sequence[TokenizedConversation],
    on_progress: ProgressCallback = silent,
) -> TrainReport:
    """Train an EAGLE drafter into the run's `drafter` directory, or go on with one begun there.

    On a CPU the weights are a function of config, target and conversations, whether or not the training
    was interrupted. Ctrl-C leaves a checkpoint and goes on as KeyboardInterrupt.

    Raises:
        DataError: there is nothing to train on.
        ArtifactError: the directory cannot be written, or holds a drafter of other settings, data or
            target.
        DrafterError: the loss or its gradient is no longer finite.
    """
    run = RunDirectory(config.run)
    usable = [c for c in conversations if learnable_tokens(c)]
    if not usable:
        raise DataError("No training data: no conversation has a supervised token to learn.")
    provenance = Provenance(
        {**target.identity, **config.identity(), "training_data": digest_conversations(usable)},
        {"target": target.source.reference, "settings": config.to_json(), **environment()},
    )
    ensure_writable(run.drafter)
    if config.overwrite:
        remove_training(run.drafter)
    check_continuable(run.drafter, provenance)
    checkpoints = Checkpoints(run.drafter)
    if is_finished(run.drafter):
        EagleDrafter.load(run.drafter, target)  # whole, before it is called finished
        checkpoints.remove()
        return TrainReport.from_json(read_provenance(run.drafter).about["result"], run.drafter)

    trainer = Trainer(config, target, split(usable, config.held_out, config.seed), provenance)
    trainer.run(on_progress)
    report = trainer.report()
    result = {**provenance.about, "result": report.to_json()}
    trainer.drafter.save(run.drafter, replace(provenance, about=result))
    checkpoints.remove()
    return report
