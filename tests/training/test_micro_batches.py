"""What a step is cut into changes nothing: the loss is one mean over all of its supervised tokens."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from training.helpers import (
    assert_same_course,
    assert_same_weights,
    conversation,
    log_lines,
)

from sfdd.conversations.conversation import TokenizedConversation
from sfdd.targets.transformers_target import TransformersTarget
from sfdd.training.batches import equal_weights
from sfdd.training.config import TrainConfig
from sfdd.training.run import train_draft
from sfdd.training.steps import Step

MakeConfig = Callable[..., TrainConfig]
Conversations = list[TokenizedConversation]


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_one_two_or_many_micro_batches_give_the_same_losses_and_weights(
    method: str,
    make_config: MakeConfig,
    tiny_target: TransformersTarget,
    conversations: Conversations,
) -> None:
    """With noise, with conversations that are longer than a micro-batch, measured and trained."""
    whole = make_config("whole", method=method, noise=0.2)
    train_draft(whole, tiny_target, conversations)
    counts = set()
    for tokens in (48, 24, 10):
        config = replace(whole, run=whole.run.parent / str(tokens), micro_batch_tokens=tokens)
        train_draft(config, tiny_target, conversations)
        counts.add(len(Step.of(conversations, equal_weights, 1, tokens).dealt[0]))
        assert_same_course(config.run, whole.run)
        assert_same_weights(config.run, whole.run)
    assert len(counts) == 3


def test_the_first_loss_is_the_mean_over_tokens_and_not_over_micro_batches(
    make_config: MakeConfig, tiny_target: TransformersTarget
) -> None:
    """A conversation with 3 supervised tokens beside one with 12, which weighs four times as much."""
    short, long = conversation(0, 6), conversation(1, 24)
    counts = [int(c.loss_mask[2:].sum()) for c in (short, long)]
    assert counts == [3, 12]

    def first_loss(run: str, data: Conversations) -> float:
        config = make_config(run, noise=0.0, held_out=0.0, max_steps=1, micro_batch_tokens=24)
        train_draft(config, tiny_target, data)
        return float(log_lines(config.run)[0]["loss"])

    alone = [first_loss("short", [short]), first_loss("long", [long])]
    expected = (3 * alone[0] + 12 * alone[1]) / 15
    assert first_loss("both", [short, long]) == pytest.approx(expected, rel=1e-5)
