from datetime import datetime
from decimal import Decimal
from pathlib import Path

import pytest
from conftest import byte_tokenizer
from conversations.templates import family_tokenizer
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


def test_types_that_vary_by_row(tmp_path: Path) -> None:
    """`tools` null for ten thousand rows and then a text; content a text, then parts; and the like."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    text_call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    rows = [openai("Hi", "Hello") | {"tools": None, "id": i} for i in range(10_000)]
    rows += [
        openai("Hi", "Hello") | {"tools": '[{"name": "f"}]', "id": "text"},
        openai("Hi", "Hello") | {"tools": [{"name": "f"}], "id": None},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
        {
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "tool_calls": [call]},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": None, "tool_calls": [text_call]},
            ]
        },
    ]
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    *first, text, listed, no_answer, call_read, text_call_read = read_conversations(
        open_sources([str(path)])
    )
    assert len(first) == 10_000
    assert all(isinstance(item, Conversation) and item.tools == () for item in first)
    assert isinstance(text, Conversation)
    assert isinstance(listed, Conversation)
    assert text.tools == listed.tools == ({"type": "function", "function": {"name": "f"}},)
    assert isinstance(no_answer, Skipped)
    assert no_answer.reason == "no_assistant_turn"
    assert call_read.content_hash == text_call_read.content_hash


def test_columns_never_become_arguments_of_the_template(tmp_path: Path) -> None:
    """The template heeds `enable_thinking` and more; a column of that name changes nothing."""
    columns = {
        "enable_thinking": False,
        "add_generation_prompt": True,
        "bos_token": "<evil>",
        "date_string": "today",
        "documents": [{"title": "t", "text": "x"}],
        "chat_template": "{{ 1 / 0 }}",
    }
    path = write_jsonl(
        tmp_path / "d.jsonl", [openai("Hi", "Hello"), openai("Hi", "Hello") | columns]
    )
    for family in ("qwen3", "llama3"):
        plain, with_columns = tokenize_data([str(path)], family_tokenizer(family), 1000)
        assert isinstance(plain, TokenizedConversation)
        assert isinstance(with_columns, TokenizedConversation)
        assert plain.input_ids.tolist() == with_columns.input_ids.tolist()
        assert plain.loss_mask.tolist() == with_columns.loss_mask.tolist()


def test_tokens_are_used_as_they_are(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "d.jsonl",
        [
            {"input_ids": [1, 50, 51, 52, 2], "loss_mask": [1, 0, 0, 1, 1]},
            {"input_ids": [1, 50], "loss_mask": [0]},
            {"input_ids": [1, 258, 999], "loss_mask": [0, 0, 1]},
            {"input_ids": [1, 50], "loss_mask": [0, 7]},
            {"input_ids": [1, 50, 51], "loss_mask": [0, 0, 0]},
            {"input_ids": [1, 50, 51, 52, 53, 54], "loss_mask": [0, 0, 0, 0, 0, 1]},
        ],
    )
    good, *skipped = tokenize_data([str(path)], byte_tokenizer(), 5)
    assert isinstance(good, TokenizedConversation)
    assert good.input_ids.tolist() == [1, 50, 51, 52, 2]
    assert good.loss_mask.tolist() == [
        False,
        False,
        False,
        True,
        True,
    ]  # nothing predicts the first
    assert [item.reason for item in skipped if isinstance(item, Skipped)] == [
        "invalid_tokens: 2 input_ids but 1 values in loss_mask",
        "invalid_tokens: token 999 of a vocabulary of 259",
        "invalid_tokens: 7 in loss_mask, not 0 or 1",
        "no_supervised_tokens",
        "no_supervised_tokens: within 5 tokens",
    ]


def test_a_data_set_of_something_else_is_refused_before_it_is_read(tmp_path: Path) -> None:
    pairs = [{"prompt": "p", "chosen": "a", "rejected": "b"}] * 3
    path = write_jsonl(tmp_path / "d.jsonl", ["{broken", *pairs])
    with pytest.raises(DataError) as error:
        open_sources([str(path)])
    assert str(error.value) == (
        f"Data set {path} holds no conversations: its first record is a preference pair (chosen, "
        "rejected), and sfdd reads records with messages or conversations, prompt and response or "
        "completion, instruction and output, or input_ids and loss_mask."
    )
    # One conversation among them is enough to read it, and so is to say what to read it as.
    write_jsonl(tmp_path / "d.jsonl", [*pairs, openai("Hi", "Hello")])
    assert len(list(tokenize_data([str(path)], byte_tokenizer(), 100))) == 4
    write_jsonl(tmp_path / "d.jsonl", pairs)
    assert len(open_sources([str(path)], "openai")) == 1


def test_patterns(tmp_path: Path) -> None:
    for name in "ba":
        write_jsonl(tmp_path / f"{name}.jsonl", [openai(name, name)])
    sources = open_sources([str(tmp_path / "*.jsonl")])
    assert [Path(source.name).name for source in sources] == ["a.jsonl", "b.jsonl"]
    with pytest.raises(DataError, match=r"No file matches .*\*\.parquet"):
        open_sources([str(tmp_path / "*.parquet")])


def test_nesting_at_the_edge_of_what_json_reads(tmp_path: Path) -> None:
    """json reads a little deeper than it writes; neither ends the run."""
    rows = []
    for depth in range(900, 1010, 2):
        nested = '{"a":' * depth + "1" + "}" * depth
        call = f'{{"function": {{"name": "f", "arguments": {nested}}}}}'
        rows.append(
            '{"messages": [{"role": "user", "content": "x"}, '
            f'{{"role": "assistant", "tool_calls": [{call}]}}]}}'
        )
    path = write_jsonl(tmp_path / "d.jsonl", [*rows, openai("Hi", "Hello")])
    items = list(tokenize_data([str(path)], byte_tokenizer(), 100))
    assert len(items) == len(rows) + 1
    assert isinstance(items[-1], TokenizedConversation)


def test_dates_and_decimals_of_a_table_are_text(tmp_path: Path) -> None:
    """A reader of JSON takes a text for a date when it makes a table of it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    arguments = pa.array([{"day": datetime(2024, 5, 1), "price": Decimal("1.50")}])
    function = pa.StructArray.from_arrays([pa.array(["f"]), arguments], ["name", "arguments"])
    call = pa.StructArray.from_arrays([function], ["function"])
    calls = pa.ListArray.from_arrays([0, 0, 1], pa.concat_arrays([call]))
    turns = pa.StructArray.from_arrays(
        [pa.array(["user", "assistant"]), pa.array(["When?", ""]), calls],
        ["role", "content", "tool_calls"],
    )
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"messages": pa.ListArray.from_arrays([0, 2], turns)}), path)
    (item,) = read_conversations(open_sources([str(path)]))
    assert isinstance(item, Conversation)
    (read,) = item.messages[1]["tool_calls"]
    assert read["function"]["arguments"] == {"day": "2024-05-01 00:00:00", "price": "1.50"}
