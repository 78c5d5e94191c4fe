import copy
from collections.abc import Sequence
from itertools import groupby

import pytest
from conftest import CHATML, byte_tokenizer
from helpers import openai

from sfdd.conversations.conversation import (
    Conversation,
    Origin,
    Skipped,
    TokenizedConversation,
)
from sfdd.conversations.formats import read_content
from sfdd.conversations.rendering import ChatRenderer
from sfdd.targets.transformers_target import TransformersTarget

THINKING = (  # drops the reasoning from all but the last answer, as Qwen3's and DeepSeek-R1's do
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_END_OF_TURN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
VICUNA = (
    "{% for m in messages %}{{ 'USER: ' if m['role'] == 'user' else 'ASSISTANT: ' }}"
    "{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
NO_GENERATION_PROMPT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
ENDS_TWICE = CHATML + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}"
TRIMS = CHATML.replace("m['content']", "m['content'] | trim")
EMPTY_THOUGHT = (  # as Qwen3's: an empty thought in the last answer, none in the generation prompt
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if loop.last and m['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PICKY = (
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m['content'] }}]<|im_end|>{% endfor %}"
)


def render(
    *turns: str, template: str = CHATML, max_length: int = 4096
) -> TokenizedConversation | Skipped:
    conversation = Conversation(
        Origin("test", 0), "c", read_content(openai(*turns)).messages, "hash"
    )
    return only(ChatRenderer(byte_tokenizer(template), max_length).render(conversation))


def only(
    rendered: list[TokenizedConversation] | Skipped,
) -> TokenizedConversation | Skipped:
    """The one sample of a conversation that needs no more."""
    return rendered if isinstance(rendered, Skipped) else rendered[0]


def pieces(rendered: TokenizedConversation | Skipped) -> list[tuple[bool, str]]:
    """Decoded runs of unsupervised and supervised tokens."""
    assert isinstance(rendered, TokenizedConversation), rendered
    tokenizer = byte_tokenizer()
    pairs = zip(rendered.loss_mask.tolist(), rendered.input_ids.tolist(), strict=True)
    return [
        (supervised, tokenizer.decode([i for _, i in run]))
        for supervised, run in groupby(pairs, key=lambda pair: pair[0])
    ]


def supervised(rendered: TokenizedConversation | Skipped) -> Sequence[str]:
    return [text for is_supervised, text in pieces(rendered) if is_supervised]


def test_exact_positions_of_one_turn() -> None:
    rendered = render("Hi", "Yo!")
    assert pieces(rendered) == [
        (False, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        (True, "Yo!<|im_end|>"),
        (False, "\n"),
    ]
    # 1 + 5 + 2 + 1 + 1 bytes and tokens of the user's turn, 1 + 10 of the generation prompt
    assert rendered.loss_mask.nonzero()[0].tolist() == [21, 22, 23, 24]
    assert len(rendered) == 26
    assert rendered.num_supervised_tokens == 4


def test_every_assistant_turn_is_supervised() -> None:
    rendered = render("one", "two", "three", "four")
    assert supervised(rendered) == ["two<|im_end|>", "four<|im_end|>"]


def test_what_follows_the_last_answer_is_left_out() -> None:
    assert len(render("one", "two", "three")) == len(render("one", "two"))


@pytest.mark.parametrize(
    "turns",
    [
        ("Say: Yes.", "Yes.", "You said: Yes.", "Yes."),  # a quoted answer
        ("a", "a", "a", "a"),
        ("x", "<|im_end|> is a token", "y", "<|im_start|>assistant\nz"),
        ("naïve?", "çà et là 🙂 好", "…", "ﬁn"),
        ("q", "  leading and trailing blanks \n\n", "r", "\n"),
    ],
)
def test_supervised_text_is_exactly_the_answers(turns: tuple[str, ...]) -> None:
    assert supervised(render(*turns)) == [f"{answer}<|im_end|>" for answer in turns[1::2]]


def test_a_template_without_an_end_of_turn_token() -> None:
    rendered = render("one", "two<|im_end|> and more", "three", "four", template=NO_END_OF_TURN)
    assert supervised(rendered) == ["two<|im_end|> and more", "four"]


BLANKS = ("\n\nHello", " b \n", "  x", "\n", " ", "a ", "")


@pytest.mark.parametrize("answer", [blank for blank in BLANKS if blank.strip()])
@pytest.mark.parametrize("template", [CHATML, VICUNA, NO_GENERATION_PROMPT, ENDS_TWICE, TRIMS])
def test_blanks_and_headers_are_told_apart(template: str, answer: str) -> None:
    """Whatever stands around the content is the template's, with or without a generation prompt."""
    rendered = render("q", answer, "r", f"{answer}!", template=template)
    content = answer.strip() if template == TRIMS else answer
    end = "" if template == VICUNA else "<|im_end|>"
    last = f"{answer}!".strip() if template == TRIMS else f"{answer}!"
    assert supervised(rendered) == [f"{content}{end}", f"{last}{end}"]


def test_an_empty_turn_has_its_end_of_turn_alone() -> None:
    assert supervised(render("q", "", "r", "b")) == ["<|im_end|>", "b<|im_end|>"]


def test_an_empty_thought_that_the_template_adds_is_not_the_answer() -> None:
    assert supervised(render("q", "yo", template=EMPTY_THOUGHT)) == ["yo<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "answer"), [(VICUNA, "Hello"), (CHATML, "\n\nHello"), (CHATML, "  Hello")]
)
def test_a_prompt_whose_last_token_would_merge_with_the_answer(
    smollm2: TransformersTarget, template: str, answer: str
) -> None:
    """Every answer follows, token for token, the prompt that `generate` would be given."""
    tokenizer = copy.deepcopy(smollm2.tokenizer)
    tokenizer.chat_template = template
    record = openai("Hi", answer, "And?", answer)
    conversation = Conversation(Origin("t", 0), "c", read_content(record).messages, "hash")
    samples = ChatRenderer(tokenizer, 100).render(conversation)
    assert not isinstance(samples, Skipped)
    assert [(s.part, s.parts, s.rewritten) for s in samples] == [(0, 2, True), (1, 2, True)]
    for sample, turn in zip(samples, (1, 3), strict=True):
        prompt = tokenizer.apply_chat_template(
            record["messages"][:turn], add_generation_prompt=True, return_dict=False
        )
        assert sample.input_ids[: len(prompt)].tolist() == prompt
        assert sample.loss_mask.nonzero()[0][0] == len(prompt)
        supervised = tokenizer.decode(sample.input_ids[sample.loss_mask])
        assert supervised.removesuffix("<|im_end|>") == answer


def test_a_long_conversation_is_cut_without_rendering_all_of_it() -> None:
    rendered = render(*["turn"] * 4000, max_length=300)
    assert isinstance(rendered, TokenizedConversation)
    assert (len(rendered), rendered.truncated) == (300, True)


def test_a_conversation_that_begins_with_the_assistant() -> None:
    conversation = Conversation(
        Origin("t", 0), "c", ({"role": "assistant", "content": "Welcome"},), "hash"
    )
    rendered = ChatRenderer(byte_tokenizer(), 100).render(conversation)
    assert isinstance(rendered, Skipped)
    assert rendered.reason == "begins_with_assistant"


def test_a_template_that_writes_the_date_gives_the_same_text_every_day() -> None:
    llama3 = "{% if not date_string %}{{ strftime_now('%d %b %Y') }}{% endif %}{{ date_string }} "
    for template in (llama3, "{{ strftime_now('%d %b %Y') }} "):
        rendered = render("q", "a", template=template + CHATML)
        assert pieces(rendered)[0][1].startswith("26 Jul 2024 ")
    others = "\n {{ strftime_now('%Y-%m-%d, %A %B, %H:%M') }}\n"
    rendered = render("q", "a", template=others + CHATML)
    assert pieces(rendered)[0][1].startswith("\n 2024-07-26, Friday July, 00:00\n")


def test_truncation_in_the_middle_of_an_answer() -> None:
    whole = render("Hi", "A long answer")
    cut = render("Hi", "A long answer", max_length=25)
    assert isinstance(cut, TokenizedConversation)
    assert (cut.truncated, len(cut), cut.num_supervised_tokens) == (True, 25, 4)
    assert (cut.input_ids == whole.input_ids[:25]).all()
    assert isinstance(whole, TokenizedConversation)
    assert not whole.truncated


def test_nothing_left_to_supervise_after_truncation() -> None:
    rendered = render("A long question", "Yes", max_length=20)
    assert isinstance(rendered, Skipped)
    assert rendered.reason == "no_supervised_tokens: within 20 tokens"


def test_a_template_that_rewrites_history() -> None:
    assert supervised(render("q", "<think>hm</think>a", template=THINKING)) == [
        "<think>hm</think>a<|im_end|>"
    ]
    conversation = Conversation(
        Origin("test", 0),
        "c",
        read_content(openai("q", "<think>hm</think>a", "r", "b")).messages,
        "hash",
    )
    samples = ChatRenderer(byte_tokenizer(THINKING), 4096).render(conversation)
    assert [supervised(sample) for sample in samples] == [
        ["<think>hm</think>a<|im_end|>"],
        ["b<|im_end|>"],
    ]


def test_what_a_template_objects_to_is_that_records_reason() -> None:
    conversation = Conversation(
        Origin("test", 3),
        "c",
        tuple({"role": role, "content": "Hm"} for role in ("user", "user", "assistant")),
        "hash",
    )
    rendered = ChatRenderer(byte_tokenizer(PICKY), 100).render(conversation)
    assert rendered == Skipped(
        Origin("test", 3), "c", "template_error: roles must alternate", "hash"
    )
