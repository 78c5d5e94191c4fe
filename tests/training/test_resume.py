"""An interrupted training goes on as if nothing had happened, or says by name why it cannot."""

import os
import resource
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training.helpers import assert_same_weights, conversation, equal, log_lines, weights

from sfdd.conversations.conversation import TokenizedConversation
from sfdd.drafters.loading import load_drafter
from sfdd.errors import ArtifactError, DrafterError
from sfdd.export.checkpoint import read_checkpoint
from sfdd.export.findings import findings
from sfdd.progress import Progress
from sfdd.targets.transformers_target import TransformersTarget
from sfdd.training.config import TrainConfig
from sfdd.training.run import train_draft

MakeConfig = Callable[..., TrainConfig]
Conversations = list[TokenizedConversation]


class _StoppedError(Exception):
    """The process dies here, as far as the training can tell."""


def _stop_at(step: int, how: Callable[[], None]) -> Callable[[Progress], None]:
    def on_progress(moment: Progress) -> None:
        if moment.stage == "training" and moment.done == step:
            how()

    return on_progress


def _die() -> None:
    raise _StoppedError


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def uninterrupted(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> Path:
    """A finished training to compare with."""
    config = make_config("uninterrupted")
    train_draft(config, tiny_target, conversations)
    return config.run


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_resumed_equals_uninterrupted(
    step: int,
    make_config: MakeConfig,
    tiny_target: TransformersTarget,
    conversations: Conversations,
    uninterrupted: Path,
) -> None:
    config = make_config()
    with pytest.raises(_StoppedError):
        train_draft(config, tiny_target, conversations, _stop_at(step, _die))
    report = train_draft(config, tiny_target, conversations)
    assert equal(weights(config.run), weights(uninterrupted))

    def timeless(run: Path) -> list[dict[str, object]]:
        return [{**line, "seconds": None} for line in log_lines(run)]

    assert timeless(config.run) == timeless(uninterrupted)
    assert report.steps == len([x for x in log_lines(config.run) if x["kind"] == "step"])


def test_stopped_again_and_again(
    make_config: MakeConfig,
    tiny_target: TransformersTarget,
    conversations: Conversations,
    uninterrupted: Path,
) -> None:
    config = make_config()
    for step in (3, 5, 6):
        with pytest.raises(_StoppedError):
            train_draft(config, tiny_target, conversations, _stop_at(step, _die))
    train_draft(config, tiny_target, conversations)
    assert equal(weights(config.run), weights(uninterrupted))


def test_ctrl_c_keeps_the_very_step(
    make_config: MakeConfig,
    tiny_target: TransformersTarget,
    conversations: Conversations,
    uninterrupted: Path,
) -> None:
    config = make_config(checkpoint_every=1000)
    with pytest.raises(KeyboardInterrupt):
        train_draft(config, tiny_target, conversations, _stop_at(3, _interrupt))
    assert [path.name for path in (config.run / "drafter/checkpoints").iterdir()] == ["step-3"]
    moments: list[Progress] = []
    train_draft(config, tiny_target, conversations, moments.append)
    training = [moment for moment in moments if moment.stage == "training"]
    assert (training[0].done, training[0].resumed) == (4, 3)
    assert equal(weights(config.run), weights(uninterrupted))


def test_two_checkpoints_are_kept_and_each_is_a_drafter(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    config = make_config(checkpoint_every=1)
    with pytest.raises(_StoppedError):
        train_draft(config, tiny_target, conversations, _stop_at(5, _die))
    checkpoints = config.run / "drafter/checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-3", "step-4"]
    assert sorted(path.name for path in (checkpoints / "step-4").iterdir()) == [
        "config.json",
        "model.safetensors",
        "optimizer",
        "provenance.json",
        "training_log.jsonl",
    ]
    assert not list(findings(read_checkpoint(checkpoints / "step-4"), "vllm"))


def test_as_many_checkpoints_are_kept_as_asked_for(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    config = make_config(checkpoint_every=1, keep_checkpoints=3, held_out=0.0)
    with pytest.raises(_StoppedError):
        train_draft(config, tiny_target, conversations, _stop_at(6, _die))
    checkpoints = config.run / "drafter/checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-3", "step-4", "step-5"]


def _measured(run: Path) -> dict[int, float]:
    """Estimated acceptance length by step."""
    return {
        line["step"]: line["acceptance_length"]
        for line in log_lines(run)
        if line["kind"] == "held_out" and line["step"]
    }


def test_the_best_one_measured_is_kept_besides_and_after_the_end(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    """The learning rate is so high that the drafter is worse at the end than in between."""
    config = make_config(learning_rate=0.02, epochs=8, held_out=0.2, keep_checkpoints=1)
    report = train_draft(config, tiny_target, conversations)
    measured = _measured(config.run)
    best = max(measured, key=lambda step: (measured[step], step))
    assert measured[best] > measured[report.steps]
    assert report.best_step == best
    kept = config.run / "drafter/checkpoints"
    assert [path.name for path in kept.iterdir()] == [f"step-{best}"]
    load_drafter(kept / f"step-{best}", tiny_target)
    again = train_draft(config, tiny_target, conversations)
    assert again == replace(report, already_finished=True)
    assert [path.name for path in kept.iterdir()] == [f"step-{best}"]
    # Each measured step has a checkpoint while it is the best or the newest, whatever the interval.
    stopped = replace(config, run=config.run / "stopped", checkpoint_every=1000)
    with pytest.raises(_StoppedError):
        train_draft(stopped, tiny_target, conversations, _stop_at(report.steps - 1, _die))
    last = max(_measured(stopped.run))
    names = {path.name for path in (stopped.run / "drafter/checkpoints").iterdir()}
    assert names == {f"step-{best}", f"step-{last}"}


def test_measuring_within_an_epoch_changes_no_weight_and_leaves_checkpoints(
    make_config: MakeConfig,
    tiny_target: TransformersTarget,
    conversations: Conversations,
    uninterrupted: Path,
) -> None:
    """Six steps, three in an epoch."""
    config = make_config(measure_every=2, checkpoint_every=1000, keep_checkpoints=1)
    with pytest.raises(_StoppedError):
        train_draft(config, tiny_target, conversations, _stop_at(5, _die))
    assert sorted(_measured(config.run)) == [2, 3, 4]
    assert (config.run / "drafter/checkpoints/step-4").is_dir()
    train_draft(config, tiny_target, conversations)
    assert sorted(_measured(config.run)) == [2, 3, 4, 6]
    assert equal(weights(config.run), weights(uninterrupted))


def test_time_that_is_up_leaves_a_checkpoint_and_the_rest_is_exact(
    make_config: MakeConfig,
    tiny_target: TransformersTarget,
    conversations: Conversations,
    uninterrupted: Path,
) -> None:
    """A step at least is done each time, however little time there is."""
    config = make_config(checkpoint_every=1000, max_hours=1e-12)
    for step in (1, 2, 3):
        report = train_draft(config, tiny_target, conversations)
        assert (report.steps, report.is_finished) == (step, False)
        assert report.held_out_after is None
        assert not (config.run / "drafter/provenance.json").exists()
    report = train_draft(replace(config, max_hours=1.0), tiny_target, conversations)
    assert report.is_finished
    assert equal(weights(config.run), weights(uninterrupted))


def test_time_that_is_up_at_the_end_does_not_keep_the_end_from_being_measured(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    """Or the best checkpoint would be taken for one that is not needed."""
    settings = {"learning_rate": 0.02, "epochs": 8, "held_out": 0.2, "keep_checkpoints": 1}
    whole = train_draft(make_config("whole", **settings), tiny_target, conversations)
    assert whole.best_step is not None
    config = make_config(**settings)
    with pytest.raises(_StoppedError):
        train_draft(config, tiny_target, conversations, _stop_at(whole.steps - 1, _die))
    config = replace(config, max_hours=1e-12)
    while not (report := train_draft(config, tiny_target, conversations)).is_finished:
        assert report.held_out_after is None
    assert report.held_out_after == whole.held_out_after
    assert report.best_step == whole.best_step
    assert (config.run / f"drafter/checkpoints/step-{report.best_step}").is_dir()


def test_memory_that_runs_out_is_said_with_the_remedy_and_the_run_goes_on(
    make_config: MakeConfig,
    tiny_target: TransformersTarget,
    conversations: Conversations,
    uninterrupted: Path,
) -> None:
    def run_out() -> None:
        torch.empty(2**60)

    config = make_config()
    with pytest.raises(DrafterError) as error:
        train_draft(config, tiny_target, conversations, _stop_at(5, run_out))
    assert str(error.value).startswith("Memory ran out with 96 tokens at a time (")
    assert str(error.value).endswith(
        "Run the same command with --micro-batch-tokens 48 or less, or with --gradient-checkpointing: "
        "it goes on from the last checkpoint."
    )
    lines: list[int] = []
    train_draft(
        replace(config, micro_batch_tokens=48),
        tiny_target,
        conversations,
        lambda moment: lines.append(moment.done) if moment.stage == "training" else None,
    )
    assert lines == [5, 6]
    assert_same_weights(config.run, uninterrupted)


def test_a_signal_while_measuring_does_not_wait_for_the_end_of_it(
    make_config: MakeConfig,
    tiny_target: TransformersTarget,
    conversations: Conversations,
) -> None:
    config = make_config(held_out=0.5, micro_batch_tokens=30, checkpoint_every=1000)
    seen: list[int] = []

    def interrupt(moment: Progress) -> None:
        if moment.stage == "held-out" and not seen:
            seen.append(moment.done)
            _interrupt()

    with pytest.raises(KeyboardInterrupt):
        train_draft(config, tiny_target, conversations, interrupt)
    assert seen[0] < 8
    assert log_lines(config.run) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_does_not_wait(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    config = make_config(checkpoint_every=1000)

    def twice() -> None:
        _interrupt()
        _interrupt()
        raise AssertionError("the second should have ended this")

    with pytest.raises(KeyboardInterrupt):
        train_draft(config, tiny_target, conversations, _stop_at(3, twice))
    assert not (config.run / "drafter/checkpoints").exists()


def test_training_outside_the_main_thread_leaves_signals_alone(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    with ThreadPoolExecutor(1) as pool:
        config = make_config(max_steps=1)
        assert pool.submit(train_draft, config, tiny_target, conversations).result().steps == 1


def test_half_written_checkpoint_is_not_used(
    make_config: MakeConfig,
    tiny_target: TransformersTarget,
    conversations: Conversations,
    uninterrupted: Path,
) -> None:
    config = make_config()
    with pytest.raises(_StoppedError):
        train_draft(config, tiny_target, conversations, _stop_at(5, _die))
    checkpoints = config.run / "drafter/checkpoints"
    shutil.copytree(checkpoints / "step-4", checkpoints / ".step-5")
    (checkpoints / ".step-5/optimizer/moments.safetensors").write_bytes(b"half")
    train_draft(config, tiny_target, conversations)
    assert equal(weights(config.run), weights(uninterrupted))
    assert not checkpoints.exists()


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer/moments.safetensors"])
def test_damaged_checkpoint_is_named_and_the_one_before_it_serves(
    file: str,
    make_config: MakeConfig,
    tiny_target: TransformersTarget,
    conversations: Conversations,
    uninterrupted: Path,
) -> None:
    config = make_config()
    with pytest.raises(_StoppedError):
        train_draft(config, tiny_target, conversations, _stop_at(5, _die))
    newest = config.run / "drafter/checkpoints/step-4"
    (newest / file).write_bytes(b"damaged")
    with pytest.raises(ArtifactError) as error:
        train_draft(config, tiny_target, conversations)
    assert str(error.value).startswith(f"Checkpoint {newest} is damaged (")
    assert str(error.value).endswith(
        "Delete it to go on from an earlier one, or start again with --overwrite."
    )
    shutil.rmtree(newest)
    train_draft(config, tiny_target, conversations)
    assert equal(weights(config.run), weights(uninterrupted))


@pytest.mark.parametrize("finished", [True, False])
def test_changed_settings_data_and_target_are_refused_by_name(
    finished: bool,
    make_config: MakeConfig,
    tiny_target: TransformersTarget,
    conversations: Conversations,
) -> None:
    config = make_config()
    if finished:
        train_draft(config, tiny_target, conversations)
    else:
        with pytest.raises(_StoppedError):
            train_draft(config, tiny_target, conversations, _stop_at(5, _die))

    with pytest.raises(ArtifactError) as error:
        train_draft(replace(config, learning_rate=0.1, seed=7), tiny_target, conversations)
    assert str(error.value) == (
        f"{config.run}/drafter holds a drafter of another training: "
        "learning_rate (was 0.003, now 0.1); seed (was 0, now 7). "
        "Start again with --overwrite, or train in another directory with --run."
    )
    with pytest.raises(ArtifactError, match=r"training: training_data \(was \w+, now \w+\)\."):
        train_draft(config, tiny_target, conversations[::-1])
    # What does not change the weights may change.
    assert train_draft(replace(config, checkpoint_every=3), tiny_target, conversations).steps


def test_overwrite_starts_again_and_removes_only_what_sfdd_wrote(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    config = make_config()
    with pytest.raises(_StoppedError):
        train_draft(config, tiny_target, conversations, _stop_at(5, _die))
    (config.run / "drafter/notes.txt").write_text("mine")
    (config.run / "drafter/checkpoints/notes.txt").write_text("mine")
    again = replace(config, overwrite=True, learning_rate=1e-3)
    train_draft(again, tiny_target, conversations)
    fresh = replace(config, run=config.run.parent / "fresh", learning_rate=1e-3)
    train_draft(fresh, tiny_target, conversations)
    assert equal(weights(config.run), weights(fresh.run))
    assert (config.run / "drafter/notes.txt").read_text() == "mine"
    assert [path.name for path in (config.run / "drafter/checkpoints").iterdir()] == ["notes.txt"]


def test_a_model_of_someone_else_is_not_overwritten(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    config = make_config()
    (config.run / "drafter").mkdir(parents=True)
    (config.run / "drafter/model.safetensors").write_bytes(b"precious")
    with pytest.raises(ArtifactError) as error:
        train_draft(config, tiny_target, conversations)
    assert str(error.value) == (
        f"{config.run}/drafter holds a model that was not trained here. "
        "Choose another directory with --run, or replace it with --overwrite."
    )
    assert (config.run / "drafter/model.safetensors").read_bytes() == b"precious"


def test_full_disk_ends_in_a_sentence_and_training_goes_on_later(
    make_config: MakeConfig,
    tiny_target: TransformersTarget,
    conversations: Conversations,
    uninterrupted: Path,
) -> None:
    """Files may not grow beyond 4 kB from step 3 on, so the checkpoint of step 4 fails."""
    config = make_config()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))

    try:
        with pytest.raises(
            ArtifactError, match=r"^Cannot write .*: File too large\. Free the disk"
        ):
            train_draft(config, tiny_target, conversations, _stop_at(3, fill))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in (config.run / "drafter/checkpoints").glob("step-*")] == ["step-2"]
    train_draft(config, tiny_target, conversations)
    assert equal(weights(config.run), weights(uninterrupted))


def test_killed_while_the_finished_drafter_is_written(
    make_config: MakeConfig,
    tiny_target: TransformersTarget,
    conversations: Conversations,
    uninterrupted: Path,
) -> None:
    """Its weights are there and its provenance is not: the checkpoint of the last step makes it whole."""
    config = make_config(checkpoint_every=1000)
    measurements = 0

    def die_at_the_last_measurement(moment: Progress) -> None:
        nonlocal measurements
        measurements += moment.stage == "held-out"
        if measurements == 3:  # before training, after the first epoch, at the end
            _die()

    with pytest.raises(_StoppedError):
        train_draft(config, tiny_target, conversations, die_at_the_last_measurement)
    (config.run / "drafter/model.safetensors").write_bytes(b"half")
    moments: list[Progress] = []
    train_draft(config, tiny_target, conversations, moments.append)
    assert {moment.stage for moment in moments} == {"held-out"}
    assert equal(weights(config.run), weights(uninterrupted))


def test_a_single_conversation_holds_nothing_out(
    make_config: MakeConfig, tiny_target: TransformersTarget
) -> None:
    report = train_draft(make_config(), tiny_target, [conversation(0)])
    assert (report.conversations, report.held_out_conversations) == (1, 0)
    assert report.held_out_after is None
