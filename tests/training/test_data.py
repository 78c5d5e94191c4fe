from dataclasses import replace

import numpy as np
from training.helpers import conversation

from sfdd.training.data import digest_conversations, split


def _numbers(side: list) -> list[int]:
    return [c.origin.row for c in side]


def test_split_is_whole_disjoint_and_in_file_order() -> None:
    data = [conversation(number) for number in range(40)]
    parts = split(data, 0.1, seed=0)
    assert len(parts.held_out) == 4
    assert sorted(_numbers(parts.training) + _numbers(parts.held_out)) == list(range(40))
    assert _numbers(parts.training) == sorted(_numbers(parts.training))


def test_split_is_fixed_by_its_seed() -> None:
    data = [conversation(number) for number in range(40)]
    held_out = [_numbers(split(data, 0.1, seed).held_out) for seed in (0, 0, 1)]
    assert held_out[0] == held_out[1] != held_out[2]


def test_one_is_held_out_of_two_and_none_of_one() -> None:
    data = [conversation(0), conversation(1)]
    assert len(split(data, 0.01, seed=0).held_out) == 1
    assert len(split(data[:1], 0.5, seed=0).held_out) == 0
    assert len(split(data, 0.0, seed=0).held_out) == 0


def test_no_more_than_256_are_held_out() -> None:
    data = [conversation(number, length=6 + number) for number in range(600)]
    assert len(split(data, 0.9, seed=0).held_out) == 256


def test_copies_stay_on_one_side() -> None:
    data = [conversation(number) for number in range(10)]
    parts = split([*data, *data, *data], 0.3, seed=0)
    assert len(parts.held_out) == 9
    assert not set(_numbers(parts.held_out)) & set(_numbers(parts.training))


def test_digest_sees_tokens_mask_and_order() -> None:
    data = [conversation(0), conversation(1)]
    other_mask = replace(data[0], loss_mask=np.ones_like(data[0].loss_mask))
    other_ids = replace(data[0], input_ids=data[0].input_ids + 1)
    other_name = replace(data[0], id="renamed")
    digest = digest_conversations(data)
    assert digest_conversations([other_name, data[1]]) == digest
    assert digest_conversations(data[::-1]) != digest
    assert digest_conversations([other_mask, data[1]]) != digest
    assert digest_conversations([other_ids, data[1]]) != digest
