"""The target's chat template, called as its users call it.

Templates differ in what they can write: tool calls with arguments as objects or as text, reasoning under
a key or inside the content, or none of it. What a template can do is found by asking it, once, with a
small conversation of ours; a record that needs more is skipped rather than rendered without.
"""

import json
import re
from collections.abc import Sequence
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

from sfdd.conversations.conversation import SkipReason
from sfdd.conversations.messages import SkipRecordError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message: TypeAlias = dict[str, Any]

# Llama 3 templates write a date into every prompt, today's unless told: scores would change overnight.
# This is the date they fall back to themselves.
_ARGUMENTS = {"date_string": "26 Jul 2024"}
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# A thought at the start of an answer, and the blank lines behind it.
_THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)
_THOUGHT_WITHOUT_START = re.compile(r".*?</think>\s*", re.DOTALL)

_USER: Message = {"role": "user", "content": "?"}
_PROBE, _PROBE_VALUE = "sfddprobe", "sfddvalue"
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
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **_ARGUMENTS,
            )
        except Exception as error:  # whatever a template raises concerns this record alone
            raise SkipRecordError(SkipReason.TEMPLATE_ERROR, str(error)) from error

    @cached_property
    def marks_generation(self) -> bool:
        """Whether the template says itself what is generated, by `{% generation %}`."""
        return bool(_GENERATION.search(self._source))

    def generation_spans(
        self, messages: Sequence[Message], tools: Sequence[Message]
    ) -> list[tuple[int, int]]:
        """Begin and end of everything in the text that the template marks as generated."""
        from transformers.utils.chat_template_utils import render_jinja_template

        _, spans = render_jinja_template(
            conversations=[list(messages)],
            tools=list(tools) or None,
            chat_template=self._tokenizer.get_chat_template(None, list(tools) or None),
            return_assistant_tokens_mask=True,
            **{**self._tokenizer.special_tokens_map, **_ARGUMENTS},
        )
        return [span for span in spans[0] if span[0] < span[1]]

    def adapt(self, messages: Sequence[Message], reasoning: str) -> tuple[Message, ...]:
        """Messages in the form that this template takes.

        Args:
            reasoning: `drop` leaves the reasoning out; otherwise it is there for the template.

        Raises:
            SkipRecordError: the template cannot write what a message holds.
        """
        return tuple(self._adapt(message, reasoning) for message in messages)

    def _adapt(self, message: Message, reasoning: str) -> Message:
        if message["role"] == "developer" and "developer" not in self._source:
            return {**message, "role": "system"}
        if message["role"] != "assistant":
            return message
        if reasoning == "drop":
            said = message["content"].removeprefix(self.thought(message))
            message = {k: v for k, v in message.items() if k != "reasoning_content"}
            message |= {"content": said}
        elif "reasoning_content" in message and not self._writes_reasoning_key:
            message = self._with_inline_thought(message)
        if message.get("tool_calls"):
            message = self._with_calls(message)
        return message

    def thought(self, message: Message) -> str:
        """The reasoning of an answer, under its key or at the start of the content, or ""."""
        if message.get("reasoning_content"):
            return message["reasoning_content"]
        content = message["content"] or ""
        match = _THOUGHT.match(content)
        if not match and self.opens_thought:
            match = _THOUGHT_WITHOUT_START.match(content)
        return match.group() if match else ""

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
        if "think" not in self._source:
            raise SkipRecordError(
                SkipReason.UNSUPPORTED,
                "the chat template writes no reasoning; leave it out with --reasoning drop",
            )
        return with_inline_thought(message)

    def _with_calls(self, message: Message) -> Message:
        if self._call_form is None:
            raise SkipRecordError(SkipReason.UNSUPPORTED, "the chat template writes no tool calls")
        return _in_form(message, *self._call_form)

    @cached_property
    def _call_form(self) -> tuple[bool, bool] | None:
        """How the template takes calls: arguments as text? empty content left out? None: not at all."""
        function = {"name": _PROBE, "arguments": {"argument": _PROBE_VALUE}}
        call = {"id": "call00001", "type": "function", "function": function}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        for form in product((False, True), (False, True)):
            text = self._try([_USER, _in_form(message, *form)], tools=[_TOOL])
            # In single quotes it is Python's spelling of an object: this template wants it as text.
            if _PROBE_VALUE in text and f"'{_PROBE_VALUE}'" not in text:
                return form
        return None

    def _try(self, messages: Sequence[Message], **options: Any) -> str:
        try:
            return self.render(messages, **options)
        except SkipRecordError:
            return ""


def with_inline_thought(message: Message) -> Message:
    """The reasoning under a key written into the content, as reasoning models say it."""
    if "reasoning_content" not in message:
        return message
    thought = f"<think>\n{message['reasoning_content']}\n</think>\n\n"
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**rest, "content": thought + message["content"]}


def _in_form(message: Message, as_text: bool, without_content: bool) -> Message:
    """A message with tool calls, in the form that some template takes."""
    if as_text:
        calls = [
            {**call, "function": {**(f := call["function"]), "arguments": _json(f["arguments"])}}
            for call in message["tool_calls"]
        ]
        message = {**message, "tool_calls": calls}
    if without_content and not message["content"]:
        message = {**message, "content": None}
    return message


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
