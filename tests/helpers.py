"""Building records and conversations for tests."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from sfdd.conversations.conversation import Origin, TokenizedConversation


def sharegpt(*turns: str, id: str | None = None) -> dict[str, Any]:
    """A ShareGPT record whose turns alternate, beginning with the human."""
    roles = ("human", "gpt")
    record: dict[str, Any] = {"id": id} if id else {}
    record["conversations"] = [
        {"from": roles[i % 2], "value": text} for i, text in enumerate(turns)
    ]
    return record


def openai(*turns: str, id: str | None = None) -> dict[str, Any]:
    """An OpenAI record whose turns alternate, beginning with the user."""
    roles = ("user", "assistant")
    record: dict[str, Any] = {"id": id} if id else {}
    record["messages"] = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return record


def write_jsonl(path: Path, records: Iterable[Any]) -> Path:
    """Records as JSONL; a string is written as it is, so that a line can be broken."""
    lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def random_conversation(
    length: int, first_supervised: int, seed: int, vocab_size: int = 260
) -> TokenizedConversation:
    """Random ids; everything from `first_supervised` on is supervised."""
    ids = np.random.default_rng(seed).integers(3, vocab_size, length).astype(np.int32)
    return TokenizedConversation(
        Origin("random", seed), str(seed), ids, np.arange(length) >= first_supervised
    )
