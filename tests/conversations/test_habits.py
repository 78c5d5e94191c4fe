"""Habits of templates and tokenizers, one by one, that would move the mask or lose what was said."""

from typing import Any

import pytest
from conftest import CHATML, SPECIAL_TOKENS, byte_tokenizer
from conversations.templates import bracketed, family_tokenizer
from helpers import openai
from tokenizers import AddedToken, processors
from transformers import PreTrainedTokenizerFast

from sfdd.conversations.config import MaskConfig
from sfdd.conversations.conversation import Conversation, Origin, Skipped
from sfdd.conversations.formats import read_content
from sfdd.conversations.rendering import ChatRenderer
from sfdd.targets.transformers_target import TransformersTarget

TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def shown(tokenizer: PreTrainedTokenizerFast, record: Any, **choices: Any) -> list[str]:
    """The text of every sample, supervised stretches in brackets; or the reason."""
    content = read_content(record)
    conversation = Conversation(
        Origin("t", 0), "c", content.messages, "h", "", content.tools, content.muted
    )
    samples = ChatRenderer(tokenizer, 4096, MaskConfig(**choices)).render(conversation)
    return [samples.reason] if isinstance(samples, Skipped) else bracketed(tokenizer, samples)


def with_thought(content: str, thought: str) -> dict[str, Any]:
    record = openai("Hi", content)
    record["messages"][1]["reasoning_content"] = thought
    return record


def call_record(content: str = "", calls: int = 1) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "w", "arguments": {"c": 1}}}
    record = openai("W?", content)
    record["messages"][1]["tool_calls"] = [call] * calls
    return record


@pytest.mark.parametrize("family", ["chatml", "qwen3"])
def test_dropping_a_thought_leaves_the_answer_whole(family: str) -> None:
    """Though the answer begins with the very words of the thought, or says it once more."""
    for thought, content in (("Paris", "Paris is it."), ("Yo", "Yo")):
        (text,) = shown(family_tokenizer(family), with_thought(content, thought), reasoning="drop")
        assert text.endswith(f"⟦{content}<|im_end|>⟧\n")


def test_a_thought_under_its_key_and_in_the_content_is_one() -> None:
    tokenizer = family_tokenizer("qwen3")
    twice = with_thought("<think>\nhm\n</think>\n\nYo", "hm")
    for reasoning in ("keep", "mask", "drop"):
        once = shown(tokenizer, with_thought("Yo", "hm"), reasoning=reasoning)
        assert shown(tokenizer, twice, reasoning=reasoning) == once


def test_nothing_is_left_of_an_answer_that_was_all_thought() -> None:
    record = with_thought("", "hm")
    reason = "empty_conversation: nothing is left without the reasoning"
    assert shown(family_tokenizer("qwen3"), record, reasoning="drop") == [reason]


def test_marks_that_the_target_writes_before_its_words() -> None:
    """gpt-oss names a channel, Command-R opens a response: generated, so supervised."""
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}"
        "{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}"
        "{% if loop.last and m.role == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    tokenizer = byte_tokenizer(template, marks, None, "<|return|>")
    assert shown(tokenizer, openai("Hi", "Yo", "Bye", "Ciao")) == [
        "<|start|>user<|message|>Hi<|end|>"
        # The target ends an answer with <|return|>, which history does not keep.
        "<|start|>assistant⟦<|channel|>final<|message|>Yo⟧<|end|>"
        "<|start|>user<|message|>Bye<|end|>"
        "<|start|>assistant⟦<|channel|>final<|message|>Ciao<|return|>⟧"
    ]
    marks = ("<|turn|>", "<|end_turn|>", "<|start_response|>", "<|end_response|>")
    template = (
        "{% for m in messages %}<|turn|>{{ m.role }}"
        "{% if m.role == 'assistant' %}<|start_response|>{{ m.content }}<|end_response|>"
        "{% else %}{{ m.content }}{% endif %}<|end_turn|>{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant{% endif %}"
    )
    tokenizer = byte_tokenizer(template, marks, None, "<|end_turn|>")
    assert shown(tokenizer, openai("Hi", "Yo", "Bye", "Ciao")) == [
        "<|turn|>userHi<|end_turn|>"
        "<|turn|>assistant⟦<|start_response|>Yo<|end_response|><|end_turn|>⟧"
        "<|turn|>userBye<|end_turn|>"
        "<|turn|>assistant⟦<|start_response|>Ciao<|end_response|><|end_turn|>⟧"
    ]


def test_what_stands_only_before_a_last_question() -> None:
    """Mistral's template writes the system turn into the last message, if that is the user's."""
    template = (
        "{% for m in messages %}"
        "{% if m.role == 'user' %}[{% if loop.last %}{{ messages[0].content }} {% endif %}"
        "{{ m.content }}]{% elif m.role == 'assistant' %} {{ m.content }}<|im_end|>{% endif %}"
        "{% endfor %}"
    )
    record = openai("Hi", "Yo")
    record["messages"].insert(0, {"role": "system", "content": "Be brief."})
    assert shown(byte_tokenizer(template), record) == ["[Be brief. Hi] ⟦Yo<|im_end|>⟧"]


def test_a_prompt_that_has_ended_the_thought_has_no_room_for_one() -> None:
    """DeepSeek-V3.1 without thinking: the target would never begin a thought there."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}"
        "{% else %}<|im_end|></think>{{ m.content.split('</think>')[-1] }}<|endoftext|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_end|></think>{% endif %}"
    )
    tokenizer = byte_tokenizer(template)
    reason = "unsupported: the chat template writes no reasoning here; leave it out with --reasoning drop"
    assert shown(tokenizer, openai("Hi", "<think>hm</think>Yo")) == [reason]
    assert shown(tokenizer, openai("Hi", "<think>hm</think>Yo"), reasoning="drop") == [
        "<|im_start|>Hi<|im_end|></think>⟦Yo<|endoftext|>⟧"
    ]


def test_a_template_that_says_think_and_means_something_else() -> None:
    template = "{% if false %}Let us think.{% endif %}" + CHATML
    (reason,) = shown(byte_tokenizer(template), with_thought("Yo", "hm"))
    assert reason.startswith("unsupported: the chat template writes no reasoning")


def test_the_line_break_of_the_prompt_alone_is_not_said() -> None:
    tokenizer = family_tokenizer("r1")
    assert shown(tokenizer, openai("Hi", "<think>\n\n</think>\n\nYo")) == [
        "<|bos|><|User|>Hi<|Assistant|><think>\n⟦\n</think>\n\nYo<|eos|>⟧"
    ]


class TestCalls:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.tool_calls %}CALL {{ m.tool_calls[0].function.arguments | tojson }}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + PROMPT
    )

    def test_what_would_be_left_out_silently(self) -> None:
        tokenizer = byte_tokenizer(self.template)
        assert shown(tokenizer, call_record())[0].endswith('⟦CALL {"c": 1}<|im_end|>⟧\n')
        assert shown(tokenizer, call_record(calls=2)) == [
            "unsupported: the chat template writes no tool calls but the first of a turn"
        ]
        assert shown(tokenizer, call_record("Let me see.")) == [
            "unsupported: the chat template writes no content beside tool calls"
        ]

    def test_a_template_for_tools_and_one_without(self) -> None:
        tokenizer = byte_tokenizer({"default": CHATML, "tool_use": self.template})  # type: ignore[arg-type]
        assert shown(tokenizer, call_record()) == [
            "unsupported: the chat template writes no tool calls"
        ]
        with_tools = call_record() | {"tools": [{"name": "w"}]}
        assert shown(tokenizer, with_tools)[0].endswith('⟦CALL {"c": 1}<|im_end|>⟧\n')


class TestGenerationMarks:
    def marked(self, condition: str) -> PreTrainedTokenizerFast:
        answer = "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        template = (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n"
            f"{{% if m.role == 'assistant' and {condition} %}}{answer}"
            "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
        )
        return byte_tokenizer(template + PROMPT)

    def test_what_is_not_marked_is_not_supervised(self) -> None:
        tokenizer = self.marked("m.content != 'Yo'")
        (text,) = shown(tokenizer, openai("Hi", "Yo", "Bye", "Ciao"))
        assert text.count("⟦") == 1
        assert text.endswith("⟦Ciao<|im_end|>⟧")
        assert shown(tokenizer, openai("Hi", "Yo")) == ["no_supervised_tokens"]

    def test_two_marked_stretches_of_one_answer(self) -> None:
        template = (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
            "{% generation %}{{ m.content }}{% endgeneration %} (sic) "
            "{% generation %}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}"
            "{% endfor %}" + PROMPT
        )
        (text,) = shown(byte_tokenizer(template), openai("Hi", "Yo"))
        assert text.endswith("assistant\n⟦Yo⟧ (sic) ⟦<|im_end|>⟧")

    def test_an_objection_while_looking_for_marks_is_the_records_own(self) -> None:
        template = (
            "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
            "{{ m.content.missing.deep }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
            "{% endfor %}"
        )
        (reason,) = shown(byte_tokenizer(template), openai("Hi", "Yo"))
        assert reason.startswith("template_error: ")


class TestTokenizers:
    def test_offsets_without_blanks(self, smollm2: TransformersTarget) -> None:
        """An end of a trimmed token may lie where the prompt ends, by accident."""
        import copy

        tokenizer = copy.deepcopy(smollm2.tokenizer)
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
        tokenizer.chat_template = CHATML
        messages = openai("Hi", "   def f(x): pass")["messages"]
        content = read_content({"messages": messages})
        (sample,) = ChatRenderer(tokenizer, 100).render(
            Conversation(Origin("t", 0), "c", content.messages, "h")
        )
        prompt = tokenizer.apply_chat_template(
            messages[:1], add_generation_prompt=True, return_dict=False
        )
        assert sample.input_ids[: len(prompt)].tolist() == prompt
        supervised = tokenizer.decode(sample.input_ids[sample.loss_mask])
        assert supervised == "   def f(x): pass<|im_end|>"

    def test_end_of_turn_tokens_that_take_the_blanks_before_them(self) -> None:
        tokenizer = byte_tokenizer(TURN + PROMPT)
        tokenizer.backend_tokenizer.add_special_tokens(
            [AddedToken(text, lstrip=True, special=True) for text in SPECIAL_TOKENS]
        )
        for text in shown(tokenizer, openai("Hi", "Yo\n", "Bye", "Ciao")):
            for answer in text.split("⟦")[1:]:
                assert answer.partition("⟧")[0] in ("Yo<|im_end|>", "Ciao<|im_end|>")


def test_a_long_rewritten_conversation_is_not_rendered_to_its_end() -> None:
    """Each of its 1,000 answers would be rendered with all that precedes it."""
    tokenizer = family_tokenizer("qwen3")
    content = read_content(openai(*["turn"] * 2000))
    renderer = ChatRenderer(tokenizer, 300)
    rendered: list[int] = []
    original = renderer._template.render

    def counting(messages: Any, *arguments: Any, **options: Any) -> str:
        rendered.append(len(messages))
        return original(messages, *arguments, **options)

    renderer._template.render = counting  # type: ignore[method-assign]
    samples = renderer.render(Conversation(Origin("t", 0), "c", content.messages, "h"))
    assert not isinstance(samples, Skipped)
    assert samples[0].truncated
    assert len(rendered) < 100
