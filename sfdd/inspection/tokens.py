"""Which characters of a text each of its tokens stands for."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sfdd.conversations.answers import common_prefix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# So many tokens are decoded together: more make a long text slow, few make it restart often.
_TOGETHER = 16
_UNDECODABLE = "\ufffd"


def token_texts(tokenizer: "PreTrainedTokenizerBase", input_ids: Sequence[int]) -> list[str]:
    """The text of each token; they join to the decoded text of all. [T]

    Works on ids alone, since a record may come as tokens. After each token, as much of the text is there
    as what was decoded so far agrees with it: half a character decodes to a mark that does not. Decoding
    starts again now and then, at a token that can be decoded alone; that one is decoded twice, because
    some tokenizers drop the blank before a first word.
    """

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    whole = decode(input_ids)
    ends: list[int] = []  # of the text, after each token
    first = begin = end = 0  # decode(input_ids[first:]) is whole[begin:]
    for i in range(len(input_ids)):
        so_far = decode(input_ids[first : i + 1])
        end = max(end, begin + common_prefix(so_far, whole[begin : begin + len(so_far)]))
        ends.append(end)
        if i - first >= _TOGETHER and end == begin + len(so_far):
            alone = decode(input_ids[i : i + 1])
            if _UNDECODABLE not in alone and so_far.endswith(alone):
                first, begin = i, end - len(alone)
    ends[-1:] = [len(whole)] if ends else []
    return [whole[a:b] for a, b in zip([0, *ends], ends, strict=False)]
