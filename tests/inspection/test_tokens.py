import numpy as np
import pytest
from conftest import byte_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from sfdd.inspection.tokens import token_texts
from sfdd.targets.transformers_target import TransformersTarget

TEXT = (
    "<|im_start|>user\n  Wo  ist die 😀👩🏽‍🚀-Brücke?<|im_end|>\n"
    "caf\ufffd, 日本語で\ufffd\ufffd. don't , stop . \t\n\n x<|im_end|>\n" * 3
)


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2's: a blank before the first word, bytes where the vocabulary lacks a character."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehis"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>")


def test_a_character_of_several_tokens_stands_at_the_last() -> None:
    tokenizer = byte_tokenizer()
    assert token_texts(tokenizer, ids_of(tokenizer, "H 😀é!")) == [
        *("H", " "),
        *("", "", "", "😀"),
        *("", "é"),
        "!",
    ]


def test_smollm2_tokens_that_share_a_character(smollm2: TransformersTarget) -> None:
    tokenizer = smollm2.tokenizer
    ids = ids_of(tokenizer, "Hi 😀 there<|im_end|>\n")
    assert tokenizer.decode(ids[1:2]) == " \ufffd"  # the blank, and half of the emoji
    assert token_texts(tokenizer, ids) == ["Hi", " ", "😀", " there", "<|im_end|>", "\n"]


def test_a_replacement_character_in_the_data_is_a_character(smollm2: TransformersTarget) -> None:
    tokenizer = smollm2.tokenizer
    assert token_texts(tokenizer, ids_of(tokenizer, "caf\ufffd is\ufffd")) == [
        *("c", "af", "\ufffd"),
        *(" is", "\ufffd"),
    ]


@pytest.mark.parametrize("cut", [1, 2, 40, 10**6])
def test_texts_join_to_the_whole(cut: int, smollm2: TransformersTarget) -> None:
    for tokenizer in (byte_tokenizer(), smollm2.tokenizer):
        ids = ids_of(tokenizer, TEXT)[:cut]
        texts = token_texts(tokenizer, ids)
        assert len(texts) == len(ids)
        assert "".join(texts) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if cut > len(ids):
            assert "".join(texts) == TEXT


def test_texts_stand_where_the_tokenizer_says(smollm2: TransformersTarget) -> None:
    """A token's text ends where the tokenizer says that it ends, or before a character it shares."""
    for tokenizer in (byte_tokenizer(), smollm2.tokenizer):
        encoded = tokenizer(TEXT, add_special_tokens=False, return_offsets_mapping=True)
        end = 0
        for text, (begin, until) in zip(
            token_texts(tokenizer, encoded["input_ids"]), encoded["offset_mapping"], strict=True
        ):
            end += len(text)
            assert begin <= end <= until


def test_random_tokens_of_any_kind_join(smollm2: TransformersTarget) -> None:
    rng = np.random.default_rng(0)
    for tokenizer in (byte_tokenizer(), smollm2.tokenizer, sentencepiece_tokenizer()):
        for _ in range(30):
            ids = rng.integers(0, len(tokenizer), 60).tolist()
            texts = token_texts(tokenizer, ids)
            assert "".join(texts) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_blanks_that_a_tokenizer_drops_before_a_first_word() -> None:
    tokenizer = sentencepiece_tokenizer()
    text = "hi  is a 😀😀 bad" * 5
    texts = token_texts(tokenizer, ids_of(tokenizer, text))
    assert "".join(texts) == text
    assert texts[:6] == ["", "h", "i", " ", " ", "i"]
    assert all(len(part) <= 1 or set(part) == {"😀"} for part in texts)


def test_no_tokens() -> None:
    assert token_texts(byte_tokenizer(), []) == []
