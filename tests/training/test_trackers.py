"""What a person sees in TensorBoard is what training_log.jsonl says, interrupted or not."""

import importlib.util
import os
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event
from training.helpers import log_lines

from sfdd.conversations.conversation import TokenizedConversation
from sfdd.errors import UsageError
from sfdd.progress import Progress
from sfdd.targets.transformers_target import TransformersTarget
from sfdd.training.config import TrainConfig
from sfdd.training.run import train, train_draft

MakeConfig = Callable[..., TrainConfig]
Conversations = list[TokenizedConversation]


def _events(path: Path) -> Iterator[Event]:
    """The records of an event file: length, checksum, bytes, checksum."""
    data, start = path.read_bytes(), 0
    while start < len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        yield Event.FromString(data[start + 12 : start + 12 + length])
        start += 12 + length + 4


def _curves(run: Path) -> dict[str, dict[int, float]]:
    """As TensorBoard draws them: a file that starts at a step hides what earlier files say of it."""
    curves: dict[str, dict[int, float]] = {}
    for path in sorted((run / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns):
        for event in _events(path):
            if event.HasField("session_log"):
                for points in curves.values():
                    for step in [step for step in points if step >= event.step]:
                        del points[step]
            for value in event.summary.value:
                curves.setdefault(value.tag, {})[event.step] = value.simple_value
    return curves


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_tensorboard_holds_what_the_log_holds(
    method: str,
    make_config: MakeConfig,
    tiny_target: TransformersTarget,
    conversations: Conversations,
) -> None:
    config = make_config(method=method)
    train_draft(config, tiny_target, conversations)
    curves, lines = _curves(config.run), log_lines(config.run)
    steps = [line for line in lines if line["kind"] == "step"]
    parts = (
        ["hidden_loss", "token_loss"] if method == "eagle" else [f"step_{j}_loss" for j in range(7)]
    )
    names = ["loss", "learning_rate", "gradient_norm", "top1_agreement", *parts]
    for name in names:
        expected = {line["step"]: pytest.approx(line[name], rel=1e-6) for line in steps}
        assert curves[f"train/{name}"] == expected
    for line in steps:
        speed = curves["train/tokens_per_second"][line["step"]]
        assert speed == pytest.approx(line["tokens"] / line["seconds"], rel=1e-3)
    measured = [line for line in lines if line["kind"] == "held_out"]
    assert curves["held_out/tau"] == {
        line["step"]: pytest.approx(line["acceptance_length"]) for line in measured
    }
    for k in range(5):
        assert curves[f"held_out/agreement_{k + 1}"] == {
            line["step"]: pytest.approx(line["agreement"][k]) for line in measured
        }


def test_a_resumed_run_draws_one_curve(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    config, whole = make_config(checkpoint_every=1000), make_config("whole")
    train_draft(whole, tiny_target, conversations)

    def interrupt(moment: Progress) -> None:
        if moment.stage == "training" and moment.done == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train_draft(config, tiny_target, conversations, interrupt)
    train_draft(config, tiny_target, conversations)
    assert len(list((config.run / "tensorboard").iterdir())) == 2
    curves, expected = _curves(config.run), _curves(whole.run)
    for name in ("train/loss", "held_out/tau"):
        assert curves[name] == expected[name]


def test_a_fresh_start_removes_the_curves_of_the_old_one(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    config = make_config(max_steps=2)
    train_draft(config, tiny_target, conversations)
    (config.run / "tensorboard/notes.txt").write_text("mine")
    train_draft(make_config(max_steps=1, overwrite=True), tiny_target, conversations)
    (config.run / "tensorboard/notes.txt").unlink()
    assert list(_curves(config.run)["train/loss"]) == [1]


def test_no_tracker_writes_nothing(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    config = make_config(max_steps=1, tracker="none")
    train_draft(config, tiny_target, conversations)
    assert not (config.run / "tensorboard").exists()


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_wandb_that_is_not_installed_is_named_before_anything_is_loaded(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    with pytest.raises(UsageError) as error:
        train(make_config(target="/no/such/target", data=(str(data),), tracker="wandb"))
    assert str(error.value) == (
        "--tracker wandb needs the package wandb, which is not installed. Install it with "
        "'pip install wandb', or use --tracker tensorboard."
    )


def test_wandb_offline(
    make_config: MakeConfig,
    tiny_target: TransformersTarget,
    conversations: Conversations,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = make_config(max_steps=2, tracker="wandb")
    train_draft(config, tiny_target, conversations)
    assert len((config.run / "wandb/sfdd-run-id").read_text()) == 32
    assert list((config.run / "wandb").glob("offline-run-*/*.wandb"))
