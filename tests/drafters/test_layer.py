"""The layer of a drafter is a Llama layer of the target's sizes; what cannot be one is refused."""

import pytest
import torch
import transformers
from conftest import byte_tokenizer
from drafters.targets import SMALL, TARGETS, make_target

from sfdd.drafters.layer import drafter_config, token_embeddings
from sfdd.errors import TargetError
from sfdd.targets.loading import TargetSource
from sfdd.targets.transformers_target import TransformersTarget

ARCHITECTURE = "LlamaForCausalLM"


@pytest.mark.parametrize("name", TARGETS)
def test_a_llama_layer_of_the_targets_sizes(name: str) -> None:
    target = make_target(name)
    config = drafter_config(target, ARCHITECTURE)
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        assert getattr(config, key) == SMALL[key]
    assert config.max_position_embeddings == 512
    assert config.head_dim == (target.config.head_dim if name != "gpt_neox" else 8)
    assert config.num_key_value_heads == getattr(target.config, "num_key_value_heads", 4)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)
    assert (config.model_type, config.num_hidden_layers, config.hidden_act) == ("llama", 1, "silu")
    assert config.tie_word_embeddings is config.attention_bias is config.mlp_bias is False
    assert config.architectures == [ARCHITECTURE]


@pytest.mark.parametrize("kind", ["llama3", "yarn", "linear"])
def test_rotary_scaling_is_the_targets(kind: str) -> None:
    target = make_target(f"llama, {kind}")
    rotary = drafter_config(target, ARCHITECTURE).rope_parameters
    assert rotary == target.config.rope_parameters
    assert rotary["rope_type"] == kind
    assert rotary is not target.config.rope_parameters


def test_longrope_of_whole_heads_is_kept_and_of_parts_left_out() -> None:
    rotary = drafter_config(make_target("phi3, longrope"), ARCHITECTURE).rope_parameters
    assert (rotary["rope_type"], len(rotary["short_factor"])) == ("longrope", 4)

    target = make_target("phi3, longrope")
    target.config.rope_parameters["short_factor"] = [1.0, 2.0, 3.0]
    target.config.rope_parameters["long_factor"] = [1.0, 2.0, 3.0]
    target.config.rope_parameters["partial_rotary_factor"] = 0.75
    rotary = drafter_config(target, ARCHITECTURE).rope_parameters
    assert rotary == {"rope_type": "default", "rope_theta": 1e4}


def test_whole_heads_are_rotated_where_the_target_rotates_a_part() -> None:
    target = make_target("gpt_neox")
    assert target.config.rope_parameters["partial_rotary_factor"] == 0.25
    rotary = drafter_config(target, ARCHITECTURE).rope_parameters
    assert rotary == {"rope_type": "default", "rope_theta": 10_000}


def test_positions_of_full_attention_where_layers_differ() -> None:
    target = make_target("gemma3")
    rotary = drafter_config(target, ARCHITECTURE).rope_parameters
    assert rotary == target.config.rope_parameters["full_attention"]
    assert rotary != target.config.rope_parameters["sliding_attention"]


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("gpt2", {}, "its positions are not rotary"),
        ("bloom", {}, "its positions are not rotary"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "with dynamic RoPE scaling",
        ),
    ],
)
def test_what_no_llama_layer_describes_is_refused(
    model_type: str, changes: dict[str, object], reason: str
) -> None:
    target = make_target(model_type, **changes)
    with pytest.raises(
        TargetError, match=rf"^A drafter for {model_type} .* cannot be made: .*{reason}"
    ):
        drafter_config(target, ARCHITECTURE)


def test_a_target_without_attention_is_refused() -> None:
    config = transformers.MambaConfig(
        vocab_size=260, hidden_size=32, state_size=4, num_hidden_layers=2
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    target = TransformersTarget(model, byte_tokenizer(), TargetSource("mamba"))
    with pytest.raises(TargetError, match="has no num_attention_heads and no max_position"):
        drafter_config(target, ARCHITECTURE)


def test_an_encoder_decoder_is_refused() -> None:
    target = make_target("llama")
    target.config.is_encoder_decoder = True
    with pytest.raises(TargetError, match="it is an encoder-decoder"):
        drafter_config(target, ARCHITECTURE)


def test_heads_that_do_not_divide_the_hidden_size_are_refused() -> None:
    target = make_target("qwen3", num_attention_heads=6, num_key_value_heads=2)
    with pytest.raises(TargetError, match="its hidden size, 32, is not a multiple of its 6"):
        drafter_config(target, ARCHITECTURE)


@pytest.mark.parametrize("name", ["llama", "gemma", "gemma2", "gemma3", "granite"])
def test_embeddings_are_the_rows_that_engines_hand_over(name: str) -> None:
    """Gemma's module scales what it looks up by sqrt(H); engines do so outside of the matrix."""
    target = make_target(name)
    ids = torch.tensor([[3, 7], [0, 9]])
    embedded = token_embeddings(target.embedding, ids)
    assert torch.equal(embedded, target.embedding.weight[ids])
    scale = 32**0.5 if name.startswith("gemma") else 1.0
    torch.testing.assert_close(embedded * scale, target.embedding(ids))
