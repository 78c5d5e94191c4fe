"""Exactly which tokens are supervised with the templates of well-known families.

One token is one byte or one special token here, so marking the supervised stretches of the text in
brackets says every position and every count.
"""

from typing import Any

import pytest
import torch
from conftest import tiny_config
from conversations.templates import FAMILIES, bracketed, family_tokenizer
from helpers import openai
from transformers import LlamaForCausalLM

from sfdd.conversations.config import MaskConfig
from sfdd.conversations.conversation import Conversation, Origin, Skipped, TokenizedConversation
from sfdd.conversations.formats import read_content
from sfdd.conversations.rendering import ChatRenderer


def render(
    family: str, record: Any, max_length: int = 4096, **choices: Any
) -> list[TokenizedConversation] | Skipped:
    content = read_content(record)
    conversation = Conversation(
        Origin("test", 0), "c", content.messages, "hash", "", content.tools, content.muted
    )
    renderer = ChatRenderer(family_tokenizer(family), max_length, MaskConfig(**choices))
    return renderer.render(conversation)


def shown(family: str, record: Any, max_length: int = 4096, **choices: Any) -> list[str]:
    """The text of every sample, its supervised stretches in brackets."""
    samples = render(family, record, max_length, **choices)
    assert not isinstance(samples, Skipped), samples.reason
    return bracketed(family_tokenizer(family), samples)


def reason(family: str, record: Any, **choices: Any) -> str:
    skipped = render(family, record, **choices)
    assert isinstance(skipped, Skipped)
    return skipped.reason


TURNS = openai("Hi", "Yo", "Yo", "Yo, naïve 🙂 好")  # the answer is quoted, and is said again

EVERY_TURN = {
    "chatml": (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Yo<|im_end|>⟧\n"
        "<|im_start|>user\nYo<|im_end|>\n<|im_start|>assistant\n⟦Yo, naïve 🙂 好<|im_end|>⟧\n"
    ),
    "marked": (  # what the template calls generated, the line break included
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Yo<|im_end|>\n⟧"
        "<|im_start|>user\nYo<|im_end|>\n<|im_start|>assistant\n⟦Yo, naïve 🙂 好<|im_end|>\n⟧"
    ),
    "llama3": (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Yo<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nYo<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Yo, naïve 🙂 好<|eot_id|>⟧"
    ),
    "qwen2.5": (  # the template's own system prompt
        "<|im_start|>system\nYou are a small test.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Yo<|im_end|>⟧\n"
        "<|im_start|>user\nYo<|im_end|>\n<|im_start|>assistant\n⟦Yo, naïve 🙂 好<|im_end|>⟧\n"
    ),
    "mistral": "<s>[INST] Hi[/INST] ⟦Yo</s>⟧[INST] Yo[/INST] ⟦Yo, naïve 🙂 好</s>⟧",
    "gemma": (
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n⟦Yo<end_of_turn>⟧\n"
        "<start_of_turn>user\nYo<end_of_turn>\n<start_of_turn>model\n⟦Yo, naïve 🙂 好<end_of_turn>⟧\n"
    ),
    "phi": (
        "<|user|>\nHi<|end|>\n<|assistant|>\n⟦Yo<|end|>⟧\n"
        "<|user|>\nYo<|end|>\n<|assistant|>\n⟦Yo, naïve 🙂 好<|end|>⟧\n<|endoftext|>"
    ),
    "r1": (
        "<|bos|><|User|>Hi<|Assistant|>⟦Yo<|eos|>⟧<|User|>Yo<|Assistant|>⟦Yo, naïve 🙂 好<|eos|>⟧"
    ),
}


@pytest.mark.parametrize("family", EVERY_TURN)
def test_every_answer_and_its_end_of_turn(family: str) -> None:
    assert shown(family, TURNS) == [EVERY_TURN[family]]


def test_positions_and_counts_by_number() -> None:
    (sample,) = render("llama3", openai("Hi", "Yo"))  # type: ignore[misc]
    # 0 <|begin_of_text|>, 1 header, 2-5 "user", 6 header end, 7-8 line breaks, 9-10 "Hi", 11 <|eot_id|>,
    # 12 header, 13-21 "assistant", 22 header end, 23-24 line breaks, 25-26 "Yo", 27 <|eot_id|>
    assert sample.loss_mask.nonzero()[0].tolist() == [25, 26, 27]
    assert len(sample) == 28
    assert sample.input_ids[27] == family_tokenizer("llama3").eos_token_id


@pytest.mark.parametrize("family", EVERY_TURN)
def test_the_last_turn_only(family: str) -> None:
    (text,) = shown(family, TURNS, last_turn_only=True)
    first, _, last = EVERY_TURN[family].partition("⟧")
    assert text == first.replace("⟦", "") + last


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_of_one_token(family: str) -> None:
    answers = [part.partition("⟧")[0] for part in shown(family, openai("q", "a"))[0].split("⟦")[1:]]
    assert [answer[0] for answer in answers] == ["a"]


@pytest.mark.parametrize("family", EVERY_TURN)
def test_cut_at_every_length(family: str) -> None:
    """Wherever it is cut, what is left is supervised as it was."""
    (whole,) = render(family, TURNS)  # type: ignore[misc]
    for length in range(2, len(whole)):
        cut = render(family, TURNS, length)
        if whole.loss_mask[:length].any():
            (sample,) = cut  # type: ignore[misc]
            assert sample.truncated
            assert (sample.input_ids == whole.input_ids[:length]).all()
            assert (sample.loss_mask == whole.loss_mask[:length]).all()
        else:
            assert isinstance(cut, Skipped)
            assert cut.reason == f"no_supervised_tokens: within {length} tokens"


TOOLS = {
    "tools": '[{"name": "w", "parameters": {}}]',
    "conversations": [
        {"from": "human", "value": "W?"},
        {"from": "function_call", "value": '{"name": "w", "arguments": {"c": "é"}}'},
        {"from": "observation", "value": "5"},
        {"from": "gpt", "value": "It is 5."},
    ],
}
SCHEMA = '{"type": "function", "function": {"name": "w", "parameters": {}}}'


def test_tool_calls_are_supervised() -> None:
    assert shown("llama3", TOOLS) == [
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n"
        f"Functions: [{SCHEMA}]\n\nW?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        '⟦{"name": "w", "parameters": {"c": "é"}}<|eot_id|>⟧'
        "<|start_header_id|>ipython<|end_header_id|>\n\n5<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦It is 5.<|eot_id|>⟧"
    ]
    assert shown("qwen2.5", TOOLS) == [
        f"<|im_start|>system\nYou are a small test.\n<tools>\n{SCHEMA}\n</tools><|im_end|>\n"
        "<|im_start|>user\nW?<|im_end|>\n<|im_start|>assistant\n"
        '⟦<tool_call>\n{"name": "w", "arguments": {"c": "é"}}\n</tool_call><|im_end|>⟧\n'
        "<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n⟦It is 5.<|im_end|>⟧\n"
    ]


def test_calls_without_an_id_get_one_where_the_template_wants_it() -> None:
    assert shown("mistral", TOOLS) == [
        f"<s>[AVAILABLE_TOOLS] [{SCHEMA}][/AVAILABLE_TOOLS][INST] W?[/INST]"
        '⟦[TOOL_CALLS] [{"name": "w", "arguments": {"c": "é"}, "id": "call00001"}]</s>⟧'
        "[TOOL_RESULTS] 5[/TOOL_RESULTS] ⟦It is 5.</s>⟧"
    ]


def test_a_template_that_takes_arguments_as_text() -> None:
    assert shown("r1", TOOLS) == [
        '<|bos|><|User|>W?<|Assistant|>⟦<|call|>w\n{"c": "é"}<|end|><|eos|>⟧'
        "<|tool|>5<|Assistant|>⟦It is 5.<|eos|>⟧"
    ]


def test_content_beside_a_call_and_two_calls_at_once() -> None:
    record = openai("W?", "Let me see.")
    call = {"type": "function", "function": {"name": "w", "arguments": '{"c": 1}'}}
    record["messages"][1]["tool_calls"] = [call, call]
    (text,) = shown("qwen2.5", record)
    assert text.partition("assistant\n")[2] == (
        '⟦Let me see.\n<tool_call>\n{"name": "w", "arguments": {"c": 1}}\n</tool_call>'
        '\n<tool_call>\n{"name": "w", "arguments": {"c": 1}}\n</tool_call><|im_end|>⟧\n'
    )
    without = "unsupported: the chat template writes no content beside tool calls"
    assert reason("llama3", record) == reason("mistral", record) == without
    record["messages"][1]["content"] = ""
    assert reason("llama3", record) == "template_error: one call at a time"


@pytest.mark.parametrize("family", ["chatml", "gemma", "phi"])
def test_calls_that_a_template_would_leave_out(family: str) -> None:
    assert reason(family, TOOLS) == "unsupported: the chat template writes no tool calls"


ANSWERED_WITH_THOUGHT = openai("Hi", "Yo", "Bye", "Ciao")
ANSWERED_WITH_THOUGHT["messages"][1]["reasoning_content"] = "hm"
ANSWERED_WITH_THOUGHT["messages"][3]["reasoning_content"] = "well"
INLINE = openai("Hi", "<think>\nhm\n</think>\n\nYo", "Bye", "<think>\nwell\n</think>\n\nCiao")
FIRST = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
SECOND = f"{FIRST}Yo<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
R1_FIRST = "<|bos|><|User|>Hi<|Assistant|>"
R1_SECOND = f"{R1_FIRST}\n\nYo<|eos|><|User|>Bye<|Assistant|>"


@pytest.mark.parametrize("record", [ANSWERED_WITH_THOUGHT, INLINE])
def test_a_template_that_drops_earlier_thoughts(record: Any) -> None:
    """Every answer is a sample, after the history that the target sees when it gives that answer."""
    assert shown("qwen3", record) == [
        f"{FIRST}⟦<think>\nhm\n</think>\n\nYo<|im_end|>⟧\n",
        f"{SECOND}⟦<think>\nwell\n</think>\n\nCiao<|im_end|>⟧\n",
    ]
    assert shown("qwen3", record, reasoning="mask") == [
        f"{FIRST}<think>\nhm\n</think>\n\n⟦Yo<|im_end|>⟧\n",
        f"{SECOND}<think>\nwell\n</think>\n\n⟦Ciao<|im_end|>⟧\n",
    ]
    assert shown("qwen3", record, reasoning="drop") == [
        f"{FIRST}<think>\n\n</think>\n\n⟦Yo<|im_end|>⟧\n",
        f"{SECOND}<think>\n\n</think>\n\n⟦Ciao<|im_end|>⟧\n",
    ]
    last = [f"{SECOND}⟦<think>\nwell\n</think>\n\nCiao<|im_end|>⟧\n"]
    assert shown("qwen3", record, rewritten="last") == last
    assert shown("qwen3", record, last_turn_only=True) == last


@pytest.mark.parametrize("record", [ANSWERED_WITH_THOUGHT, INLINE])
def test_a_template_that_writes_no_thought_but_begins_one(record: Any) -> None:
    """What the prompt holds is not supervised; what the target said after it is, word for word."""
    assert shown("r1", record) == [
        f"{R1_FIRST}<think>\n⟦hm\n</think>\n\nYo<|eos|>⟧",
        f"{R1_SECOND}<think>\n⟦well\n</think>\n\nCiao<|eos|>⟧",
    ]
    assert shown("r1", record, reasoning="mask") == [
        f"{R1_FIRST}<think>\nhm\n</think>\n\n⟦Yo<|eos|>⟧",
        f"{R1_SECOND}<think>\nwell\n</think>\n\n⟦Ciao<|eos|>⟧",
    ]
    assert shown("r1", record, reasoning="drop") == [
        f"{R1_FIRST}⟦Yo<|eos|>⟧<|User|>Bye<|Assistant|>⟦Ciao<|eos|>⟧"
    ]


def test_an_answer_whose_thought_was_begun_by_the_prompt() -> None:
    """Servers give back only what was generated: the thought then has an end and no beginning."""
    assert shown("r1", openai("Hi", "hm\n</think>\n\nYo")) == [
        f"{R1_FIRST}<think>\n⟦hm\n</think>\n\nYo<|eos|>⟧"
    ]


def test_samples_of_a_rewritten_conversation_know_each_other() -> None:
    samples = render("qwen3", ANSWERED_WITH_THOUGHT)
    assert not isinstance(samples, Skipped)
    assert [(s.part, s.parts, s.rewritten) for s in samples] == [(0, 2, True), (1, 2, True)]
    assert render("qwen3", openai("Hi", "Yo"))[0].rewritten is False  # type: ignore[index]


def test_a_thought_that_a_tool_interrupts() -> None:
    """Within one question the thoughts stay, so one sample holds all of it."""
    record = {**TOOLS, "conversations": [dict(turn) for turn in TOOLS["conversations"]]}
    record["conversations"][1]["reasoning_content"] = "ask"
    record["conversations"][3]["reasoning_content"] = "told"
    assert shown("qwen3", record) == [
        "<|im_start|>user\nW?<|im_end|>\n<|im_start|>assistant\n⟦<think>\nask\n</think>\n\n"
        '<tool_call>\n{"name": "w", "arguments": {"c": "é"}}\n</tool_call><|im_end|>⟧\n'
        "<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\ntold\n</think>\n\nIt is 5.<|im_end|>⟧\n"
    ]


def test_thoughts_in_a_template_that_knows_none() -> None:
    assert shown("chatml", INLINE, reasoning="mask") == [
        f"{FIRST}<think>\nhm\n</think>\n\n⟦Yo<|im_end|>⟧\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nwell\n</think>\n\n⟦Ciao<|im_end|>⟧\n"
    ]
    assert reason("chatml", ANSWERED_WITH_THOUGHT) == (
        "unsupported: the chat template writes no reasoning; leave it out with --reasoning drop"
    )
    assert shown("chatml", ANSWERED_WITH_THOUGHT, reasoning="drop") == shown(
        "chatml", openai("Hi", "Yo", "Bye", "Ciao")
    )


@pytest.mark.parametrize(
    ("family", "roles", "said"),
    [
        ("mistral", ("system", "user", "assistant"), "system role not supported"),
        ("gemma", ("system", "user", "assistant"), "System role not supported"),
        ("mistral", ("user", "user", "assistant"), "roles must alternate user/assistant"),
        ("gemma", ("user", "assistant", "assistant"), "Conversation roles must alternate"),
        ("gemma", ("assistant", "user", "assistant"), "Conversation roles must alternate"),
    ],
)
def test_what_a_template_objects_to_is_said_in_its_words(
    family: str, roles: tuple[str, ...], said: str
) -> None:
    record = {"messages": [{"role": role, "content": "Hm"} for role in roles]}
    assert reason(family, record).startswith(f"template_error: {said}")


def test_the_developer_is_the_system_where_a_template_does_not_know_one() -> None:
    record = openai("Hi", "Yo")
    record["messages"].insert(0, {"role": "developer", "content": "Be brief."})
    assert shown("qwen2.5", record)[0].startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


def test_turns_that_the_record_mutes() -> None:
    record = openai("Hi", "Yo", "Bye", "Ciao")
    record["messages"][1]["weight"] = 0
    (text,) = shown("chatml", record)
    assert text.count("⟦") == 1
    assert "⟦Ciao<|im_end|>⟧" in text
    record["messages"][3]["loss_weight"] = 0.0
    assert reason("chatml", record) == "no_supervised_tokens: every assistant turn has weight 0"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_is_the_prompt_and_what_a_model_would_go_on_with(family: str) -> None:
    """The supervised tokens of the last answer follow, on token ids, the prompt that `generate` gets.

    A tiny random model then gives the same distributions for the answer either way.
    """
    tokenizer = family_tokenizer(family)
    record = openai("One?", "Two.", "Three?", "Four.")
    prompt = tokenizer.apply_chat_template(
        record["messages"][:3], add_generation_prompt=True, return_dict=False
    )
    sample = render(family, record)[-1]  # type: ignore[index]
    first = int(sample.loss_mask.nonzero()[0][-len("Four.") - 1 - (family == "marked")])
    before = sample.input_ids[:first].tolist()
    scaffold = {"qwen3": "<think>\n\n</think>\n\n", "mistral": " "}.get(family, "")
    if family == "r1":  # the prompt begins a thought, and this answer has none
        before, scaffold = before + tokenizer.encode("<think>\n"), ""
    assert before == prompt + tokenizer.encode(scaffold, add_special_tokens=False)
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(vocab_size=len(tokenizer))).eval()
    ids = torch.from_numpy(sample.input_ids).long()[None]
    with torch.no_grad():
        whole = model(ids).logits[0, first - 1]
        alone = model(ids[:, :first]).logits[0, -1]
    torch.testing.assert_close(whole, alone)
