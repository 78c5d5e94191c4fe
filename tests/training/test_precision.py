"""Half precision and recomputation change how a step is computed, and hardly what comes out."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from training.helpers import assert_same_course, assert_same_weights, equal, log_lines, weights

from sfdd.conversations.conversation import TokenizedConversation
from sfdd.drafters.loading import new_drafter
from sfdd.errors import DrafterError, TargetError
from sfdd.progress import Progress
from sfdd.targets.transformers_target import TransformersTarget
from sfdd.training.batches import equal_weights, make_batch
from sfdd.training.config import TrainConfig
from sfdd.training.module import Objective
from sfdd.training.objectives import LossConfig
from sfdd.training.precision import LossScale
from sfdd.training.run import train_draft
from sfdd.training.states import OnlineStates

MakeConfig = Callable[..., TrainConfig]
Conversations = list[TokenizedConversation]


class _StoppedError(Exception):
    pass


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.02), ("fp16", 0.005)])
def test_half_precision_stays_near_float32(
    precision: str,
    tolerance: float,
    method: str,
    make_config: MakeConfig,
    tiny_target: TransformersTarget,
    conversations: Conversations,
) -> None:
    full, half = make_config("full", method=method), make_config(method=method, precision=precision)
    for config in (full, half):
        train_draft(config, tiny_target, conversations)
    losses = {
        config.precision: [line["loss"] for line in log_lines(config.run)]
        for config in (full, half)
    }
    assert losses[precision] == pytest.approx(losses["fp32"], rel=tolerance)
    assert losses[precision] != losses["fp32"]
    # The weights themselves are float32, whatever the products were computed in.
    assert {tensor.dtype for tensor in weights(half.run).values()} <= {
        torch.float32,
        torch.int64,
        torch.bool,
    }


def test_float16_is_resumed_with_its_loss_scale(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    config, whole = make_config(precision="fp16"), make_config("whole", precision="fp16")
    train_draft(whole, tiny_target, conversations)

    def die(moment: Progress) -> None:
        if moment.stage == "training" and moment.done == 5:
            raise _StoppedError

    with pytest.raises(_StoppedError):
        train_draft(config, tiny_target, conversations, die)
    train_draft(config, tiny_target, conversations)
    assert equal(weights(config.run), weights(whole.run))
    scales = [line["loss_scale"] for line in log_lines(whole.run) if line["kind"] == "step"]
    assert scales == [
        line["loss_scale"] for line in log_lines(config.run) if line["kind"] == "step"
    ]


def test_a_step_that_overflows_float16_is_done_again_with_half_the_scale(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    """Losses a thousand times as large overflow at the first scale, 65536; no step is lost."""
    config = make_config(precision="fp16", hidden_loss_weight=1e3, token_loss_weight=1e2)
    report = train_draft(config, tiny_target, conversations)
    steps = [line for line in log_lines(config.run) if line["kind"] == "step"]
    assert len(steps) == report.total_steps
    assert steps[0]["loss_scale"] < 2**16
    expected = make_config("full", hidden_loss_weight=1e3, token_loss_weight=1e2)
    train_draft(expected, tiny_target, conversations)
    assert steps[0]["gradient_norm"] == pytest.approx(
        log_lines(expected.run)[1]["gradient_norm"], rel=0.02
    )


def test_loss_scale_by_hand() -> None:
    scale = LossScale("fp16")
    assert scale.value == 65536
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([65536.0, 131072.0])
    scale.unscale([parameter])
    assert parameter.grad.tolist() == [1, 2]
    scale.after_step(1999)
    assert scale.value == 65536
    scale.after_step(2000)
    assert scale.value == 131072
    assert [scale.lower() for _ in range(18)] == [True] * 17 + [False]
    assert scale.value == 1
    unused = LossScale("bf16")
    unused.after_step(2000)
    assert (unused.lower(), unused.value, unused.figures()) == (False, 1, {})


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_gradient_checkpointing_changes_nothing(
    method: str,
    make_config: MakeConfig,
    tiny_target: TransformersTarget,
    conversations: Conversations,
) -> None:
    plain = make_config("plain", method=method)
    config = make_config(method=method, gradient_checkpointing=True)
    for each in (plain, config):
        train_draft(each, tiny_target, conversations)
    assert_same_course(config.run, plain.run, rel=1e-6)
    assert_same_weights(config.run, plain.run, atol=1e-6)


def test_a_step_that_is_not_finite_leaves_the_state_before_it(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    config = make_config(learning_rate=1e18, held_out=0.0, checkpoint_every=1000, epochs=50)
    with pytest.raises(
        DrafterError, match=r"Training stopped: the (loss|gradient) of step (\d+)"
    ) as e:
        train_draft(config, tiny_target, conversations)
    (kept,) = (config.run / "drafter/checkpoints").iterdir()
    last = len([line for line in log_lines(config.run) if line["kind"] == "step"])
    assert kept.name == f"step-{last}"
    assert f"of step {last + 1} is" in str(e.value)
    assert f"The state before it is kept in {kept}. Lower --learning-rate" in str(e.value)
    assert load_file(kept / "model.safetensors")["fc.weight"].isfinite().all()


def test_a_conversation_for_which_the_target_is_not_finite_is_the_one_named(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    """Embeddings of not-a-number poison the one conversation that has the token."""
    config = make_config(held_out=0.0, batch_tokens=10**6, micro_batch_tokens=24)
    ids = conversations[9].input_ids.copy()
    ids[3] = 256
    data = [*conversations[:9], replace(conversations[9], input_ids=ids), *conversations[10:]]
    row = tiny_target.embedding.weight.data[256]
    before = row.clone()
    row.fill_(float("nan"))
    try:
        with pytest.raises(TargetError) as error:
            train_draft(config, tiny_target, data)
    finally:
        row.copy_(before)
    assert str(error.value) == (
        "Training stopped: the loss of step 1 is nan, since the target's hidden states for conversation "
        "made:9 are not finite. Remove the conversation, or give another --dtype for the target. Start "
        "again with --overwrite."
    )


def test_states_that_are_no_longer_finite_leave_the_state_before(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    """The embeddings are poisoned while step 4 is done; only the end of an epoch left a checkpoint."""
    config = make_config(held_out=0.0, checkpoint_every=1000)
    weight = tiny_target.embedding.weight.data
    before = weight.clone()

    def poison(moment: Progress) -> None:
        if moment.done == 4:
            weight.fill_(float("nan"))

    try:
        with pytest.raises(TargetError) as error:
            train_draft(config, tiny_target, conversations, poison)
    finally:
        weight.copy_(before)
    kept = config.run / "drafter/checkpoints/step-4"
    assert str(error.value).startswith(
        "Training stopped: the loss of step 5 is nan, since the target's"
    )
    assert f"The state before it is kept in {kept}. Start again with --overwrite." in str(
        error.value
    )
    assert kept.is_dir()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_what_the_target_says_is_computed_in_its_own_precision(
    precision: str, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    seen = []

    class Head:
        embedding, rows_per_chunk = tiny_target.embedding, tiny_target.rows_per_chunk

        def logits(self, states: torch.Tensor) -> torch.Tensor:
            logits = tiny_target.logits(states)
            seen.append((states, logits))
            return logits

    drafter = new_drafter("eagle3", tiny_target)
    objective = Objective(drafter, Head(), LossConfig(ttt_steps=2), precision)
    states = OnlineStates(tiny_target, drafter.aux_layers, torch.float32)
    batch = make_batch(conversations[:4], equal_weights, states, tiny_target.device)
    objective(batch)
    assert seen
    for states_read, logits in seen:
        assert torch.equal(logits, tiny_target.logits(states_read))
