"""What a record means: which of the known formats it has, and its conversation in the target's terms.

A record is taken for what it is only where that is certain; anything else is skipped with a sentence that
says what it looks like. Nothing of a record but its id, turns, tools and system prompt is ever read, so
no column of a data set can become an argument of the chat template.
"""

from dataclasses import dataclass
from typing import Any

from sfdd.conversations.config import Format
from sfdd.conversations.conversation import SkipReason
from sfdd.conversations.messages import SkipRecordError, kind_of, read_tools, read_turns

_LIST_KEYS = ("messages", "conversations", "conversation")
_PROMPT_KEYS = ("prompt",)
_RESPONSE_KEYS = ("response", "completion")
_INSTRUCTION_KEYS = ("instruction",)
_INPUT_KEYS = ("input", "context")
_OUTPUT_KEYS = ("output", "response")
_SYSTEM_KEYS = ("system", "system_prompt")
_TOOLS_KEYS = ("tools", "functions")
_TOKEN_KEYS = ("input_ids", "loss_mask")
_ID_KEYS = ("id", "conversation_id")
# All that is ever read of a record.
RECORD_KEYS = tuple(
    sorted(
        {*_LIST_KEYS, *_PROMPT_KEYS, *_RESPONSE_KEYS, *_INSTRUCTION_KEYS, *_INPUT_KEYS, "history"}
        | {*_OUTPUT_KEYS, *_SYSTEM_KEYS, *_TOOLS_KEYS, *_TOKEN_KEYS, *_ID_KEYS}
        | {"label", "chosen", "rejected"}  # say that it is something else
    )
)


@dataclass(frozen=True)
class Content:
    """What a record says.

    Attributes:
        messages: of `role` and `content`, and where there are any `reasoning_content`, `tool_calls`,
            `tool_call_id`, `name`; empty for tokenized records.
        tools: the functions the target may call, as JSON schemas.
        muted: positions of the assistant turns that the record says are not to be learned.
        tokens: input_ids and loss_mask of a tokenized record.
    """

    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    muted: frozenset[int] = frozenset()
    tokens: tuple[list[int], list[int]] | None = None


def format_of(value: Any) -> Format | None:
    """The format of a record, or None for a record of no known format."""
    if not isinstance(value, dict):
        return None
    if all(isinstance(value.get(key), list) for key in _TOKEN_KEYS):
        return Format.TOKENIZED
    if key := _list_key(value):
        turns = value[key]
        first = turns[0] if turns and isinstance(turns[0], dict) else {}
        if "role" in first or (key == "messages" and "from" not in first):
            return Format.OPENAI
        return Format.SHAREGPT
    if isinstance(value.get("label"), bool):
        return None  # an answer with a verdict on it
    if _first(value, _PROMPT_KEYS) is not None and _first(value, _RESPONSE_KEYS) is not None:
        return Format.PROMPT_RESPONSE
    if _first(value, _INSTRUCTION_KEYS) is not None and _first(value, _OUTPUT_KEYS) is not None:
        return Format.ALPACA
    return None


def record_id(value: Any) -> str:
    """The record's own id, or ""."""
    if isinstance(value, dict):
        for key in _ID_KEYS:
            if isinstance(value.get(key), str | int) and value[key] != "":
                return str(value[key])
    return ""


def read_content(value: Any, wanted: Format | None = None) -> Content:
    """The conversation of a record.

    Args:
        wanted: read the record as this format alone; None takes it for what it is.

    Raises:
        SkipRecordError: it is no conversation, has a role or content sfdd does not know, or nothing to
            supervise.
    """
    format = _checked_format(value, wanted)
    _refuse_answers_beside_the_turns(value)
    if format is Format.TOKENIZED:
        return Content(tokens=tuple(_integers(value[key], key) for key in _TOKEN_KEYS))  # type: ignore[arg-type]
    messages, muted = read_turns(_turns(value, format))
    if not messages:
        raise SkipRecordError(SkipReason.EMPTY)
    answers = [m for m in messages if m["role"] == "assistant"]
    if not answers:
        raise SkipRecordError(SkipReason.NO_ASSISTANT)
    said = ("content", "tool_calls", "reasoning_content")
    if not any(isinstance(m.get(k), list) or m.get(k, "").strip() for m in answers for k in said):
        raise SkipRecordError(SkipReason.EMPTY, "every assistant turn is empty")
    tools = next((value[key] for key in _TOOLS_KEYS if value.get(key)), None)
    return Content(messages, read_tools(tools), muted)


def _checked_format(value: Any, wanted: Format | None) -> Format:
    if not isinstance(value, dict):
        raise SkipRecordError(
            SkipReason.NOT_A_CONVERSATION, f"a JSON {kind_of(value)} instead of an object"
        )
    format = format_of(value)
    if wanted and wanted is not format and _can_be(value, wanted):
        return wanted
    if format is None or (wanted and wanted is not format):
        looks = looks_like(value)
        raise SkipRecordError(
            SkipReason.NOT_A_CONVERSATION,
            f"not {wanted}; it has {_keys(value)}" if wanted else f"it looks like {looks}",
        )
    return format


def _refuse_answers_beside_the_turns(value: dict[str, Any]) -> None:
    """Turns that stop before an answer, which stands beside them: the one to learn is not among them."""
    turns = value[key] if (key := _list_key(value)) else []
    last = turns[-1] if turns and isinstance(turns[-1], dict) else {}
    said = ("response", "completion", "output", "chosen", "rejected")
    beside = [key for key in said if value.get(key)]
    if beside and str(last.get("role", last.get("from"))).lower() in ("user", "human"):
        raise SkipRecordError(
            SkipReason.NOT_A_CONVERSATION,
            f"the turns end with a question, and answers stand beside them ({', '.join(beside)})",
        )


def _list_key(value: dict[str, Any]) -> str | None:
    """Where the turns are: the first list that is not empty, else the first list."""
    lists = [key for key in _LIST_KEYS if isinstance(value.get(key), list)]
    return next((key for key in lists if value[key]), lists[0] if lists else None)


def _can_be(value: dict[str, Any], wanted: Format) -> bool:
    """Whether a record that has a format can be read as another: it may hold both."""
    others = {
        Format.TOKENIZED: (_TOKEN_KEYS,),
        Format.PROMPT_RESPONSE: (_PROMPT_KEYS, _RESPONSE_KEYS),
        Format.ALPACA: (_INSTRUCTION_KEYS, _OUTPUT_KEYS),
    }
    if wanted not in others:
        without = {key: v for key, v in value.items() if key not in _TOKEN_KEYS}
        return format_of(without) is wanted
    if wanted is Format.TOKENIZED:
        return False  # it would have been recognised as that before anything else
    return all(_first(value, keys) is not None for keys in others[wanted])


def looks_like(value: Any) -> str:
    """What a record of no known format seems to be, in words."""
    if not isinstance(value, dict):
        return f"a JSON {kind_of(value)}"
    if "chosen" in value and "rejected" in value:
        return "a preference pair (chosen, rejected)"
    if isinstance(value.get("label"), bool) and _first(value, _RESPONSE_KEYS) is not None:
        return "an answer with a verdict on it (label)"
    for key in _LIST_KEYS:
        if isinstance(value.get(key), str):
            return f"turns written as one text ({key})"
    prompt = value.get("prompt")
    if "replies" in value or (isinstance(prompt, dict) and "replies" in prompt):
        return "a message tree (replies)"
    if isinstance(value.get("mapping"), dict):
        return "a message tree (mapping)"
    links = [key for key in value if isinstance(key, str) and key.startswith("parent")]
    if links:
        return f"a single message linked to others by {links[0]}"
    if {"role", "content"} <= value.keys() or {"from", "value"} <= value.keys():
        return "a single message, not a list of them"
    conversations = [key for key, v in value.items() if format_of(v) is not None]
    if conversations and len(conversations) == len(value):
        return f"an object whose values are conversations ({_keys(value)}), not a list of them"
    if isinstance(value.get("text"), str) and not any(isinstance(v, list) for v in value.values()):
        return f"plain text without turns; it has {_keys(value)}"
    return f"none of the formats; it has {_keys(value)}"


def _turns(value: dict[str, Any], format: Format) -> list[Any]:
    """The turns of a record, each with a role and content of some spelling."""
    system_keys: tuple[str, ...] = _SYSTEM_KEYS
    if format is Format.PROMPT_RESPONSE:
        turns = [
            *_history(value),
            *_as_turns("user", _first(value, _PROMPT_KEYS)),
            *_as_turns("assistant", _first(value, _RESPONSE_KEYS)),
        ]
    elif format is Format.ALPACA:
        turns = _alpaca_turns(value)
    else:
        turns = value[_list_key(value) or ""]
        system_keys = ("system",)
    system = _first(value, system_keys)
    if system and not _begins_with_system(turns):
        return [{"role": "system", "content": system}, *turns]
    return turns


def _alpaca_turns(value: dict[str, Any]) -> list[Any]:
    """Instruction and input are one user turn, a line apart; `history` holds earlier pairs."""
    instruction = _first(value, _INSTRUCTION_KEYS)
    given = next((value[key] for key in _INPUT_KEYS if value.get(key)), "")
    if not isinstance(given, str):
        raise SkipRecordError(
            SkipReason.NOT_A_CONVERSATION, f"the input is a {kind_of(given)}, not text"
        )
    if given.strip() and isinstance(instruction, str):
        instruction = f"{instruction}\n{given}" if instruction else given
    return [
        *_history(value),
        *_as_turns("user", instruction),
        *_as_turns("assistant", _first(value, _OUTPUT_KEYS)),
    ]


def _history(value: dict[str, Any]) -> list[Any]:
    """The turns of earlier question and answer pairs."""
    pairs = value.get("history") or []
    if not isinstance(pairs, list) or not all(isinstance(p, list) and len(p) == 2 for p in pairs):
        raise SkipRecordError(SkipReason.NOT_A_CONVERSATION, "history is not a list of pairs")
    return [
        turn
        for question, answer in pairs
        for turn in (*_as_turns("user", question), *_as_turns("assistant", answer))
    ]


def _as_turns(role: str, said: Any) -> list[Any]:
    """A text as one turn; a list of turns as it is."""
    if isinstance(said, list) and said and all(isinstance(turn, dict) for turn in said):
        return said
    return [{"role": role, "content": said}]


def _begins_with_system(turns: list[Any]) -> bool:
    first = turns[0] if turns else None
    return isinstance(first, dict) and "system" in (first.get("role"), first.get("from"))


def _integers(values: list[Any], key: str) -> list[int]:
    for i, value in enumerate(values):
        if not isinstance(value, int):
            raise SkipRecordError(
                SkipReason.NOT_A_CONVERSATION, f"{key}[{i}] is {value!r}, not a whole number"
            )
    return values


def _first(value: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """The first value under any of some keys that is not null."""
    return next((value[key] for key in keys if value.get(key) is not None), None)


def _keys(value: dict[str, Any]) -> str:
    return ", ".join(map(str, list(value)[:6])) or "nothing"
