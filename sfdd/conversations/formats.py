"""What a record means: ShareGPT (`conversations`, from/value) and OpenAI (`messages`, role/content)."""

from typing import Any

from sfdd.conversations.conversation import SkipReason

_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
}
_LIST_KEYS = ("messages", "conversations")
_ROLE_AND_CONTENT_KEYS = (("role", "content"), ("from", "value"))
_ID_KEYS = ("id", "conversation_id")
# Templates render these, too; without them the target would see another conversation.
_RECORD_EXTRAS = ("tools", "functions")
_TURN_EXTRAS = ("tool_calls", "function_call", "reasoning_content", "reasoning")
RECORD_KEYS = (*_LIST_KEYS, *_ID_KEYS, *_RECORD_EXTRAS)  # all that is ever read of a record


class SkipRecordError(Exception):
    """Raised inside the reader for a record that cannot be used; becomes its skip reason."""

    def __init__(self, reason: SkipReason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))


def record_id(value: Any) -> str:
    """The record's own id, or ""."""
    if isinstance(value, dict):
        for key in _ID_KEYS:
            if isinstance(value.get(key), str | int) and value[key] != "":
                return str(value[key])
    return ""


def read_messages(value: Any) -> tuple[dict[str, str], ...]:
    """The messages of a record, with the roles system, user and assistant.

    Raises:
        SkipRecordError: it is no conversation, has a role or content sfdd does not know, or nothing to
            supervise.
    """
    messages = tuple(_message(number, turn) for number, turn in enumerate(_turns(value), start=1))
    if not messages:
        raise SkipRecordError(SkipReason.EMPTY)
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    if not answers:
        raise SkipRecordError(SkipReason.NO_ASSISTANT)
    if not any(answer.strip() for answer in answers):
        raise SkipRecordError(SkipReason.EMPTY, "every assistant turn is empty")
    return messages


def _turns(value: Any) -> list[Any]:
    if not isinstance(value, dict):
        raise SkipRecordError(
            SkipReason.NOT_A_CONVERSATION, f"a JSON {_kind(value)} instead of an object"
        )
    for key in _LIST_KEYS:
        if isinstance(value.get(key), list):
            _refuse_extras(value, _RECORD_EXTRAS, "the record")
            return value[key]
    keys = ", ".join(map(str, list(value)[:6])) or "nothing"
    raise SkipRecordError(
        SkipReason.NOT_A_CONVERSATION, f"no list under {' or '.join(_LIST_KEYS)}; it has {keys}"
    )


def _message(number: int, turn: Any) -> dict[str, str]:
    for role_key, content_key in _ROLE_AND_CONTENT_KEYS:
        if isinstance(turn, dict) and role_key in turn and content_key in turn:
            role, content = turn[role_key], turn[content_key]
            break
    else:
        raise SkipRecordError(
            SkipReason.NOT_A_CONVERSATION, f"turn {number} has neither role/content nor from/value"
        )
    _refuse_extras(turn, _TURN_EXTRAS, f"turn {number}")
    if not isinstance(role, str) or role.lower() not in _ROLES:
        raise SkipRecordError(SkipReason.UNKNOWN_ROLE, f"{role!r} in turn {number}")
    if not isinstance(content, str):
        raise SkipRecordError(
            SkipReason.NOT_A_CONVERSATION,
            f"content of turn {number} is a {_kind(content)}, not text",
        )
    if not is_unicode(content):
        raise SkipRecordError(SkipReason.UNREADABLE, f"turn {number} is not valid Unicode")
    return {"role": _ROLES[role.lower()], "content": content}


def _refuse_extras(value: dict[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key in keys:
        if value.get(key):
            raise SkipRecordError(SkipReason.UNSUPPORTED, f"{key} in {where}")


def is_unicode(text: str) -> bool:
    """False for a string with half of a surrogate pair, which JSON can write and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    kinds = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")
