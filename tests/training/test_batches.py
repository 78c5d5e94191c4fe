import numpy as np
import torch
from torch import nn
from training.helpers import conversation

from sfdd.conversations.conversation import Origin, TokenizedConversation
from sfdd.training.batches import draft_batch, learnable_tokens, pad


def _conversation(ids: list[int], mask: list[int]) -> TokenizedConversation:
    return TokenizedConversation(
        Origin("made", 0), "made:0", np.array(ids, np.int32), np.array(mask, np.bool_)
    )


def test_positions_read_the_next_token_and_predict_the_next_state() -> None:
    """By hand: tokens 10..14, state of position t is [t, 100 + t], tokens 3 and 4 supervised."""
    embedding = nn.Embedding(20, 2)
    with torch.no_grad():
        embedding.weight.copy_(torch.arange(20.0)[:, None].expand(20, 2))
    states = torch.tensor([[[0.0, 100], [1, 101], [2, 102], [3, 103], [4, 104]]])
    batch = draft_batch(
        torch.tensor([[10, 11, 12, 13, 14]]),
        torch.tensor([[False, False, False, True, True]]),
        states,
        embedding,
    )
    assert batch.embeddings[0, :, 0].tolist() == [11, 12, 13]
    assert batch.hidden_states[0].tolist() == [[0, 100], [1, 101], [2, 102]]
    assert batch.target_states[0].tolist() == [[1, 101], [2, 102], [3, 103]]
    # h_2 predicts token 3 and h_3 predicts token 4: these two targets count.
    assert batch.mask[0].tolist() == [False, True, True]


def test_the_first_two_tokens_are_never_learnt() -> None:
    assert learnable_tokens(_conversation([5, 6, 7], [0, 1, 1])) == 1
    assert learnable_tokens(_conversation([5, 6], [0, 1])) == 0


def test_padding_is_unsupervised_and_on_the_right() -> None:
    tokens = pad(
        [_conversation([5, 6, 7], [0, 0, 1]), _conversation([8, 9], [0, 1])], torch.device("cpu")
    )
    assert tokens.input_ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert tokens.loss_mask.tolist() == [[False, False, True], [False, True, False]]
    assert tokens.lengths.tolist() == [3, 2]


def test_padding_can_be_wider_than_needed() -> None:
    assert pad([conversation(0, 5)], torch.device("cpu"), width=9).input_ids.shape == (1, 9)


def test_noise_is_on_what_is_read_alone() -> None:
    embedding = nn.Embedding(20, 2)
    states = torch.randn(1, 5, 2)
    clean = draft_batch(
        torch.arange(5)[None], torch.ones(1, 5, dtype=torch.bool), states, embedding
    )
    noisy = clean.with_noise(torch.full((1, 3, 2), 0.5))
    assert torch.equal(noisy.hidden_states, states[:, :3] + 0.5)
    assert torch.equal(noisy.target_states, states[:, 1:4])
    assert torch.equal(noisy.embeddings, clean.embeddings)
