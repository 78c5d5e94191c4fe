"""The target's chat template, called as its users call it.

Templates differ in what they can write: tool calls with arguments as objects or as text, reasoning under
a key or inside the content, or none of it. What a template can do is found by asking it, once, with a
small conversation of ours; a record that needs more is skipped rather than rendered without.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

from sfdd.conversations.conversation import SkipReason
from sfdd.conversations.messages import SkipRecordError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message: TypeAlias = dict[str, Any]

# Some templates write a date into every prompt, today's unless told: scores would change overnight, and
# no training could be continued. This is the date that Llama 3's fall back to themselves.
_DATE = date(2024, 7, 26)
_ARGUMENTS = {"date_string": _DATE.strftime("%d %b %Y")}
# What others call to write it. Functions cannot be handed to a template; it can define its own.
_CLOCK = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f"|replace('%{d}', '{_DATE:%{d}}')" for d in "aAbBcdHIjmMpSUwWxXyYZ")
    + " }}{% endmacro +%}"
)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# A thought at the start of an answer, and the blank lines behind it.
_THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)
_THOUGHT_WITHOUT_START = re.compile(r".*?</think>\s*", re.DOTALL)

_USER: Message = {"role": "user", "content": "?"}
_PROBE, _PROBE_VALUE, _SECOND_VALUE = "sfddprobe", "sfddvalue", "sfddsecond"
_PROBE_CONTENT = "sfddcontent"
_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": "?",
        "parameters": {"type": "object", "properties": {_PROBE: {"type": "string"}}},
    },
}


class ChatTemplate:
    """Messages -> text, and what the template can write."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        templates = tokenizer.chat_template
        self._source = templates if isinstance(templates, str) else json.dumps(templates)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        add_generation_prompt: bool = False,
    ) -> str:
        """The text of some messages.

        Raises:
            SkipRecordError: the template objects to them; the reason holds its own words.
        """
        if not messages:
            raise SkipRecordError(SkipReason.ASSISTANT_FIRST)
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                chat_template=self._timeless(tools),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **_ARGUMENTS,
            )
        except Exception as error:  # whatever a template raises concerns this record alone
            raise _objection(error) from error

    def _timeless(self, tools: Sequence[Message]) -> str:
        """The template for these tools, with a clock that stands still."""
        template: str = self._tokenizer.get_chat_template(None, list(tools) or None)
        return _CLOCK + template if "strftime_now" in template else template

    @cached_property
    def marks_generation(self) -> bool:
        """Whether the template says itself what is generated, by `{% generation %}`."""
        return bool(_GENERATION.search(self._source))

    def generation_spans(
        self, messages: Sequence[Message], tools: Sequence[Message]
    ) -> list[tuple[int, int]]:
        """Begin and end of everything in the text that the template marks as generated."""
        from transformers.utils.chat_template_utils import render_jinja_template

        # What `apply_chat_template` does before it calls the same function.
        present = [{k: v for k, v in m.items() if v is not None} for m in messages]
        try:
            _, spans = render_jinja_template(
                conversations=[present],
                tools=list(tools) or None,
                chat_template=self._timeless(tools),
                return_assistant_tokens_mask=True,
                **{**self._tokenizer.special_tokens_map, **_ARGUMENTS},
            )
        except Exception as error:
            raise _objection(error) from error
        return [span for span in spans[0] if span[0] < span[1]]

    def adapt(
        self, messages: Sequence[Message], reasoning: str, has_tools: bool = False
    ) -> tuple[Message, ...]:
        """Messages in the form that this template takes.

        Args:
            reasoning: `drop` leaves the reasoning out; otherwise it is there for the template.
            has_tools: the conversation comes with tools; some tokenizers have a template for these.

        Raises:
            SkipRecordError: the template cannot write what a message holds.
        """
        return tuple(self._adapt(message, reasoning, has_tools) for message in messages)

    def _adapt(self, message: Message, reasoning: str, has_tools: bool) -> Message:
        if message["role"] == "developer" and "developer" not in self._source:
            return {**message, "role": "system"}
        if message["role"] != "assistant":
            return message
        message = with_reasoning_heeded(message, self._inline_thought(message), reasoning)
        if message.get("reasoning_content") and not self._writes_reasoning_key:
            message = self._with_inline_thought(message)
        if message.get("tool_calls"):
            message = self._calls[has_tools].write(message)
        return message

    def thought(self, message: Message) -> str:
        """The reasoning of an answer, under its key or at the start of the content, or ""."""
        return message.get("reasoning_content") or self._inline_thought(message)

    def _inline_thought(self, message: Message) -> str:
        content = message["content"] or ""
        match = self.opens_thought and _THOUGHT_WITHOUT_START.match(content)
        return inline_thought(content) or (match.group() if match else "")

    @cached_property
    def opens_thought(self) -> bool:
        """Whether the prompt itself begins the target's thought."""
        return self._try([_USER], add_generation_prompt=True).rstrip().endswith("<think>")

    @cached_property
    def writes_prompt(self) -> bool:
        """Whether the template heeds `add_generation_prompt`."""
        without, with_prompt = self._try([_USER]), self._try([_USER], add_generation_prompt=True)
        return len(with_prompt) > len(without) or not without.startswith(with_prompt)

    @cached_property
    def _writes_reasoning_key(self) -> bool:
        answer = {"role": "assistant", "content": "?", "reasoning_content": _PROBE}
        return _PROBE in self._try([_USER, answer])

    def _with_inline_thought(self, message: Message) -> Message:
        if "</think>" not in self._source:
            raise SkipRecordError(
                SkipReason.UNSUPPORTED,
                "the chat template writes no reasoning; leave it out with --reasoning drop",
            )
        return with_inline_thought(message)

    @cached_property
    def _calls(self) -> dict[bool, "_CallForm"]:
        """How the template takes tool calls, without and with tools in the conversation."""
        return {has_tools: self._call_form(has_tools) for has_tools in (False, True)}

    def _call_form(self, has_tools: bool) -> "_CallForm":
        call = _probe_call(_PROBE_VALUE)
        for as_text, without_content in product((False, True), (False, True)):
            form = _CallForm(as_text, without_content)
            text = self._try_calls(form, has_tools, "", call)
            # In single quotes it is Python's spelling of an object: this template wants it as text.
            if _PROBE_VALUE not in text or f"'{_PROBE_VALUE}'" in text:
                continue
            two = self._try_calls(form, has_tools, "", call, _probe_call(_SECOND_VALUE))
            beside = self._try_calls(form, has_tools, _PROBE_CONTENT, call)
            # A template that objects to what it cannot write says so itself, of the record.
            return replace(
                form,
                several=not two or _SECOND_VALUE in two,
                content=not beside or _PROBE_CONTENT in beside,
            )
        return _CallForm(written=False)

    def _try_calls(self, form: "_CallForm", has_tools: bool, content: str, *calls: Message) -> str:
        message = {"role": "assistant", "content": content, "tool_calls": list(calls)}
        return self._try([_USER, form.shape(message)], tools=[_TOOL] if has_tools else [])

    def _try(self, messages: Sequence[Message], **options: Any) -> str:
        try:
            return self.render(messages, **options)
        except SkipRecordError:
            return ""


@dataclass(frozen=True)
class _CallForm:
    """How a template takes tool calls, and what it leaves out silently.

    Attributes:
        as_text: arguments as JSON text instead of an object.
        without_content: an empty content left out.
        written: it writes calls at all.
        several: it writes more than the first of several.
        content: it writes content beside calls.
    """

    as_text: bool = False
    without_content: bool = False
    written: bool = True
    several: bool = True
    content: bool = True

    def write(self, message: Message) -> Message:
        """A message in this form.

        Raises:
            SkipRecordError: some of it would be left out.
        """
        missing = ""
        if not self.written:
            missing = "tool calls"
        elif not self.several and len(message["tool_calls"]) > 1:
            missing = "tool calls but the first of a turn"
        elif not self.content and (message["content"] or "").strip():
            missing = "content beside tool calls"
        if missing:
            raise SkipRecordError(SkipReason.UNSUPPORTED, f"the chat template writes no {missing}")
        return self.shape(message)

    def shape(self, message: Message) -> Message:
        """`write`, unchecked."""
        if self.as_text:
            message = {**message, "tool_calls": [_as_text(c) for c in message["tool_calls"]]}
        if self.without_content and not message["content"]:
            message = {**message, "content": None}
        return message


def _as_text(call: Message) -> Message:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _probe_call(value: str) -> Message:
    function = {"name": _PROBE, "arguments": {"argument": value}}
    return {"id": "call00001", "type": "function", "function": function}


def _objection(error: Exception) -> SkipRecordError:
    return SkipRecordError(SkipReason.TEMPLATE_ERROR, str(error) or type(error).__name__)


def inline_thought(content: str) -> str:
    """The `<think>...</think>` at the start of an answer and the blanks around it, or ""."""
    match = _THOUGHT.match(content)
    return match.group() if match else ""


def with_reasoning_heeded(message: Message, inline: str, reasoning: str) -> Message:
    """An answer without its reasoning where that is to be dropped; elsewhere with it once.

    Args:
        inline: the thought at the start of its content; dropped too where the key says the same.
        reasoning: as in `MaskConfig`.
    """
    key = message.get("reasoning_content", "")
    if reasoning == "drop" or (key and key.strip() in inline):
        message = {**message, "content": (message["content"] or "").removeprefix(inline)}
    dropped = {"reasoning_content"} if reasoning == "drop" else set()
    return {name: value for name, value in message.items() if name not in dropped}


def with_inline_thought(message: Message) -> Message:
    """The reasoning under a key written into the content, as reasoning models say it."""
    if "reasoning_content" not in message:
        return message
    thought = f"<think>\n{message['reasoning_content']}\n</think>\n\n"
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**rest, "content": thought + message["content"]}
