"""Both kinds of drafters for targets of many families: drafting, saving, loading."""

import json
from pathlib import Path

import pytest
import torch
from drafters.targets import TARGETS, make_target
from safetensors.torch import load_file, save_file
from torch import Tensor

from sfdd.artifacts import Provenance
from sfdd.drafters.drafter import Drafter, read_provenance, target_mismatch
from sfdd.drafters.eagle import EagleDrafter
from sfdd.drafters.eagle3 import Eagle3Drafter, default_aux_layers
from sfdd.drafters.layer import token_embeddings
from sfdd.drafters.loading import METHODS, load_drafter, new_drafter, untrained_like
from sfdd.errors import DrafterError, UsageError
from sfdd.targets.body import new_cache
from sfdd.targets.transformers_target import TransformersTarget

CHOSEN = torch.tensor([0, 3, 4, 9, 100, 259])


def vocabulary(method: str) -> Tensor | None:
    return CHOSEN if method == "eagle3" else None


def make(method: str, target: TransformersTarget, seed: int = 0) -> Drafter:
    return new_drafter(method, target, seed=seed, draft_to_target=vocabulary(method))


def reading(drafter: Drafter, target: TransformersTarget, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What it reads of a conversation [1, T]: embeddings [1, T - 1, H] and fused states."""
    with torch.no_grad():
        hidden, aux = target.hidden_and_aux_states(ids, aux_layers=drafter.aux_layers)
    states = hidden if aux is None else aux
    return token_embeddings(target.embedding, ids[:, 1:]), drafter.fuse(states[:, :-1])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", TARGETS)
@torch.no_grad()
def test_with_and_without_cache_saved_and_loaded(name: str, method: str, tmp_path: Path) -> None:
    target = make_target(name)
    drafter = make(method, target)
    ids = torch.randint(3, 260, (1, 30))
    embeddings, states = reading(drafter, target, ids)
    whole = drafter(embeddings, states)  # [1, T - 1, H]
    assert whole.std() > 1e-3

    cache = new_cache()
    pieces = [
        drafter(embeddings[:, part], states[:, part], cache=cache)
        for part in (slice(0, 12), slice(12, 13), slice(13, 29))
    ]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-4, atol=1e-5)

    head = drafter.head(target)
    logits = head(drafter.normed(whole[0]))
    assert logits.shape == (29, 6 if method == "eagle3" else 260)
    assert logits.dtype == torch.float32

    drafter.save(tmp_path, Provenance({"target": "t"}))
    loaded = load_drafter(tmp_path, target)
    assert type(loaded) is type(drafter)
    assert loaded.aux_layers == drafter.aux_layers
    assert torch.equal(
        loaded(embeddings, loaded.fuse(states) if method == "eagle" else states), whole
    )
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    assert read_provenance(tmp_path).identity == {"target": "t"}


@pytest.mark.parametrize("method", METHODS)
def test_padding_reaches_nothing(method: str) -> None:
    target = make_target("llama")
    drafter = make(method, target)
    ids = torch.randint(3, 260, (1, 20))
    embeddings, states = reading(drafter, target, ids)
    padded = [torch.cat([x, torch.full((1, 7, 32), 9.0)], dim=1) for x in (embeddings, states)]
    torch.testing.assert_close(drafter(*padded)[:, :19], drafter(embeddings, states))


@pytest.mark.parametrize("method", METHODS)
def test_seed_decides_the_weights_and_nothing_else_random(method: str) -> None:
    target = make_target("llama")
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, same, other = (make(method, target, seed) for seed in (1, 1, 2))
    assert torch.rand(1) == expected
    assert torch.equal(one.fc.weight, same.fc.weight)
    assert not torch.equal(one.fc.weight, other.fc.weight)


EAGLE_NAMES = {
    "fc.weight": [32, 64],
    "layers.0.mlp.down_proj.weight": [32, 64],
    "layers.0.mlp.gate_proj.weight": [64, 32],
    "layers.0.mlp.up_proj.weight": [64, 32],
    "layers.0.post_attention_layernorm.weight": [32],
    "layers.0.self_attn.k_proj.weight": [16, 32],
    "layers.0.self_attn.o_proj.weight": [32, 32],
    "layers.0.self_attn.q_proj.weight": [32, 32],
    "layers.0.self_attn.v_proj.weight": [16, 32],
}
EAGLE3_NAMES = {
    "d2t": [6],
    "fc.weight": [32, 96],
    "lm_head.weight": [6, 32],
    "midlayer.hidden_norm.weight": [32],
    "midlayer.input_layernorm.weight": [32],
    "midlayer.mlp.down_proj.weight": [32, 64],
    "midlayer.mlp.gate_proj.weight": [64, 32],
    "midlayer.mlp.up_proj.weight": [64, 32],
    "midlayer.post_attention_layernorm.weight": [32],
    "midlayer.self_attn.k_proj.weight": [16, 64],
    "midlayer.self_attn.o_proj.weight": [32, 32],
    "midlayer.self_attn.q_proj.weight": [32, 64],
    "midlayer.self_attn.v_proj.weight": [16, 64],
    "norm.weight": [32],
    "t2d": [260],
}


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
@pytest.mark.parametrize(("method", "names"), [("eagle", EAGLE_NAMES), ("eagle3", EAGLE3_NAMES)])
def test_files_are_those_that_engines_load(
    name: str, method: str, names: dict[str, list[int]], tmp_path: Path
) -> None:
    drafter = make(method, make_target(name))
    drafter.save(tmp_path, Provenance({}))
    weights = load_file(tmp_path / "model.safetensors")
    assert {key: list(tensor.shape) for key, tensor in weights.items()} == names
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["dtype"] == "float32"
    if method == "eagle":
        assert config["architectures"] == ["LlamaForCausalLM"]
        return
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    layers = [1, 2, 3]
    assert config["eagle_config"] == {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": layers,
    }
    assert config["eagle_aux_hidden_state_layer_ids"] == layers
    assert (config["draft_vocab_size"], config["target_hidden_size"]) == (6, 32)
    for key in ("norm_before_residual", "norm_before_fc", "norm_output"):
        assert config[key] is False
    # Offsets: target id = draft id + d2t.
    assert weights["d2t"].tolist() == [0, 2, 2, 6, 96, 254]
    assert weights["d2t"].dtype == torch.int64
    assert weights["t2d"].dtype == torch.bool
    assert weights["t2d"].nonzero()[:, 0].tolist() == CHOSEN.tolist()


def test_saved_in_another_dtype(tmp_path: Path) -> None:
    target = make_target("llama")
    drafter = make("eagle3", target).to(torch.bfloat16)
    drafter.save(tmp_path, Provenance({}))
    weights = load_file(tmp_path / "model.safetensors")
    assert weights["fc.weight"].dtype == torch.bfloat16
    assert weights["d2t"].dtype == torch.int64
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_drafter(tmp_path, target).draft_to_target.tolist() == CHOSEN.tolist()


def test_eagle3_head_starts_as_the_targets() -> None:
    target = make_target("llama")
    rows = target.model.get_output_embeddings().weight[CHOSEN]
    drafter = make("eagle3", target)
    assert torch.equal(drafter.lm_head.weight, rows)
    logits = drafter.head(target)(drafter.normed(100 * torch.randn(4000, 32)))
    assert 0.8 < logits.std() < 1.2
    drafter.lm_head.weight.data.zero_()  # a copy: the target keeps its own
    assert target.model.get_output_embeddings().weight[CHOSEN].abs().sum() > 0


def test_eagle3_by_hand() -> None:
    """Attention reads both norms' outputs, the residual is the state before its norm."""
    target = make_target("llama")
    drafter = make("eagle3", target)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layer, eps = drafter.body.layers[0], drafter.config.rms_norm_eps
    embeddings, states = torch.randn(2, 1, 1, 32)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    read = torch.cat(
        [
            norm(embeddings, layer.input_layernorm.weight),
            norm(states, layer.hidden_norm.weight),
        ],
        dim=-1,
    )
    # One position: attention gives its value, each key head shared by two heads.
    value = (read @ layer.self_attn.v_proj.weight.T).view(2, 8).repeat_interleave(2, dim=0)
    after = states + value.flatten() @ layer.self_attn.o_proj.weight.T
    x = norm(after, layer.post_attention_layernorm.weight)
    gate, up = x @ layer.mlp.gate_proj.weight.T, x @ layer.mlp.up_proj.weight.T
    expected = after + (torch.nn.functional.silu(gate) * up) @ layer.mlp.down_proj.weight.T
    torch.testing.assert_close(drafter(embeddings, states), expected)
    logits = norm(expected, drafter.norm.weight) @ drafter.lm_head.weight.T
    torch.testing.assert_close(drafter.head(target)(drafter.normed(expected)), logits)


def test_eagle_by_hand() -> None:
    """No norm before attention, none at the end."""
    target = make_target("llama")
    drafter = make("eagle", target)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layer, eps = drafter.body.layers[0], drafter.config.rms_norm_eps
    embeddings, states = torch.randn(2, 1, 1, 32)
    read = torch.cat([embeddings, states], dim=-1) @ drafter.fc.weight.T
    value = (read @ layer.self_attn.v_proj.weight.T).view(2, 8).repeat_interleave(2, dim=0)
    after = read + value.flatten() @ layer.self_attn.o_proj.weight.T
    x = after / (after.square().mean(-1, keepdim=True) + eps).sqrt()
    x = x * layer.post_attention_layernorm.weight
    gate, up = x @ layer.mlp.gate_proj.weight.T, x @ layer.mlp.up_proj.weight.T
    expected = after + (torch.nn.functional.silu(gate) * up) @ layer.mlp.down_proj.weight.T
    torch.testing.assert_close(drafter(embeddings, states), expected)


@pytest.mark.parametrize(
    ("num_layers", "layers"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (4, (1, 2, 3)),
        (5, (1, 2, 4)),
        (6, (1, 3, 5)),
        (7, (2, 3, 4)),
        (30, (2, 15, 27)),
        (32, (2, 16, 29)),
    ],
)
def test_default_layers(num_layers: int, layers: tuple[int, ...]) -> None:
    assert default_aux_layers(num_layers) == layers


def test_layers_of_ones_own_are_put_in_order() -> None:
    target = make_target("llama", num_hidden_layers=6)
    drafter = new_drafter("eagle3", target, aux_layers=[6, 1, 4])
    assert drafter.aux_layers == (1, 4, 6)
    assert drafter.fc.in_features == 3 * 32
    assert drafter.draft_to_target.tolist() == list(range(260))


@pytest.mark.parametrize("layers", [[], [1], [1, 2], [1, 2, 2], [0, 1, 2], [1, 2, 5], [1, 2, 3, 4]])
def test_layers_the_target_does_not_have_are_refused(layers: list[int]) -> None:
    with pytest.raises(UsageError, match="must be 3 different layers of the target, from 1 to 4"):
        new_drafter("eagle3", make_target("llama"), aux_layers=layers)


def test_small_targets_have_fewer_layers_to_read() -> None:
    target = make_target("llama", num_hidden_layers=2)
    assert new_drafter("eagle3", target).fc.in_features == 2 * 32
    with pytest.raises(UsageError, match="must be 2 different layers"):
        new_drafter("eagle3", target, aux_layers=[1, 2, 3])


def test_methods() -> None:
    target = make_target("llama")
    assert METHODS == ("eagle", "eagle3")
    with pytest.raises(UsageError, match="--method is 'medusa'; choose one of eagle, eagle3"):
        new_drafter("medusa", target)
    for option in ({"aux_layers": [1, 2, 3]}, {"draft_to_target": CHOSEN}):
        with pytest.raises(UsageError, match="are for --method eagle3"):
            new_drafter("eagle", target, **option)


@pytest.mark.parametrize("method", METHODS)
def test_untrained_like(method: str) -> None:
    target = make_target("llama", num_hidden_layers=6)
    layers = [2, 3, 5] if method == "eagle3" else None
    drafter = new_drafter(
        method, target, seed=1, aux_layers=layers, draft_to_target=vocabulary(method)
    )
    other = untrained_like(drafter, target, seed=2)
    assert type(other) is type(drafter)
    assert other.aux_layers == drafter.aux_layers
    assert {n: p.shape for n, p in other.state_dict().items()} == {
        n: p.shape for n, p in drafter.state_dict().items()
    }
    if method == "eagle3":
        assert other.draft_to_target.tolist() == CHOSEN.tolist()
    assert not torch.equal(other.fc.weight, drafter.fc.weight)


@pytest.fixture(params=METHODS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make(request.param, make_target("llama")).save(tmp_path, Provenance({}))
    return tmp_path


def refused(directory: Path, match: str, target: TransformersTarget | None = None) -> None:
    with pytest.raises(DrafterError, match=match):
        load_drafter(directory, target or make_target("llama"))


def test_missing_or_damaged(saved: Path, tmp_path: Path) -> None:
    refused(tmp_path / "none", r"^No drafter in .*none. Train one with 'sfdd train-draft'\.$")
    (saved / "model.safetensors").write_bytes(b"{}")
    refused(saved, "is damaged: .* Train it again with 'sfdd train-draft --overwrite'")
    (saved / "model.safetensors").unlink()
    refused(saved, "is damaged")
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"num_attention_heads": 5}))
    refused(saved, "is damaged")
    (saved / "config.json").write_text("{")
    refused(saved, "is damaged")
    (saved / "provenance.json").write_text("{")
    with pytest.raises(DrafterError, match=r"has no readable provenance.json"):
        read_provenance(saved)


def test_weights_that_are_not_finite(saved: Path) -> None:
    drafter = load_drafter(saved, make_target("llama"))
    drafter.fc.weight.data[0, 0] = float("nan")
    with pytest.raises(DrafterError, match="weights are not finite, so it was not saved"):
        drafter.save(saved, Provenance({}))
    weights = load_file(saved / "model.safetensors")
    weights["fc.weight"][0, 0] = float("inf")
    save_file(weights, saved / "model.safetensors")
    refused(saved, "some of its weights are not finite")


def test_another_target(saved: Path) -> None:
    refused(
        saved, "a vocabulary of 260, but target .* one of 99", make_target("llama", vocab_size=99)
    )
    other = make_target("llama", hidden_size=64, head_dim=16)
    refused(saved, "a hidden size of 32, but target .* one of 64", other)


def test_fewer_layers_than_it_reads(tmp_path: Path) -> None:
    make("eagle3", make_target("llama")).save(tmp_path, Provenance({}))
    refused(
        tmp_path, "reads layer 3, but target .* has 2", make_target("llama", num_hidden_layers=2)
    )


def test_names_and_shapes_of_its_own_config(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    fc = weights.pop("fc.weight")
    save_file(weights, saved / "model.safetensors")
    refused(saved, r"does not fit its own config.json: Missing key.*fc.weight.*\.$")
    save_file(weights | {"fc.weight": fc[:, :-1].contiguous()}, saved / "model.safetensors")
    refused(saved, r"does not fit its own config.json: size mismatch for fc.weight.*\.$")


def test_a_model_that_is_no_drafter(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    refused(
        saved,
        "is not in the form that sfdd trains: .* names GPT2LMHeadModel, not one of LlamaForCausalLM, "
        r"LlamaForCausalLMEagle3\. Give one of 'sfdd train-draft', such as RUN/drafter\.$",
    )


def test_a_drafter_in_sglangs_form_is_not_called_damaged(tmp_path: Path) -> None:
    make("eagle", make_target("llama")).save(tmp_path, Provenance({}))
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLMEagle"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(
        tmp_path, r"is in SGLang's form\. Give the one that it was exported from, by default RUN/"
    )


def test_as_served() -> None:
    target = make_target("llama")
    drafter = make("eagle3", target).train().as_served(torch.bfloat16)
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.bfloat16}
    assert drafter.body.rotary_emb.inv_freq.dtype == torch.float32
    assert not drafter.training


def test_vocabulary_maps_are_checked(tmp_path: Path) -> None:
    make("eagle3", make_target("llama")).save(tmp_path, Provenance({}))
    weights = load_file(tmp_path / "model.safetensors")

    def changed(match: str, **tensors: Tensor) -> None:
        save_file(weights | tensors, tmp_path / "model.safetensors")
        refused(tmp_path, match)

    # Absolute ids where offsets belong: out of the vocabulary, or at odds with t2d.
    changed("d2t does not hold the offsets", d2t=CHOSEN)
    changed("d2t and t2d name different tokens", d2t=torch.tensor([0, 3, 4, 9, 100, 200]))
    changed("d2t does not hold the offsets", d2t=weights["d2t"].flip(0))
    changed("d2t is not a map of 6 tokens", d2t=weights["d2t"][:-1].contiguous())
    changed("d2t and t2d name different tokens", t2d=~weights["t2d"])
    del weights["d2t"]
    changed("d2t is not a map of 6 tokens")


def test_config_keys_of_eagle3_are_needed(tmp_path: Path) -> None:
    make("eagle3", make_target("llama")).save(tmp_path, Provenance({}))
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids"):
        without = {k: v for k, v in config.items() if k != key}
        (tmp_path / "config.json").write_text(json.dumps(without))
        refused(tmp_path, f"its config.json has no {key}")


def test_target_mismatch_ignores_dtype_and_what_is_not_known() -> None:
    provenance = Provenance({"target": "a", "dtype": "bfloat16", "learning_rate": 1.0})
    assert target_mismatch(provenance, {"target": "a", "dtype": "float32"}) == []
    assert target_mismatch(provenance, {"target": "b"}) == ["target (was a, now b)"]


def test_kinds() -> None:
    assert (EagleDrafter.method, Eagle3Drafter.method) == METHODS
