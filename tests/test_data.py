"""What data/ promises."""

import json
from pathlib import Path
from typing import Any

from conftest import byte_tokenizer

from sfdd.conversations.conversation import TokenizedConversation
from sfdd.conversations.pipeline import tokenize_data

DATA = Path(__file__).parent.parent / "data"


def records(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def test_at_least_240_conversations_in_both_formats() -> None:
    sharegpt, openai = records("chat_sharegpt.jsonl"), records("chat_openai.jsonl")
    assert all(turn.keys() == {"from", "value"} for r in sharegpt for turn in r["conversations"])
    assert all(turn.keys() == {"role", "content"} for r in openai for turn in r["messages"])
    assert len(sharegpt) + len(openai) >= 240
    assert min(len(sharegpt), len(openai)) >= 100
    ids = [record["id"] for record in sharegpt + openai]
    assert len(set(ids)) == len(ids)
    assert {record["sampling"] for record in sharegpt + openai} == {"greedy", "temperature-1"}
    assert sum(len(r["messages"]) > 3 for r in openai) >= 20  # several turns


def test_every_conversation_can_be_scored() -> None:
    names = [str(DATA / name) for name in ("chat_sharegpt.jsonl", "chat_openai.jsonl")]
    items = list(tokenize_data(names, byte_tokenizer(), max_length=100_000))
    assert all(isinstance(item, TokenizedConversation) for item in items)


def test_evaluation_prompts_are_held_out() -> None:
    used = {turn for prompt in records("prompts.jsonl") for turn in prompt["turns"]}
    held_out = [prompt["turns"][0] for prompt in records("eval_prompts.jsonl")]
    assert len(held_out) >= 40
    assert not used.intersection(held_out)
