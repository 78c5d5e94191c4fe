"""Where in the rendered text an answer of the target stands.

An answer is found by what the template does, not by what the text says: the conversation through an
assistant turn is rendered twice, once with other content in that turn, and where the two texts part and
meet again the content begins and ends. No text is searched for, so a user who quotes the assistant, or
an answer that repeats, cannot move the mask. A template with `{% generation %}` says it itself.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sfdd.conversations.conversation import SkipReason
from sfdd.conversations.messages import SkipRecordError
from sfdd.conversations.template import ChatTemplate, Message, with_inline_thought

# What templates write before an answer that is no part of it: blanks, an empty thought.
_SCAFFOLD = re.compile(r"\s*(<think>\s*</think>\s*)?")
# Stand in for the content of a turn: private characters, of which one is not in the text.
_STAND_INS = tuple(map(chr, range(0xE000, 0xF8FF)))


@dataclass(frozen=True)
class Answer:
    """A conversation through an assistant turn, and the characters of it that the target would generate.

    Attributes:
        begin, end: of all that the answer says.
        spans: begin and end of each stretch that is supervised, in order.
        ends_turn: the end-of-turn token is, too; False where the spans hold it, if it is.
        prompt_end: where in the text the prompt for this turn ends and the target goes on. None where the
            template does not begin the turn with its own prompt.
    """

    text: str
    begin: int
    end: int
    spans: tuple[tuple[int, int], ...]
    ends_turn: bool = True
    prompt_end: int | None = None


def find_answer(
    template: ChatTemplate,
    messages: Sequence[Message],
    turn: int,
    tools: Sequence[Message],
    reasoning: str,
) -> Answer:
    """The answer of an assistant turn, as if the conversation ended with it.

    Args:
        messages: adapted to the template.
        turn: position of an assistant message.
        reasoning: `mask` leaves the thought out of the spans.

    Raises:
        SkipRecordError: the template objects, or leaves out what the answer holds.
    """
    before, message = messages[:turn], messages[turn]
    prompt = template.render(before, tools, add_generation_prompt=True)
    through = template.render(messages[: turn + 1], tools)
    begin, end = _content(template, before, through, tools)
    thought_end = None
    if template.thought(message):
        thought_end = _thought_end(template, before, message, through, tools)
        if thought_end is None:
            return _word_for_word(template, prompt, message, through[end:], reasoning)
    if not through.startswith(prompt):
        return _unprompted(template, before, tools, prompt, through, begin, end)
    written = through[len(prompt) : begin]
    if template.writes_prompt and not _SCAFFOLD.fullmatch(written):
        begin = len(prompt)  # marks that the target writes before its words, as its thought
    begin = max(begin, len(prompt))
    if thought_end is not None and reasoning == "mask":
        begin = thought_end
    answer = Answer(through, begin, end, ((begin, end),), prompt_end=len(prompt))
    if template.marks_generation:
        first = begin if reasoning == "mask" else len(prompt)
        marked = template.generation_spans(messages[: turn + 1], tools)
        spans = tuple((max(first, b), e) for b, e in marked if e > first)
        return replace(answer, spans=spans, ends_turn=False)
    return answer


def _content(
    template: ChatTemplate,
    before: Sequence[Message],
    through: str,
    tools: Sequence[Message],
) -> tuple[int, int]:
    """Where in the text all that an answer says begins and ends: content, thought and calls."""
    other = template.render([*before, {"role": "assistant", "content": _stand_in(through)}], tools)
    begin = common_prefix(through, other)
    return begin, len(through) - common_prefix(through[begin:][::-1], other[begin:][::-1])


def _thought_end(
    template: ChatTemplate,
    before: Sequence[Message],
    message: Message,
    through: str,
    tools: Sequence[Message],
) -> int | None:
    """Where in the text what follows the thought begins; None if the template writes no thought."""
    stand_in = _stand_in(through)
    thought = template.thought(message)
    if "reasoning_content" in message:
        rethought = {**message, "reasoning_content": stand_in}
        reworded = {**message, "content": stand_in}
    else:
        said = message["content"].removeprefix(thought)
        words, closing, blanks = thought.rpartition("</think>")
        opening = "<think>" if "<think>" in words else ""
        other = f"{opening}{stand_in}{closing}{blanks}{said}"
        rethought = {**message, "content": other}
        reworded = {**message, "content": thought + stand_in}
    reworded.pop("tool_calls", None)
    if template.render([*before, rethought], tools) == through:
        return None
    return common_prefix(through, template.render([*before, reworded], tools))


def _word_for_word(
    template: ChatTemplate, prompt: str, message: Message, ending: str, reasoning: str
) -> Answer:
    """An answer with a thought that the template always leaves out: the prompt, and then the answer as
    the target said it. DeepSeek-R1's template is like that."""
    if message.get("tool_calls") or prompt.rstrip().endswith("</think>"):
        raise SkipRecordError(
            SkipReason.UNSUPPORTED,
            "the chat template writes no reasoning here; leave it out with --reasoning drop",
        )
    said = with_inline_thought(message)["content"]
    if template.opens_thought:
        opened = prompt[prompt.rindex("<think>") :]  # and the line break behind it
        said = said.lstrip()
        said = (
            said.removeprefix(opened) if said.startswith(opened) else said.removeprefix("<think>")
        )
    thought = len(template.thought({"content": said})) if reasoning == "mask" else 0
    begin, end = len(prompt) + thought, len(prompt) + len(said)
    return Answer(prompt + said + ending, begin, end, ((begin, end),), prompt_end=len(prompt))


def _unprompted(
    template: ChatTemplate,
    before: Sequence[Message],
    tools: Sequence[Message],
    prompt: str,
    through: str,
    begin: int,
    end: int,
) -> Answer:
    """An answer before which the template does not write the prompt for it.

    The prompt is what the target would be given, so the answer is put behind it. But one that begins a
    thought is no prompt for an answer without: that stays behind what the template writes.
    """
    if template.opens_thought:
        history = common_prefix(prompt, template.render(before, tools))
        if min(begin, common_prefix(prompt, through)) >= history:
            return Answer(through, begin, end, ((begin, end),))
        raise SkipRecordError(
            SkipReason.TEMPLATE_REWRITES_HISTORY,
            "the prompt for an answer has another history than the answer",
        )
    # A blank that the template puts before every answer.
    blank = through[len(through[:begin].rstrip()) : begin]
    lead = prompt if prompt.endswith(blank) else prompt + blank
    text = lead + through[begin:]
    begin, end = len(lead), len(lead) + end - begin
    return Answer(text, begin, end, ((begin, end),), prompt_end=len(prompt))


def _stand_in(text: str) -> str:
    for mark in _STAND_INS:
        if mark not in text:
            return mark
    raise SkipRecordError(SkipReason.UNSUPPORTED, "its text holds every private-use character")


def common_prefix(left: str, right: str) -> int:
    """How many characters two texts share at the start; bisected, since slices compare fast."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[:middle] == right[:middle] else (low, middle - 1)
    return low
