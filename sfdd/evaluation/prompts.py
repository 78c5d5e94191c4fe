"""Reading the prompts: JSONL lines of `{"id", "set", "category", "turns": [user message, ...]}`."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

from sfdd.conversations.messages import is_unicode
from sfdd.errors import DataError


@dataclass(frozen=True)
class Prompt:
    """What the user says, turn by turn; the responses are the target's to give.

    Attributes:
        set: the benchmark it belongs to, by which results are grouped.
        category: the benchmark's own grouping, "" where it has none.
    """

    id: str
    set: str
    category: str
    turns: tuple[str, ...]


def read_prompts(paths: Sequence[Path], limit: int | None = None) -> list[Prompt]:
    """The prompts of some files in order, at most `limit` of each.

    Only `turns` is required: `set` defaults to the file's name, `id` to set and line number. Blank
    lines and other keys are ignored.

    Raises:
        DataError: a file is missing, unreadable or without prompts, or a line is not a prompt.
    """
    return [prompt for path in paths for prompt in _read_file(path, limit)]


def _read_file(path: Path, limit: int | None) -> list[Prompt]:
    try:
        prompts = list(islice(_parse_lines(path), limit))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"Cannot read prompts from {path}: {reason}.") from error
    if not prompts:
        raise DataError(f"{path} holds no prompts. Give one JSON object with 'turns' per line.")
    return prompts


def _parse_lines(path: Path) -> Iterator[Prompt]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _parse(line, path, number)


def _parse(line: str, path: Path, number: int) -> Prompt:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {number} is not JSON: {error}.") from error
    turns = record.get("turns") if isinstance(record, dict) else None
    if not _are_turns(turns):
        raise DataError(
            f"{path}, line {number} is not a prompt: it needs 'turns', a list of one or more "
            "user messages."
        )
    name = str(record.get("set") or path.stem)
    identifier = str(record.get("id") or f"{name}/{number}")
    return Prompt(identifier, name, str(record.get("category") or ""), tuple(turns))


def _are_turns(value: Any) -> TypeGuard[list[str]]:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, str) and turn.strip() and is_unicode(turn) for turn in value)
    )
