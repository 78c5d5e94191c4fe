"""Where in the rendered text an answer of the target stands.

An answer is found by what the template does, not by what the text says: the conversation through an
assistant turn is rendered twice, once with other content in that turn, and where the two texts part and
meet again the content begins and ends. No text is searched for, so a user who quotes the assistant, or
an answer that repeats, cannot move the mask. A template with `{% generation %}` says it itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sfdd.conversations.conversation import SkipReason
from sfdd.conversations.messages import SkipRecordError
from sfdd.conversations.template import ChatTemplate, Message, with_inline_thought

# Stand in for the content of a turn: private characters, of which one is not in the text.
_STAND_INS = tuple(map(chr, range(0xE000, 0xF8FF)))


@dataclass(frozen=True)
class Answer:
    """A conversation through an assistant turn, and the characters of it that the target would generate.

    Attributes:
        spans: begin and end of each stretch, in order.
        ends_turn: the end-of-turn token follows the last span; False where the spans hold it already.
        prompt_end: where in the text the prompt for this turn ends and the target goes on. None where the
            template does not begin the turn with its own prompt.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    ends_turn: bool
    prompt_end: int | None

    @property
    def begin(self) -> int:
        return self.spans[0][0]

    @property
    def end(self) -> int:
        return self.spans[-1][1]


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
        SkipRecordError: the template objects, or renders another history before this answer than in
            the prompt for it.
    """
    before, message = messages[:turn], messages[turn]
    prompt = template.render(before, tools, add_generation_prompt=True)
    through = template.render(messages[: turn + 1], tools)
    begin, end = _content(template, before, through, tools)
    if template.thought(message):
        thought_end = _thought_end(template, before, message, through, tools)
        if thought_end is None:
            return _verbatim(template, prompt, message, through[end:], reasoning)
        if reasoning == "mask":
            begin = thought_end
        elif template.writes_prompt and through.startswith(prompt):
            begin = len(prompt)
    if not through.startswith(prompt):
        history = template.render(before, tools)
        if common_prefix(prompt, through) < common_prefix(prompt, history):
            raise SkipRecordError(
                SkipReason.TEMPLATE_REWRITES_HISTORY,
                f"the prompt for turn {turn + 1} is not what the template writes before its answer",
            )
        return Answer(through, ((begin, end),), ends_turn=True, prompt_end=None)
    if template.marks_generation:
        first = begin if reasoning == "mask" else len(prompt)
        marked = template.generation_spans(messages[: turn + 1], tools)
        if spans := tuple((max(first, b), e) for b, e in marked if e > first):
            return Answer(through, spans, ends_turn=False, prompt_end=len(prompt))
    span = (max(begin, len(prompt)), end)
    return Answer(through, (span,), ends_turn=True, prompt_end=len(prompt))


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
        rethought = {**message, "content": f"<think>\n{stand_in}\n</think>\n\n{said}"}
        reworded = {**message, "content": thought + stand_in}
    reworded.pop("tool_calls", None)
    if template.render([*before, rethought], tools) == through:
        return None
    return common_prefix(through, template.render([*before, reworded], tools))


def _verbatim(
    template: ChatTemplate, prompt: str, message: Message, ending: str, reasoning: str
) -> Answer:
    """An answer with a thought that the template always leaves out: the prompt, and then the answer as
    the target said it. DeepSeek-R1's template is like that."""
    if message.get("tool_calls"):
        raise SkipRecordError(
            SkipReason.UNSUPPORTED,
            "the chat template writes no reasoning before tool calls; use --reasoning drop",
        )
    said = with_inline_thought(message)["content"]
    if template.opens_thought:
        said = said.lstrip().removeprefix("<think>").lstrip("\n")
    thought = len(template.thought({"content": said})) if reasoning == "mask" else 0
    span = (len(prompt) + thought, len(prompt) + len(said))
    return Answer(prompt + said + ending, (span,), ends_turn=True, prompt_end=len(prompt))


def _stand_in(text: str) -> str:
    return next(mark for mark in _STAND_INS if mark not in text)


def common_prefix(left: str, right: str) -> int:
    """How many characters two texts share at the start; bisected, since slices compare fast."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[:middle] == right[:middle] else (low, middle - 1)
    return low
