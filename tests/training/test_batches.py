import numpy as np
import pytest
import torch
from training.helpers import conversation

from sfdd.conversations.conversation import Origin, TokenizedConversation
from sfdd.drafters.loading import new_drafter
from sfdd.targets.transformers_target import TransformersTarget
from sfdd.training.batches import (
    Batch,
    equal_weights,
    learnable_tokens,
    loss_weight,
    make_batch,
    pad,
)
from sfdd.training.objectives import LossConfig, loss_sums
from sfdd.training.states import OnlineStates

CPU = torch.device("cpu")


def _conversation(ids: list[int], mask: list[int]) -> TokenizedConversation:
    return TokenizedConversation(
        Origin("made", 0), "made:0", np.array(ids, np.int32), np.array(mask, np.bool_)
    )


def _tenths(conversation: TokenizedConversation) -> np.ndarray:
    return conversation.input_ids.astype(np.float32) / 10


def test_the_first_two_tokens_are_never_learnt() -> None:
    assert learnable_tokens(_conversation([5, 6, 7], [0, 1, 1])) == 1
    assert learnable_tokens(_conversation([5, 6], [0, 1])) == 0


def test_weight_of_a_conversation_is_that_of_its_learnt_tokens() -> None:
    """Tokens 7 and 9 are learnt; 6 is supervised but too early."""
    one = _conversation([5, 6, 7, 8, 9], [0, 1, 1, 0, 1])
    assert loss_weight(one, equal_weights) == 2
    assert loss_weight(one, _tenths) == pytest.approx(1.6)


def test_padding_is_unsupervised_weightless_and_on_the_right() -> None:
    tokens = pad([_conversation([5, 6, 7], [0, 0, 1]), _conversation([8, 9], [0, 1])], _tenths)
    assert tokens.input_ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert tokens.loss_mask.tolist() == [[False, False, True], [False, True, False]]
    torch.testing.assert_close(tokens.weights, torch.tensor([[0.5, 0.6, 0.7], [0.8, 0.9, 0]]))


def test_padding_can_be_wider_than_needed() -> None:
    assert pad([conversation(0, 5)], width=9).input_ids.shape == (1, 9)


def test_no_conversation_is_a_row_that_weighs_nothing() -> None:
    tokens = pad([])
    assert tokens.input_ids.shape == (1, 3)
    assert not tokens.loss_mask.any()
    assert not tokens.weights.any()


def _gradients(
    target: TransformersTarget, method: str, batch: Batch
) -> tuple[float, dict[str, torch.Tensor]]:
    drafter = new_drafter(method, target)
    total = loss_sums(drafter, batch, target, LossConfig(ttt_steps=3)).total
    total.backward()
    return total.item(), {name: p.grad for name, p in drafter.named_parameters()}


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_process_without_conversations_adds_zero_to_loss_and_every_gradient(
    method: str, tiny_target: TransformersTarget
) -> None:
    aux_layers = new_drafter(method, tiny_target).aux_layers
    states = OnlineStates(tiny_target, aux_layers, torch.float16)
    loss, gradients = _gradients(tiny_target, method, make_batch([], equal_weights, states, CPU))
    assert loss == 0
    assert all(gradient is not None and not gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_padding_changes_neither_loss_nor_gradient(
    method: str, tiny_target: TransformersTarget
) -> None:
    """A short answer weighs the same alone as beside a conversation that is three times as long."""
    states = OnlineStates(tiny_target, new_drafter(method, tiny_target).aux_layers, torch.float32)
    short, long = conversation(1, 8), conversation(2, 24)
    alone, other, both = (
        _gradients(tiny_target, method, make_batch(data, equal_weights, states, CPU))
        for data in ([short], [long], [short, long])
    )
    assert both[0] == pytest.approx(alone[0] + other[0], rel=1e-5)
    for name, gradient in both[1].items():
        torch.testing.assert_close(gradient, alone[1][name] + other[1][name], rtol=1e-3, atol=1e-4)
