import re

import pytest
from helpers import openai, sharegpt

from sfdd.conversations.formats import SkipRecordError, read_messages, record_id


def test_sharegpt_and_openai_mean_the_same() -> None:
    expected = (
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    )
    assert read_messages(sharegpt("Hi", "Hello")) == expected
    assert read_messages(openai("Hi", "Hello")) == expected


def test_empty_extras_are_nothing() -> None:
    record = openai("Hi", "Hello") | {"tools": None}
    record["messages"][1] |= {"tool_calls": [], "reasoning_content": ""}
    assert len(read_messages(record)) == 2


def test_role_names_of_the_field() -> None:
    turns = [("system", "s"), ("human", "u"), ("gpt", "a"), ("user", "v"), ("chatgpt", "b")]
    record = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    roles = [message["role"] for message in read_messages(record)]
    assert roles == ["system", "user", "assistant", "user", "assistant"]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([1], "not_a_conversation: a JSON list instead of an object"),
        (None, "not_a_conversation: a JSON null instead of an object"),
        (
            {"prompt": "x", "response": "y"},
            "not_a_conversation: no list under messages or conversations; it has prompt, response",
        ),
        ({"messages": []}, "empty_conversation"),
        (openai("Hi"), "no_assistant_turn"),
        (openai("Hi", " \n"), "empty_conversation: every assistant turn is empty"),
        (
            {"messages": [{"role": "narrator", "content": "Once"}]},
            "unknown_role: 'narrator' in turn 1",
        ),
        (
            {"messages": [{"role": "user", "content": ["part"]}]},
            "not_a_conversation: content of turn 1 is a list, not text",
        ),
        (
            openai("Hi", "Hello") | {"tools": [{"name": "f"}]},
            "unsupported: tools in the record",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}]},
            "unsupported: tool_calls in turn 1",
        ),
        (
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant"}]},
            "not_a_conversation: turn 2 has neither role/content nor from/value",
        ),
    ],
)
def test_reasons(record: object, reason: str) -> None:
    with pytest.raises(SkipRecordError, match=f"^{re.escape(reason)}$"):
        read_messages(record)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"id": "a"}, "a"),
        ({"id": 7}, "7"),
        ({"conversation_id": "c"}, "c"),
        ({"id": ""}, ""),
        ({"id": ["x"]}, ""),
        ("text", ""),
    ],
)
def test_record_id(record: object, expected: str) -> None:
    assert record_id(record) == expected
