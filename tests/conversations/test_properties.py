"""Whatever a data set holds: every record comes out once, and what is supervised is what was said."""

import json
import tempfile
from pathlib import Path
from typing import Any

from conversations.templates import family_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sfdd.conversations.conversation import Skipped, TokenizedConversation
from sfdd.conversations.pipeline import read_conversations, tokenize_data
from sfdd.conversations.sources import open_source
from sfdd.errors import DataError

CHATML, QWEN, LLAMA = (family_tokenizer(name) for name in ("chatml", "qwen2.5", "llama3"))

# Letters, blanks, marks of templates, emoji, other scripts, control characters: what text may hold.
texts = st.one_of(
    st.text(min_size=1, max_size=30),
    st.sampled_from(
        ["<|im_end|>", "<|im_start|>assistant\n", "Yes.", " ", "\n\nHi", "a ", "\u2028", "🙂", "é"]
    ),
)
said = texts.filter(str.strip)


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[str, str]]:
    """Question and answer pairs, some of them the same text again."""
    pairs = draw(st.lists(st.tuples(texts, said), min_size=1, max_size=4))
    if draw(st.booleans()):
        pairs.append((pairs[0][1], pairs[0][1]))
    return pairs


def in_format(pairs: list[tuple[str, str]], form: int) -> dict[str, Any]:
    turns = [turn for pair in pairs for turn in zip(("user", "assistant"), pair, strict=True)]
    if form == 0:
        return {"messages": [{"role": role, "content": text} for role, text in turns]}
    if form == 1:
        names = {"user": "human", "assistant": "gpt"}
        return {"conversations": [{"from": names[role], "value": text} for role, text in turns]}
    *history, (question, answer) = pairs
    return {
        "instruction": question,
        "input": "",
        "output": answer,
        "history": list(map(list, history)),
    }


@settings(max_examples=150, deadline=None)
@given(conversations(), st.integers(0, 2), st.booleans())
def test_what_is_supervised_decodes_to_exactly_what_was_said(
    pairs: list[tuple[str, str]], form: int, escaped: bool
) -> None:
    record = in_format(pairs, form)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "d.jsonl"
        line = json.dumps(record, ensure_ascii=escaped)
        path.write_bytes(line.encode("utf-8") + b"\n")
        for tokenizer, end in ((CHATML, "<|im_end|>"), (QWEN, "<|im_end|>")):
            (item,) = tokenize_data([str(path)], tokenizer, 100_000)
            assert isinstance(item, TokenizedConversation), item
            supervised = tokenizer.decode(item.input_ids[item.loss_mask])
            assert supervised == "".join(answer + end for _, answer in pairs)
        (item,) = tokenize_data([str(path)], LLAMA, 100_000)  # this template trims
        assert isinstance(item, TokenizedConversation), item
        supervised = LLAMA.decode(item.input_ids[item.loss_mask])
        assert supervised == "".join(answer.strip() + "<|eot_id|>" for _, answer in pairs)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
KEYS = ["messages", "conversations", "prompt", "response", "completion", "instruction", "input"]
KEYS += ["output", "history", "system", "tools", "input_ids", "loss_mask", "id", "chosen", "text"]
TURN_KEYS = ["role", "content", "from", "value", "tool_calls", "function_call", "reasoning_content"]
TURN_KEYS += ["weight", "name", "tool_call_id"]
ROLES = ["user", "human", "assistant", "gpt", "system", "tool", "function_call", "observation", "x"]
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
values = st.one_of(json_values, st.sampled_from([CALL, [CALL], json.dumps(CALL["function"])]))
turns = st.one_of(
    json_values,
    st.dictionaries(st.sampled_from(TURN_KEYS), values, max_size=5),
    st.builds(lambda r, c: {"role": r, "content": c}, st.sampled_from(ROLES), values),
    st.builds(lambda r, c: {"from": r, "value": c}, st.sampled_from(ROLES), texts),
)
records = st.one_of(
    json_values,
    st.dictionaries(
        st.sampled_from(KEYS), st.one_of(json_values, st.lists(turns, max_size=4)), max_size=5
    ),
    st.builds(lambda t: {"messages": t}, st.lists(turns, max_size=5)),
    st.builds(in_format, conversations(), st.integers(0, 2)),
)


def check_all_accounted_for(path: Path, tokenizer: Any = QWEN) -> None:
    """Read = scored + skipped, each once and in order, whatever the file holds."""
    source = open_source(str(path))
    read = list(source.records())
    assert [record.row for record in read] == list(range(source.count()))
    try:
        items = list(tokenize_data([str(path)], tokenizer, 500))
    except DataError as error:  # nothing in it is a conversation
        assert "holds no conversations" in str(error)  # noqa: PT017
        items = list(read_conversations([source]))
        assert all(isinstance(item, Skipped) for item in items)
    assert list(dict.fromkeys(item.origin.row for item in items)) == list(range(len(read)))
    for item in items:
        if isinstance(item, Skipped):
            assert item.reason
            item.reason.encode()
        elif isinstance(item, TokenizedConversation):
            assert item.loss_mask.any()
            assert not item.loss_mask[0]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(records, min_size=1, max_size=5), st.booleans())
def test_every_record_comes_out_once(values: list[Any], as_array: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("d.json" if as_array else "d.jsonl")
        text = json.dumps(values) if as_array else "".join(json.dumps(v) + "\n" for v in values)
        path.write_text(text, encoding="utf-8")
        check_all_accounted_for(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.builds(in_format, conversations(), st.integers(0, 2)), min_size=1, max_size=4),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 5000), st.binary(max_size=3)), max_size=3),
    st.integers(0, 5000),
)
def test_a_damaged_file_is_read_to_its_end(
    values: list[Any], as_array: bool, damage: list[tuple[int, bytes]], cut: int
) -> None:
    """Bytes overwritten anywhere, and the end cut off."""
    text = (
        json.dumps(values, indent=1) if as_array else "".join(json.dumps(v) + "\n" for v in values)
    )
    content = bytearray(text.encode())
    for place, replacement in damage:
        at = place % len(content)
        content[at : at + len(replacement)] = replacement
    del content[max(1, len(content) - cut % len(content)) :]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "d.json"
        path.write_bytes(content)
        try:
            open_source(str(path))
        except DataError:  # nothing of it is left to be recognised
            return
        check_all_accounted_for(path)
