"""Turns as data sets write them -> messages as chat templates take them (OpenAI's form)."""

import json
from typing import Any

from sfdd.conversations.conversation import SkipReason

_ROLES = {
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("developer",), "developer"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bard", "bing", "model"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),  # an assistant turn that is a call
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
    **dict.fromkeys(("tool_response", "function_response", "ipython"), "tool"),
}
_ROLE_AND_CONTENT_KEYS = (("role", "content"), ("from", "value"))
_CALL_KEYS = ("tool_calls", "function_call")
_ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_WEIGHT_KEYS = ("weight", "loss_weight", "train")  # 0 or false: not to be learned
_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_PARTS = ("reasoning", "thinking")
_CALL_PARTS = ("tool_call", "function_call")


class SkipRecordError(Exception):
    """Raised inside the reader for a record that cannot be used; becomes its skip reason."""

    def __init__(self, reason: SkipReason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))


def read_turns(turns: list[Any]) -> tuple[tuple[dict[str, Any], ...], frozenset[int]]:
    """Messages of some turns, and the positions of assistant turns that are not to be learned.

    Raises:
        SkipRecordError: a turn has a role, content or tool call that sfdd does not know.
    """
    messages = tuple(_message(f"turn {n}", turn) for n, turn in enumerate(turns, start=1))
    muted = (
        i
        for i, turn in enumerate(turns)
        if messages[i]["role"] == "assistant"
        and any(turn.get(key) in (0, False) and turn.get(key) is not None for key in _WEIGHT_KEYS)
    )
    return _with_call_ids(messages), frozenset(muted)


def read_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """The tools of a record, as a list or as JSON text, in the form that templates document."""
    if isinstance(value, str):
        value = _parse(value, "the list of tools") if value.strip() else None
    if not value:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise SkipRecordError(SkipReason.INVALID_TOOL, "the tools are no list of objects")
    _require_unicode(value, "a tool")
    return tuple(
        tool if "function" in tool else {"type": "function", "function": tool} for tool in value
    )


def _message(where: str, turn: Any) -> dict[str, Any]:
    role, content = _role_and_content(where, turn)
    text, reasoning, calls = _read_content(where, content)
    if role == "call":
        calls, text = _calls(_parse(text, f"the call in {where}"), where), ""
    for key in _CALL_KEYS:
        if turn.get(key):
            calls += _calls(turn[key], where)
    for key in _REASONING_KEYS:
        if not reasoning and turn.get(key):
            reasoning = _text(turn[key], f"{key} of {where}")
    message: dict[str, Any] = {"role": "assistant" if role == "call" else role, "content": text}
    if message["role"] == "assistant":
        message |= {"reasoning_content": reasoning} if reasoning.strip() else {}
        message |= {"tool_calls": calls} if calls else {}
    elif calls or reasoning:
        what = "a tool call" if calls else "reasoning"
        raise SkipRecordError(SkipReason.NOT_A_CONVERSATION, f"{what} in {where}, of a {role}")
    if role == "tool":
        message |= {k: turn[k] for k in ("tool_call_id", "name") if isinstance(turn.get(k), str)}
        _require_unicode(message, where)
    return message


def _role_and_content(where: str, turn: Any) -> tuple[str, Any]:
    has_more = isinstance(turn, dict) and any(turn.get(k) for k in (*_CALL_KEYS, *_REASONING_KEYS))
    for role_key, content_key in _ROLE_AND_CONTENT_KEYS:
        if isinstance(turn, dict) and role_key in turn and (content_key in turn or has_more):
            role, content = turn[role_key], turn.get(content_key)
            break
    else:
        raise SkipRecordError(
            SkipReason.NOT_A_CONVERSATION, f"{where} has neither role/content nor from/value"
        )
    if not isinstance(role, str) or role.strip().lower() not in _ROLES:
        raise SkipRecordError(SkipReason.UNKNOWN_ROLE, f"{role!r} in {where}")
    return _ROLES[role.strip().lower()], "" if content is None and has_more else content


def _read_content(where: str, content: Any) -> tuple[str, str, list[dict[str, Any]]]:
    """Text, reasoning and tool calls of a turn's content: a string, or a list of parts."""
    if not isinstance(content, list):
        return _text(content, f"content of {where}"), "", []
    text, reasoning = [], []
    calls: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        said = _part_value(part) if isinstance(part, dict) else None
        if not isinstance(kind, str | None):
            raise SkipRecordError(SkipReason.NOT_A_CONVERSATION, f"type of a part of {where}")
        if kind in _TEXT_PARTS or (kind is None and isinstance(said, str)):
            text.append(_text(said, f"a part of {where}"))
        elif kind in _REASONING_PARTS:
            reasoning.append(_text(said, f"a part of {where}"))
        elif kind in _CALL_PARTS:
            said = _parse(said, f"the call in {where}") if isinstance(said, str) else said
            calls += _calls(said, where)
        else:
            what = f"{kind} part" if isinstance(kind, str) else f"part that is a {kind_of(part)}"
            raise SkipRecordError(SkipReason.UNSUPPORTED, f"{what} in {where}")
    return "".join(text), "".join(reasoning), calls


def _part_value(part: dict[str, Any]) -> Any:
    keys = (part.get("type"), "text", "value", "content")
    return next((part[key] for key in keys if isinstance(key, str) and key in part), None)


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's form, their arguments an object, as templates document them."""
    if isinstance(value, str):
        value = _parse(value, f"the call in {where}")
    return [_call(call, where) for call in (value if isinstance(value, list) else [value])]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise SkipRecordError(SkipReason.INVALID_TOOL, f"a call without a name in {where}")
    if not (keys := [key for key in _ARGUMENT_KEYS if key in function]):
        raise SkipRecordError(SkipReason.INVALID_TOOL, f"a call without arguments in {where}")
    arguments = function[keys[0]]
    if isinstance(arguments, str):
        arguments = _parse(arguments or "{}", f"the arguments of a call in {where}")
    if not isinstance(arguments, dict | None):
        raise SkipRecordError(
            SkipReason.INVALID_TOOL,
            f"the arguments of a call in {where} are a {kind_of(arguments)}, not an object",
        )
    named = {"id": call["id"]} if isinstance(call.get("id"), str) and call["id"] else {}
    function = {"name": function["name"], "arguments": arguments or {}}
    _require_unicode([named, function], f"a call in {where}")
    return {"type": "function", **named, "function": function}


def _with_call_ids(messages: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """Give calls without an id one, and their results the same, in order.

    Some templates (Mistral's) write the ids, nine letters or digits long, and refuse calls without.
    """
    waiting: list[tuple[str, str]] = []  # id and name of calls without a result
    done = []
    number = 0
    for message in messages:
        if calls := message.get("tool_calls"):
            named = []
            for call in calls:
                number += 1
                named.append({"id": f"call{number:05}", **call})
            waiting += [(call["id"], call["function"]["name"]) for call in named]
            message = {**message, "tool_calls": named}
        elif message["role"] == "tool":
            id, name = message.get("tool_call_id"), message.get("name")
            fits = [
                call for call in waiting if call[0] == id or (not id and name in (None, call[1]))
            ]
            if fits:
                waiting.remove(fits[0])
                message = {**message, "tool_call_id": fits[0][0]}
        elif message["role"] == "user":
            waiting = []
        done.append(message)
    return tuple(done)


def _parse(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SkipRecordError(SkipReason.INVALID_TOOL, f"{what}: not JSON ({error})") from error


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise SkipRecordError(
            SkipReason.NOT_A_CONVERSATION, f"{what} is a {kind_of(value)}, not text"
        )
    _require_unicode(value, what)
    return value


def _require_unicode(value: Any, what: str) -> None:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if not is_unicode(text):
        raise SkipRecordError(SkipReason.UNREADABLE, f"{what} is not valid Unicode")


def is_unicode(text: str) -> bool:
    """False for a string with half of a surrogate pair, which JSON can write and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def kind_of(value: Any) -> str:
    """What JSON calls a value's type."""
    kinds = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    kinds |= {int: "number", float: "number"}
    return kinds.get(type(value), type(value).__name__)
