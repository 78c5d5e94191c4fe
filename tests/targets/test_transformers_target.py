from pathlib import Path

import pytest
import torch
import transformers
from conftest import byte_tokenizer, save_tiny_target, tiny_config
from helpers import random_conversation

from sfdd.conversations.conversation import TokenizedConversation
from sfdd.errors import TargetError
from sfdd.targets.loading import TargetSource
from sfdd.targets.statistics import STATISTICS
from sfdd.targets.transformers_target import TransformersTarget

SMALL = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {"final_logit_softcapping": 2.0, "sliding_window": 8},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
    "mixtral": MIXTURE,
    "phi3": {"tie_word_embeddings": False},
    "gpt_neox": {"hidden_act": "gelu"},
}


def plain_flatness(target: TransformersTarget, conversation: TokenizedConversation) -> torch.Tensor:
    """Softmax and cosine in float64 over the whole model's own logits."""
    ids = torch.from_numpy(conversation.input_ids).long()[None]
    with torch.no_grad():
        logits = target.model(ids).logits[0].double()
    predicting = torch.from_numpy(conversation.loss_mask).nonzero()[:, 0] - 1
    p = logits[predicting].softmax(-1)
    return 1 / (p.shape[-1] ** 0.5 * p.norm(dim=-1))


@pytest.mark.parametrize("family", FAMILIES)
def test_body_and_head_make_the_models_own_logits(family: str) -> None:
    """Soft caps, logit scales, experts and sliding windows included."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **(SMALL | FAMILIES[family]))
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    target = TransformersTarget(model, byte_tokenizer(), TargetSource(family))
    ids = torch.randint(3, 260, (1, 24))
    with torch.inference_mode():
        expected = model(ids).logits[0]
        logits = target.logits(target.hidden_states(ids)[0])
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert logits.std() > 0.01

    batch = [random_conversation(n, 3, seed=n) for n in (24, 9)]
    for stats, conversation in zip(target.token_stats(batch), batch, strict=True):
        flatness = torch.from_numpy(stats.flatness).double()
        assert (flatness / plain_flatness(target, conversation) - 1).abs().max() <= 1e-5


@pytest.mark.parametrize("prefill_tokens", [1, 7, 16, 39])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_conversation_in_pieces(family: str, prefill_tokens: int) -> None:
    """Sliding windows, experts and soft caps: pieces and a KV cache give what the whole gives."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **(SMALL | FAMILIES[family]))
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    target = TransformersTarget(model, byte_tokenizer(), TargetSource(family))
    conversation = random_conversation(40, 3, seed=1)
    conversation.loss_mask[10:20] = False  # a piece may have nothing to score
    (stats,) = target.token_stats([conversation], prefill_tokens=prefill_tokens)
    expected = plain_flatness(target, conversation)
    assert (torch.from_numpy(stats.flatness).double() / expected - 1).abs().max() <= 1e-5
    assert len(stats) == conversation.num_supervised_tokens


def test_32k_tokens_in_pieces(tmp_path: Path) -> None:
    """What comes late in a long conversation is scored with all that precedes it."""
    directory = save_tiny_target(tmp_path / "long", max_position_embeddings=32_768)
    target = TransformersTarget.load(str(directory))
    conversation = random_conversation(32_768, 32_700, seed=1)
    (stats,) = target.token_stats([conversation], prefill_tokens=2048)
    expected = plain_flatness(target, conversation)
    assert (torch.from_numpy(stats.flatness).double() / expected - 1).abs().max() <= 1e-4


@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_alone_and_in_a_padded_batch(tiny_target: TransformersTarget, padding_side: str) -> None:
    batch = [random_conversation(length, 5, seed=length) for length in (7, 40, 23, 6)]
    together = tiny_target.token_stats(batch, padding_side)
    for conversation, stats in zip(batch, together, strict=True):
        (alone,) = tiny_target.token_stats([conversation])
        assert len(stats) == conversation.num_supervised_tokens
        for name in STATISTICS:
            torch.testing.assert_close(
                getattr(stats, name), getattr(alone, name), rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_smollm2_flatness_is_exact(smollm2: TransformersTarget, padding_side: str) -> None:
    """Against a float64 softmax and cosine of plain transformers' logits, padded and not."""
    vocab = smollm2.vocab_size
    batch = [random_conversation(n, n // 2, seed=n, vocab_size=vocab) for n in (12, 60, 35)]
    for stats, conversation in zip(smollm2.token_stats(batch, padding_side), batch, strict=True):
        expected = plain_flatness(smollm2, conversation)
        flatness = torch.from_numpy(stats.flatness).double()
        assert (flatness / expected - 1).abs().max() <= 1e-5


def test_the_distribution_scored_is_the_one_that_predicts(tiny_target: TransformersTarget) -> None:
    """Token t is scored by the logits at t - 1, so the token itself cannot change its flatness."""
    conversation = random_conversation(10, 9, seed=1)
    changed = conversation.input_ids.copy()
    changed[9] = (changed[9] - 2) % 257 + 3
    other = TokenizedConversation(conversation.origin, "other", changed, conversation.loss_mask)
    (stats,), (stats_other) = (
        tiny_target.token_stats([conversation]),
        tiny_target.token_stats([other])[0],
    )
    assert stats.flatness == stats_other.flatness
    assert stats.nll != stats_other.nll


def test_no_tensor_over_batch_length_and_vocabulary(
    tiny_target: TransformersTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head sees supervised positions only, never more than a chunk of them."""
    rows: list[int] = []
    original = tiny_target.logits
    monkeypatch.setattr(tiny_target, "logits", lambda h: (rows.append(len(h)), original(h))[1])
    monkeypatch.setattr(TransformersTarget, "rows_per_chunk", 8)
    batch = [random_conversation(50, 30, seed=i) for i in range(3)]
    tiny_target.token_stats(batch)
    assert rows == [8, 8, 8, 8, 8, 8, 8, 4]


def test_positions_that_depend_on_the_batch(tiny_target: TransformersTarget) -> None:
    """longrope picks its factors by the longest sequence: such a target forwards one at a time."""
    factors = [1.0 + i for i in range(4)]
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}
    scaling |= {"short_factor": factors, "long_factor": [3 * f for f in factors]}
    config = tiny_config(rope_parameters=scaling | {"original_max_position_embeddings": 16})
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    target = TransformersTarget(model, byte_tokenizer(), TargetSource("longrope"))
    batch = [random_conversation(length, 3, seed=length) for length in (40, 9)]
    for stats, conversation in zip(target.token_stats(batch), batch, strict=True):
        expected = plain_flatness(target, conversation)
        assert (torch.from_numpy(stats.flatness).double() / expected - 1).abs().max() <= 1e-5

    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = transformers.LlamaForCausalLM(config).eval()
    target = TransformersTarget(model, byte_tokenizer(), TargetSource("dynamic"))
    with pytest.raises(TargetError, match="uses dynamic RoPE scaling"):
        target.token_stats(batch)


def test_bfloat16_weights_accumulate_in_float32(tiny_directory: Path) -> None:
    target = TransformersTarget.load(str(tiny_directory), dtype="bfloat16")
    assert target.identity["dtype"] == "bfloat16"
    (stats,) = target.token_stats([random_conversation(20, 5, seed=0)])
    assert stats.all_finite()
    assert target.logits(torch.zeros(1, target.hidden_size)).dtype == torch.float32


def test_identity_tells_targets_apart(tmp_path: Path, tiny_target: TransformersTarget) -> None:
    same = TransformersTarget.load(str(save_tiny_target(tmp_path / "same")))
    other = TransformersTarget.load(str(save_tiny_target(tmp_path / "other", seed=1)))
    assert same.identity == tiny_target.identity
    differing = {k for k in same.identity if same.identity[k] != other.identity[k]}
    assert differing == {"target"}


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads(tmp_path: Path, tied: bool) -> None:
    directory = save_tiny_target(tmp_path / "target", tie_word_embeddings=tied)
    assert len(list(directory.glob("*.safetensors"))) == 1
    target = TransformersTarget.load(str(directory))
    shared = target.model.get_output_embeddings().weight is target.embedding.weight
    assert shared == tied
    conversation = random_conversation(12, 4, seed=0)
    (stats,) = target.token_stats([conversation])
    expected = plain_flatness(target, conversation)
    assert (torch.from_numpy(stats.flatness).double() / expected - 1).abs().max() <= 1e-5
