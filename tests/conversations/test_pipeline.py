from pathlib import Path

import pytest
from conftest import byte_tokenizer
from helpers import openai, sharegpt, write_jsonl

from sfdd.conversations.conversation import Conversation, Skipped, TokenizedConversation
from sfdd.conversations.pipeline import open_sources, read_conversations, tokenize_data
from sfdd.errors import DataError


def test_every_record_comes_out_once_and_in_order(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "d.jsonl",
        [
            sharegpt("Hi", "Hello", id="a"),
            "{broken",
            openai("Hi", "Hello"),
            {"text": "?"},
            openai("Hi"),
        ],
    )
    items = list(tokenize_data([str(path)], byte_tokenizer(), 100))
    assert [item.origin.row for item in items] == [0, 1, 2, 3, 4]
    assert [isinstance(item, TokenizedConversation) for item in items] == [
        True,
        False,
        True,
        False,
        False,
    ]
    reasons = [item.reason.split(":")[0] for item in items if isinstance(item, Skipped)]
    assert reasons == ["unreadable", "not_a_conversation", "no_assistant_turn"]
    assert [item.id for item in items] == ["a", *(f"{path}:{row}" for row in (1, 2, 3, 4))]


def test_an_id_that_repeats_falls_back_to_the_place(tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "1.jsonl", [openai("a", "b", id="x"), openai("c", "d", id="x")])
    second = write_jsonl(tmp_path / "2.jsonl", [openai("e", "f", id="x"), openai("g", "h", id="y")])
    items = read_conversations(open_sources([str(first), str(second)]))
    assert [item.id for item in items] == ["x", f"{first}:1", f"{second}:0", "y"]


def test_halves_of_surrogate_pairs_are_that_records_reason(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "d.jsonl",
        [
            r'{"id": "a", "messages": [{"role": "user", "content": "\ud800"}]}',
            r'{"id": "b\ud800", "messages": [{"role": "\udfff", "content": ""}]}',
            r'{"\ud800": 1}',
            openai("Hi", "Hello", id="good"),
        ],
    )
    *skipped, good = tokenize_data([str(path)], byte_tokenizer(), 100)
    assert isinstance(good, TokenizedConversation)
    reasons = [item.reason for item in skipped if isinstance(item, Skipped)]
    assert reasons == [
        "unreadable: content of turn 1 is not valid Unicode",
        r"unknown_role: '\udfff' in turn 1",
        r"not_a_conversation: it looks like none of the formats; it has \ud800",
    ]
    assert skipped[1].id == r"b\ud800"


def test_a_data_set_given_twice(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [openai("a", "b")])
    with pytest.raises(DataError, match=r"d\.jsonl is given twice"):
        open_sources([str(path), f"{tmp_path}/./d.jsonl"])


def test_the_content_hash_is_of_the_conversation_alone(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "d.jsonl",
        [openai("a", "b", id="1"), sharegpt("a", "b", id="2"), openai("a", "c", id="3")],
    )
    hashes = [
        item.content_hash
        for item in read_conversations(open_sources([str(path)]))
        if isinstance(item, Conversation)
    ]
    assert hashes[0] == hashes[1] != hashes[2]
