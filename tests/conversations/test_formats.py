import json
import re
from typing import Any

import pytest
from helpers import openai, sharegpt

from sfdd.conversations.config import Format
from sfdd.conversations.formats import format_of, looks_like, read_content, record_id
from sfdd.conversations.messages import SkipRecordError

EXPECTED = (
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
)
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("record", "format"),
    [
        (sharegpt("Hi", "Hello"), "sharegpt"),
        (openai("Hi", "Hello"), "openai"),
        ({"conversations": openai("Hi", "Hello")["messages"]}, "openai"),
        ({"conversation": sharegpt("Hi", "Hello")["conversations"]}, "sharegpt"),
        ({"prompt": "Hi", "response": "Hello"}, "prompt-response"),
        ({"prompt": "Hi", "completion": "Hello", "score": 3}, "prompt-response"),
        (
            {
                "prompt": [{"role": "user", "content": "Hi"}],
                "completion": [{"role": "assistant", "content": "Hello"}],
            },
            "prompt-response",
        ),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, "alpaca"),
        ({"instruction": "Hi", "response": "Hello", "category": "chat"}, "alpaca"),
    ],
)
def test_formats_that_say_the_same(record: dict[str, Any], format: str) -> None:
    assert format_of(record) == format
    assert read_content(record).messages == EXPECTED
    assert read_content(record, Format(format)).messages == EXPECTED


@pytest.mark.parametrize(
    "record",
    [
        sharegpt("Hi", "Hello") | {"system": "Be brief."},
        openai("Hi", "Hello") | {"system": "Be brief."},
        {"prompt": "Hi", "response": "Hello", "system_prompt": "Be brief."},
        {"instruction": "Hi", "output": "Hello", "system": "Be brief."},
    ],
)
def test_a_system_prompt_beside_the_turns(record: dict[str, Any]) -> None:
    assert read_content(record).messages == (SYSTEM, *EXPECTED)


def test_a_system_turn_wins_over_a_system_prompt() -> None:
    record = {"messages": [SYSTEM, *EXPECTED], "system": "Another."}
    assert read_content(record).messages == (SYSTEM, *EXPECTED)


def test_alpaca_input_and_history() -> None:
    record = {
        "instruction": "Translate.",
        "input": "Bonjour",
        "output": "Hello",
        "history": [["Hi", "Hey"]],
    }
    assert [m["content"] for m in read_content(record).messages] == [
        "Hi",
        "Hey",
        "Translate.\nBonjour",
        "Hello",
    ]


def test_context_where_there_is_no_input() -> None:
    record = {"instruction": "Sum up.", "input": "", "context": "A long text.", "output": "Short."}
    assert read_content(record).messages[0]["content"] == "Sum up.\nA long text."


def test_history_before_a_prompt() -> None:
    record = {"prompt": "Bye", "response": "Ciao", "history": [["Hi", "Hello"]]}
    assert [m["content"] for m in read_content(record).messages] == ["Hi", "Hello", "Bye", "Ciao"]


def test_a_system_prompt_in_parts() -> None:
    record = openai("Hi", "Hello") | {"system": [{"type": "text", "text": "Be brief."}]}
    assert read_content(record).messages == (SYSTEM, *EXPECTED)


def test_the_list_that_holds_something() -> None:
    assert read_content(sharegpt("Hi", "Hello") | {"messages": []}).messages == EXPECTED
    functions = openai("Hi", "Hello") | {"tools": [], "functions": [CALL]}
    assert len(read_content(functions).tools) == 1


def test_a_record_of_two_formats_is_read_as_told() -> None:
    record = openai("Hi", "Hello") | {"prompt": "Hi", "response": "Other"}
    assert read_content(record).messages == EXPECTED
    told = read_content(record, Format.PROMPT_RESPONSE)
    assert told.messages[1]["content"] == "Other"
    with pytest.raises(SkipRecordError, match="not alpaca; it has messages, prompt, response"):
        read_content(record, Format.ALPACA)


def test_tokens() -> None:
    record = {"input_ids": [1, 5, 6], "loss_mask": [0, 0, 1], "id": "t"}
    assert format_of(record) == "tokenized"
    assert read_content(record).tokens == ([1, 5, 6], [0, 0, 1])
    with pytest.raises(SkipRecordError, match=r"input_ids\[1\] is 'x', not a whole number"):
        read_content({"input_ids": [1, "x"], "loss_mask": [0, 0]})


def test_role_names_of_the_field() -> None:
    turns = {
        "system": "system",
        "developer": "developer",
        "human": "user",
        "user": "user",
        "gpt": "assistant",
        "assistant": "assistant",
        "chatgpt": "assistant",
        "bing": "assistant",
        "Bard": "assistant",
        "tool": "tool",
        "function": "tool",
        "observation": "tool",
    }
    record = {"conversations": [{"from": role, "value": "x"} for role in turns]}
    assert [m["role"] for m in read_content(record).messages] == list(turns.values())


CALL = {"name": "w", "arguments": {"c": 1}}
READ_CALL = [{"id": "call00001", "type": "function", "function": CALL}]


@pytest.mark.parametrize(
    "turn",
    [
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "tool_call", "value": json.dumps([CALL])},
        {"role": "assistant", "content": None, "tool_calls": [{"function": CALL}]},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "content": "", "function_call": CALL},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "w", "arguments": '{"c": 1}'}}
            ],
        },
        {"role": "assistant", "content": [{"type": "tool_call", "value": json.dumps(CALL)}]},
    ],
)
def test_calls_in_every_spelling(turn: dict[str, Any]) -> None:
    record = {"messages": [{"role": "user", "content": "W?"}, turn]}
    if "from" in turn:
        record = {"conversations": [{"from": "human", "value": "W?"}, turn]}
    (_, answer) = read_content(record).messages
    assert answer == {"role": "assistant", "content": "", "tool_calls": READ_CALL}


def test_results_know_their_calls() -> None:
    record = openai("W?", "", "5", "It is 5.")
    record["messages"][1]["tool_calls"] = [{"id": "a", **CALL}, CALL]
    record["messages"][2]["role"] = "tool"
    record["messages"].insert(3, {"role": "tool", "content": "6", "name": "w"})
    messages = read_content(record).messages
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["a", "call00002"]
    assert [m.get("tool_call_id") for m in messages] == [None, None, "a", "call00002", None]
    assert messages[3]["name"] == "w"


def test_results_of_calls_at_once_in_any_order() -> None:
    turns = [
        {"from": "human", "value": "W?"},
        {"from": "function_call", "value": '{"name": "a", "arguments": {}}'},
        {"from": "function_call", "value": '{"name": "b", "arguments": {}}'},
        {"from": "observation", "value": "B", "name": "b"},
        {"from": "observation", "value": "A"},
        {"from": "gpt", "value": "Both."},
    ]
    messages = read_content({"conversations": turns}).messages
    assert [m.get("tool_call_id") for m in messages[3:5]] == ["call00002", "call00001"]


@pytest.mark.parametrize("key", ["arguments", "parameters", "args", "input"])
def test_arguments_by_any_name(key: str) -> None:
    record = openai("W?", "")
    record["messages"][1]["tool_calls"] = [{"name": "w", key: {"c": 1}}]
    assert read_content(record).messages[1]["tool_calls"] == READ_CALL


@pytest.mark.parametrize("tools", [[CALL], json.dumps([CALL]), [{"function": CALL}]])
def test_tools_as_list_or_text(tools: object) -> None:
    (tool,) = read_content(openai("Hi", "Hello") | {"tools": tools}).tools
    assert tool["function"] == CALL


@pytest.mark.parametrize("tools", [None, [], "", "[]", " "])
def test_no_tools(tools: object) -> None:
    assert read_content(openai("Hi", "Hello") | {"tools": tools}).tools == ()


def test_content_in_parts() -> None:
    parts = [
        {"type": "reasoning", "value": "hm"},
        {"type": "text", "text": "Hel"},
        {"type": "text", "value": "lo"},
    ]
    record = openai("Hi", "")
    record["messages"][1]["content"] = parts
    answer = {"role": "assistant", "content": "Hello", "reasoning_content": "hm"}
    assert read_content(record).messages[1] == answer


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_by_any_name(key: str) -> None:
    record = openai("Hi", "Hello")
    record["messages"][1][key] = "hm"
    assert read_content(record).messages[1]["reasoning_content"] == "hm"
    record["messages"][1][key] = ""
    assert read_content(record).messages == EXPECTED


def test_nothing_else_of_a_turn_or_record_is_read() -> None:
    record = openai("Hi", "Hello") | {"add_generation_prompt": True, "enable_thinking": False}
    record["messages"][1] |= {"prefix": True, "date_string": "today", "tool_calls": []}
    content = read_content(record)
    assert content.messages == EXPECTED
    assert content.tools == ()


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([1], "not_a_conversation: a JSON list instead of an object"),
        (None, "not_a_conversation: a JSON null instead of an object"),
        ({"messages": []}, "empty_conversation"),
        (openai("Hi"), "no_assistant_turn"),
        (openai("Hi", " \n"), "empty_conversation: every assistant turn is empty"),
        (
            {"messages": [{"role": "narrator", "content": "Once"}]},
            "unknown_role: 'narrator' in turn 1",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "value": "x"}]}]},
            "unsupported: image_url part in turn 1",
        ),
        (
            {"messages": [{"role": "user", "content": [1]}]},
            "unsupported: part that is a number in turn 1",
        ),
        (
            {"prompt": "Hi", "response": ["answer A", "answer B"]},
            "unsupported: part that is a string in turn 2",
        ),
        (
            {"instruction": "Double it", "input": 5, "output": "10"},
            "not_a_conversation: the input is a number, not text",
        ),
        (
            {"prompt": "Hi", "response": "Yo", "history": 5},
            "not_a_conversation: history is not a list of pairs",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}]},
            "not_a_conversation: type of a part of turn 1",
        ),
        (
            openai("Hi", "Hello", "Bye") | {"response": "Ciao"},
            "not_a_conversation: the turns end with a question, and answers stand beside them (response)",
        ),
        (
            sharegpt("Hi") | {"chosen": {"value": "a"}, "rejected": {"value": "b"}},
            "not_a_conversation: the turns end with a question, and answers stand beside them (chosen",
        ),
        (
            {"prompt": "Hi", "completion": "bad", "label": False},
            "not_a_conversation: it looks like an answer with a verdict on it (label)",
        ),
        (
            {"messages": '[{"role": "user"}]'},
            "not_a_conversation: it looks like turns written as one text (messages)",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "w"}]}]},
            "invalid_tool: a call without arguments in turn 1",
        ),
        (
            {"messages": [{"role": "user", "content": 1}]},
            "not_a_conversation: content of turn 1 is a number, not text",
        ),
        (
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant"}]},
            "not_a_conversation: turn 2 has neither role/content nor from/value",
        ),
        (
            {"messages": ["Hi", "Hello"]},
            "not_a_conversation: turn 1 has neither role/content nor from/value",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
            "not_a_conversation: a tool call in turn 1, of a user",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}]},
            "invalid_tool: a call without a name in turn 1",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "w(1)"}]},
            "invalid_tool: the call in turn 1: not JSON (Expecting value: line 1 column 1 (char 0))",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "w", "arguments": "1"}]}]},
            "invalid_tool: the arguments of a call in turn 1 are a number, not an object",
        ),
        (openai("Hi", "Hello") | {"tools": "w()"}, "invalid_tool: the list of tools: not JSON"),
        (
            openai("Hi", "Hello") | {"tools": [{"name": "\ud800"}]},
            "unreadable: a tool is not valid Unicode",
        ),
        (openai("Hi", "Hello") | {"tools": ["w"]}, "invalid_tool: the tools are no list"),
    ],
)
def test_reasons(record: object, reason: str) -> None:
    with pytest.raises(SkipRecordError, match=f"^{re.escape(reason)}"):
        read_content(record)


@pytest.mark.parametrize(
    ("record", "looks"),
    [
        ({"chosen": [], "rejected": []}, "a preference pair (chosen, rejected)"),
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, "a preference pair (chosen, rejected)"),
        ({"prompt": {"text": "p", "replies": []}}, "a message tree (replies)"),
        ({"title": "t", "mapping": {}}, "a message tree (mapping)"),
        (
            {"text": "t", "role": "prompter", "parent_message_id": None},
            "a single message linked to others by parent_message_id",
        ),
        ({"role": "user", "content": "Hi"}, "a single message, not a list of them"),
        ({"text": "Once upon a time"}, "plain text without turns; it has text"),
        (
            {"a": openai("Hi", "Hello"), "b": openai("Hi")},
            "an object whose values are conversations (a, b), not a list of them",
        ),
        ({"turn_1": "Hi", "turn_2": "Hello"}, "none of the formats; it has turn_1, turn_2"),
        ([], "a JSON list"),
    ],
)
def test_what_is_no_conversation_is_called_what_it_looks_like(record: object, looks: str) -> None:
    assert format_of(record) is None
    assert looks_like(record) == looks


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
