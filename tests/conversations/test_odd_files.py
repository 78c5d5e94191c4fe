"""Chat files as they are found in the wild: what is read, scored and skipped of each, and why.

The files are other people's and not part of this repository; without them these tests are skipped.
"""

from collections import Counter
from pathlib import Path

import pytest
from conversations.templates import family_tokenizer

from sfdd.conversations.config import MaskConfig
from sfdd.conversations.conversation import Skipped, TokenizedConversation
from sfdd.conversations.pipeline import open_sources, tokenize_data
from sfdd.errors import DataError

FOLDER = Path(__file__).parents[3] / "shared" / "odd"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the odd files are not here")

DROP = MaskConfig(reasoning="drop")
NO_THOUGHT = (
    "unsupported: the chat template writes no reasoning; leave it out with --reasoning drop"
)
NO_CALLS = "unsupported: the chat template writes no tool calls"
BROKEN_CALL = (
    "invalid_tool: the arguments of a call in turn 5: not JSON "
    "(Unterminated string starting at: line 2 column 15 (char 57))"
)
IMAGE = "unsupported: image_url part in turn 1"
EMPTY = "empty_conversation: every assistant turn is empty"

# file, template, records read, samples of the scored ones, skipped by reason
READ = [
    ("01_single_object_sharegpt.json", "qwen2.5", 1, 1, {}),
    ("01_single_object_sharegpt.json", "qwen3", 1, 6, {}),  # six answers, history rewritten
    ("03_sharegpt_system.json", "qwen2.5", 1, 1, {}),
    ("03_sharegpt_system.json", "gemma", 1, 0, {"template_error: System role not supported": 1}),
    ("05_sharegpt_toolcalls.json", "qwen2.5", 300, 300, {}),
    ("05_sharegpt_toolcalls.json", "llama3", 300, 300, {}),
    ("05_sharegpt_toolcalls.json", "chatml", 300, 147, {NO_CALLS: 153}),
    ("06_content_parts_loss_weight.jsonl", "qwen2.5", 500, 500, {}),
    ("07_reasoning_tool_parts.jsonl", "qwen3", 50, 106, {}),
    ("07_reasoning_tool_parts.jsonl", "qwen2.5", 50, 0, {NO_THOUGHT: 50}),
    ("08_multimodal_parts.jsonl", "qwen2.5", 24, 0, {IMAGE: 24}),
    ("09_alpaca_chinese.json", "qwen2.5", 1000, 1000, {}),
    ("10_alpaca_placeholders.json", "qwen2.5", 91, 91, {}),
    ("11_conversations_key_openai_roles.jsonl", "qwen2.5", 1, 0, {BROKEN_CALL: 1}),
    ("20_turkish_messages.parquet", "qwen2.5", 525, 525, {}),
    ("21_turkish_messages.jsonl", "qwen2.5", 60, 60, {}),
    ("22_prompt_response.parquet", "qwen2.5", 48, 48, {}),
    ("24_chatml_jsonl_multilingual.jsonl", "qwen2.5", 4, 4, {}),
    ("27_gpteacher_toolformer.json", "qwen2.5", 120, 120, {}),
    ("29_alpaca_cot_meta.jsonl", "qwen2.5", 11, 10, {EMPTY: 1}),
    ("32_issue_null_content.json", "qwen2.5", 1, 1, {}),
    ("33_bom_crlf_blank_lines.jsonl", "qwen2.5", 12, 12, {}),
    ("35_messages.jsonl.gz", "qwen2.5", 60, 60, {}),
]


@pytest.mark.parametrize(("name", "family", "read", "samples", "skipped"), READ)
def test_what_is_read(
    name: str, family: str, read: int, samples: int, skipped: dict[str, int]
) -> None:
    path = str(FOLDER / name)
    items = list(tokenize_data([path], family_tokenizer(family), 1_000_000))
    reasons = Counter(item.reason for item in items if isinstance(item, Skipped))
    assert reasons == skipped
    assert len(items) - reasons.total() == samples
    assert list(dict.fromkeys(item.origin.row for item in items)) == list(range(read))
    (source,) = open_sources([path])
    assert source.count() == read


@pytest.mark.parametrize(
    ("name", "looks"),
    [
        ("04_preference_pairs.json", "its first record is a preference pair (chosen, rejected)"),
        ("13_raw_chatml.txt", "looks like rendered chat-template text"),
        (
            "18_flat_messages_parent_ids.json",
            "its first record is a single message linked to others by parent_message_id",
        ),
        ("25_dict_of_conversations.json", "its first record is an object whose values are"),
    ],
)
def test_what_is_refused(name: str, looks: str) -> None:
    with pytest.raises(DataError) as error:
        open_sources([str(FOLDER / name)])
    assert looks in str(error.value)
    assert name in str(error.value)


def supervised(name: str, row: int, family: str, config: MaskConfig = MaskConfig()) -> list[str]:
    tokenizer = family_tokenizer(family)
    return [
        tokenizer.decode(item.input_ids[item.loss_mask])
        for item in tokenize_data([str(FOLDER / name)], tokenizer, 1_000_000, config)
        if item.origin.row == row and isinstance(item, TokenizedConversation)
    ]


def test_what_is_supervised() -> None:
    assert supervised("03_sharegpt_system.json", 0, "qwen2.5") == [
        "The meaning of life is 42.<|im_end|>I agree.<|im_end|>"
    ]
    assert supervised("32_issue_null_content.json", 0, "qwen2.5") == [
        '<tool_call>\n{"name": "get_secret_number", "arguments": {}}\n</tool_call><|im_end|>'
    ]
    assert supervised("33_bom_crlf_blank_lines.jsonl", 0, "chatml") == [
        "Hello! I am {{name}}, an AI assistant developed by {{author}}. "
        "How can I assist you today?<|im_end|>"
    ]
    assert supervised("22_prompt_response.parquet", 0, "llama3") == [
        "ShellMaster Unix: nmap -sP 192.168.1.0/24<|eot_id|>"
    ]


def test_thoughts_kept_and_dropped() -> None:
    (kept,) = supervised("07_reasoning_tool_parts.jsonl", 0, "qwen3")
    (dropped,) = supervised("07_reasoning_tool_parts.jsonl", 0, "qwen3", DROP)
    assert kept.startswith("<think>\nOkay, the user is asking for schools near latitude 40")
    assert kept.endswith(f"\n</think>\n\n{dropped}")
    assert "<think>" not in dropped


def test_the_same_records_compressed_or_not() -> None:
    contents = [
        [item.content_hash for item in tokenize_data([str(FOLDER / name)], tokenizer, 1000)]
        for tokenizer in [family_tokenizer("chatml")]
        for name in ("21_turkish_messages.jsonl", "35_messages.jsonl.gz")
    ]
    assert contents[0] == contents[1]
