"""Every kind of damage is found, and said in one sentence; nothing else is."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_tiny_target
from drafters.targets import TARGETS, make_target
from export.helpers import damaged
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from sfdd.artifacts import Provenance
from sfdd.drafters.loading import new_drafter
from sfdd.drafters.serving import why_not_served
from sfdd.errors import DrafterError
from sfdd.export.checkpoint import read_checkpoint
from sfdd.export.config import CheckConfig, ExportConfig
from sfdd.export.drafters import _facts, check_drafter, export_drafter
from sfdd.export.eagle3 import vocabulary_findings
from sfdd.export.findings import findings
from sfdd.export.layouts import Sizes
from sfdd.targets.transformers_target import TransformersTarget

Damage = Callable[[dict[str, Any]], object]
ROPE = {"rope_type": "default", "rope_theta": 500_000.0}
AUX = "eagle_aux_hidden_state_layer_ids"


def put(**values: Any) -> Damage:
    return lambda tensors: tensors.update({k.replace("__", "."): v for k, v in values.items()})


def drop(name: str) -> Damage:
    return lambda entries: entries.pop(name)


def rename(old: str, new: str) -> Damage:
    return lambda entries: entries.update({new: entries.pop(old)})


def check(
    trained: Path, to: Path, engine: str = "vllm", target: Path | None = None, **damage: Damage
) -> tuple[str, ...]:
    """What is said of a damaged drafter."""
    report = check_drafter(
        CheckConfig(
            engine,
            damaged(trained, to, **damage),
            target=str(target) if target else None,
            files_only=target is None,
        )
    )
    assert report.accepted == (not report.rejections)
    return report.rejections


TENSORS = [
    (
        rename("midlayer.hidden_norm.weight", "midlayer.hidden_layernorm.weight"),
        "midlayer.hidden_norm.weight is missing, and midlayer.hidden_layernorm.weight is like it: vLLM "
        "knows the first name alone.",
    ),
    (
        drop("norm.weight"),
        "norm.weight is missing, and vLLM would run with what memory holds in its place.",
    ),
    (drop("d2t"), "d2t is missing, so vLLM takes draft tokens for the target's first tokens."),
    (
        put(extra__weight=torch.zeros(3)),
        "extra.weight is unknown to vLLM, which stops at it: remove it.",
    ),
    (
        put(fc__bias=torch.zeros(32)),
        "fc.bias is unknown to vLLM, which leaves it out without a word: remove it.",
    ),
    (
        put(fc__weight=torch.zeros(32, 64)),
        "fc.weight is [32, 64], but by its sizes in config.json vLLM makes it [32, 96].",
    ),
    (
        put(midlayer__self_attn__q_proj__weight=torch.zeros(32, 32)),
        "midlayer.self_attn.q_proj.weight is [32, 32], but by its sizes in config.json vLLM makes it "
        "[32, 64].",
    ),
    (
        put(embed_tokens__weight=torch.zeros(250, 32)),
        "embed_tokens.weight is [250, 32], but by its sizes in config.json vLLM makes it [260, 32].",
    ),
    (
        lambda t: t.update(d2t=t["d2t"][:-1]),
        "d2t has 99 entries, but config.json a draft_vocab_size of 100.",
    ),
    (
        lambda t: t.update(t2d=t["t2d"][:-2]),
        "t2d has 258 entries, but config.json a vocab_size of 260.",
    ),
    (
        lambda t: t.update(d2t=t["d2t"] + torch.arange(100)),
        "d2t holds the target's token ids, and engines add the draft token's own id to what it holds: "
        "subtract 0, 1, 2 … from them.",
    ),
    (
        lambda t: t["d2t"].__setitem__(-1, 161),
        "d2t maps draft token 99 to 260, outside the target's vocabulary of 260: does it hold ids, not "
        "what is to be added to get them?",
    ),
    (
        lambda t: t["d2t"].__setitem__(0, -1),
        "d2t maps draft token 0 to -1, outside the target's vocabulary of 260: does it hold ids, not "
        "what is to be added to get them?",
    ),
    (
        lambda t: t["d2t"].__setitem__(50, 1),
        "d2t maps draft token 50 to 51, not above the 101 before it, but sfdd's are in the order of the "
        "target's.",
    ),
    (
        lambda t: t["t2d"].__setitem__(slice(3, 5), torch.tensor([False, True])),
        "d2t and t2d name different tokens, so one of them is another drafter's.",
    ),
    (lambda t: t.update(d2t=t["d2t"].int()), "d2t is of int32, but must be of int64."),
    (lambda t: t.update(t2d=t["t2d"].to(torch.uint8)), "t2d is of uint8, but must be of bool."),
    (
        lambda t: t["fc.weight"].__setitem__((0, 0), float("nan")),
        "fc.weight has values that are not finite: export in bfloat16 rather than float16, or train "
        "again with a lower --learning-rate.",
    ),
    (
        lambda t: t.update({"norm.weight": t["norm.weight"].bfloat16()}),
        "The weights are of bfloat16 and float32; they must be of one dtype.",
    ),
    (
        lambda t: t.update({n: x.half() for n, x in t.items() if x.is_floating_point()}),
        "config.json has dtype float32, but the weights are of float16.",
    ),
]


@pytest.mark.parametrize(("damage", "sentence"), TENSORS)
def test_tensors(damage: Damage, sentence: str, trained: Path, tmp_path: Path) -> None:
    assert check(trained / "eagle3", tmp_path / "in", tensors=damage) == (sentence,)


SETTINGS = [
    (
        put(architectures=["LlamaForCausalLMEagle4"]),
        "config.json has architectures ['LlamaForCausalLMEagle4'], but vLLM loads what sfdd trains as "
        "['LlamaForCausalLMEagle3']: if this is that, write it with 'sfdd export --for vllm'.",
    ),
    (
        drop("architectures"),
        "config.json has architectures None, but vLLM loads what sfdd trains as "
        "['LlamaForCausalLMEagle3']: if this is that, write it with 'sfdd export --for vllm'.",
    ),
    (
        put(model_type="qwen3"),
        "config.json has model_type 'qwen3', but the drafters that sfdd trains are 'llama'.",
    ),
    (
        put(num_hidden_layers=2),
        "config.json has num_hidden_layers 2, but the drafters that sfdd trains have 1.",
    ),
    (
        drop("intermediate_size"),
        "config.json lacks a size that every engine needs, or it is no number ('intermediate_size').",
    ),
    (
        drop("draft_vocab_size"),
        "config.json has no draft_vocab_size, and vLLM takes the whole vocabulary for it: write "
        "lm_head's rows.",
    ),
    *(
        (
            damage,
            f"config.json sets {what}, which the drafters that sfdd trains do without: leave it out if "
            "this is one of them.",
        )
        for damage, what in [
            (put(norm_before_residual=True), "norm_before_residual"),
            (put(norm_output=True), "norm_output"),
            (lambda c: c["eagle_config"].update(norm_before_fc=True), "norm_before_fc"),
            (lambda c: c["eagle_config"].update(fc_norm=True), "fc_norm"),
            (put(quantization_config={"quant_method": "fp8"}), "quantization_config"),
            (put(partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
            (
                lambda c: c["rope_parameters"].update(partial_rotary_factor=0.25),
                "partial_rotary_factor 0.25",
            ),
            (put(sliding_window=512), "sliding_window"),
            (put(layer_types=["sliding_attention"]), "layer_types ['sliding_attention']"),
            (put(logit_scale=0.0625), "logit_scale 0.0625"),
        ]
    ),
    (
        put(num_aux_hidden_states=4),
        "config.json has num_aux_hidden_states 4, but names 3 aux layers.",
    ),
    (
        drop("rope_parameters"),
        "config.json has no rope_theta, so vLLM takes 10000: write the target's.",
    ),
    (
        drop(AUX),
        "config.json names aux layers in eagle_config alone, where vLLM and SGLang count differently: "
        f"write them as {AUX} at its top level, too, as vLLM counts.",
    ),
    (put(hidden_act="gelu"), "config.json has hidden_act 'gelu', but vLLM runs 'silu' alone."),
    (
        put(tie_word_embeddings=True),
        "config.json ties the head to the embeddings, so vLLM may not use the drafter's own lm_head: set "
        "tie_word_embeddings to false.",
    ),
    (
        put(**{AUX: [2, 5, 4]}),
        "config.json names aux layers [2, 5, 4], but sfdd's are distinct, ascending, from 1.",
    ),
    (
        put(**{AUX: [0, 4, 5]}),
        "config.json names aux layers [0, 4, 5], but sfdd's are distinct, ascending, from 1.",
    ),
    (
        lambda c: c["eagle_config"].update({AUX: [2, 4, 5, 6]}),
        "eagle_config names 4 aux layers, by which vLLM makes fc, not 3.",
    ),
    (
        lambda c: [c.pop(AUX), c["eagle_config"].pop(AUX)],
        f"config.json names no aux layers ({AUX}), so every engine takes its own.",
    ),
    (
        lambda c: c["eagle_config"].update(use_aux_hidden_state=False),
        "config.json has use_aux_hidden_state false, so the drafter would be given no layers.",
    ),
]


@pytest.mark.parametrize(("damage", "sentence"), SETTINGS)
def test_settings(damage: Damage, sentence: str, trained: Path, tmp_path: Path) -> None:
    assert check(trained / "eagle3", tmp_path / "in", config=damage) == (sentence,)


@pytest.mark.parametrize(
    "damage",
    [
        put(architectures=["LlamaForCausalLM"]),  # vLLM adds "Eagle3"
        put(layer_types=["full_attention"], partial_rotary_factor=1.0, logit_scale=1),
        lambda c: c.update(
            norm_before_fc=True, eagle_config={**c["eagle_config"], "norm_before_fc": False}
        ),
        lambda c: c.update(rope_theta=c.pop("rope_parameters")["rope_theta"]),
    ],
)
def test_settings_that_vllm_takes(damage: Damage, trained: Path, tmp_path: Path) -> None:
    assert check(trained / "eagle3", tmp_path / "in", config=damage) == ()


def test_another_draft_vocabulary_than_the_heads(trained: Path, tmp_path: Path) -> None:
    said = check(trained / "eagle3", tmp_path / "in", config=put(draft_vocab_size=90))
    assert said == (
        "lm_head.weight is [100, 32], but by its sizes in config.json vLLM makes it [90, 32].",
        "d2t has 100 entries, but config.json a draft_vocab_size of 90.",
    )


def test_a_map_for_the_whole_vocabulary_stops_vllm(trained: Path, tmp_path: Path) -> None:
    whole = export_drafter(ExportConfig("vllm", tmp_path / "out", trained / "whole")).output
    zeros = torch.zeros(260, dtype=torch.int64)
    assert check(whole, tmp_path / "sglang", "sglang", tensors=put(d2t=zeros))[0].startswith(
        "config.json has a rope_theta"
    )
    assert check(whole, tmp_path / "vllm", tensors=put(d2t=zeros)) == (
        "d2t maps a draft vocabulary, but draft_vocab_size is the whole one, and vLLM stops at a map "
        "that it has no use for: write it with 'sfdd export --for vllm'.",
    )


def test_vllm_knows_the_layer_by_two_names(trained: Path, tmp_path: Path) -> None:
    def renamed(tensors: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.startswith("midlayer.")]:
            tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)

    assert check(trained / "eagle3", tmp_path / "vllm", tensors=renamed) == ()
    out = export_drafter(ExportConfig("sglang", tmp_path / "out", trained / "eagle3")).output
    said = check(out, tmp_path / "sglang", "sglang", tensors=renamed)
    assert len(said) == 10  # all of the layer's tensors
    assert said[0] == (
        "midlayer.self_attn.q_proj.weight is missing, and layers.0.self_attn.q_proj.weight is like it: "
        "SGLang knows the first name alone."
    )


class TestSGLang:
    @pytest.fixture
    def exported(self, trained: Path, tmp_path: Path) -> Callable[[str], Path]:
        def of(method: str) -> Path:
            config = ExportConfig("sglang", tmp_path / f"sglang-{method}", trained / method)
            return export_drafter(config).output

        return of

    @pytest.mark.parametrize(
        ("method", "tensors", "config", "sentence"),
        [
            (
                "eagle",
                drop("fc.bias"),
                None,
                "fc.bias is missing, and SGLang would run with what memory holds in its place.",
            ),
            (
                "eagle",
                put(extra=torch.zeros(1)),
                None,
                "extra is unknown to SGLang, which leaves it out without a word: remove it.",
            ),
            (
                "eagle",
                None,
                put(architectures=["LlamaForCausalLM"]),
                "config.json has architectures ['LlamaForCausalLM'], but SGLang loads what sfdd trains "
                "as ['LlamaForCausalLMEagle']: if this is that, write it with 'sfdd export --for "
                "sglang'.",
            ),
            (
                "eagle3",
                None,
                lambda c: c["eagle_config"].update({AUX: [2, 4, 5]}),
                "eagle_config names aux layers [2, 4, 5] for [2, 4, 5], but SGLang reads it alone and "
                "counts from 0, [1, 3, 4]: write it with 'sfdd export --for sglang'.",
            ),
            (
                "eagle3",
                None,
                lambda c: c.pop("eagle_config"),
                "eagle_config names aux layers None for [2, 4, 5], but SGLang reads it alone and counts "
                "from 0, [1, 3, 4]: write it with 'sfdd export --for sglang'.",
            ),
            (
                "eagle3",
                None,
                drop("draft_vocab_size"),
                "config.json has no draft_vocab_size, and SGLang stops without it: write lm_head's rows.",
            ),
            (
                "eagle3",
                None,
                drop("rope_theta"),
                "config.json has a rope_theta of 500000.0 in rope_parameters alone, and SGLang on an "
                "older transformers takes 10000: write it with 'sfdd export --for sglang'.",
            ),
        ],
    )
    def test_damage(
        self,
        method: str,
        tensors: Damage | None,
        config: Damage | None,
        sentence: str,
        exported: Callable[[str], Path],
        tmp_path: Path,
    ) -> None:
        given = {"tensors": tensors, "config": config}
        damage = {name: change for name, change in given.items() if change}
        assert check(exported(method), tmp_path / "in", "sglang", **damage) == (sentence,)

    def test_the_last_layer(
        self, exported: Callable[[str], Path], tmp_path: Path, deep_directory: Path
    ) -> None:
        def last(config: dict[str, Any]) -> None:
            config[AUX] = [2, 4, 8]
            config["eagle_config"][AUX] = [1, 3, 7]

        source = exported("eagle3")
        assert check(source, tmp_path / "a", "sglang", config=last) == ()
        assert check(source, tmp_path / "b", "sglang", deep_directory, config=last) == (
            "config.json names aux layer 8, the last, which SGLang cannot hand on.",
        )


class TestTarget:
    def test_of_other_sizes(self, trained: Path, tmp_path: Path) -> None:
        target = save_tiny_target(
            tmp_path / "t", num_hidden_layers=8, vocab_size=300, rope_parameters=ROPE
        )
        assert check(trained / "eagle3", tmp_path / "in", target=target) == (
            "config.json has a vocab_size of 260, but the target one of 300: use the target that it was "
            "trained for.",
        )
        target = save_tiny_target(tmp_path / "u", num_hidden_layers=8, hidden_size=64)
        assert (
            "config.json has a target_hidden_size of 32, but the target one of 64: use the target that "
            "it was trained for."
        ) in check(trained / "eagle", tmp_path / "in2", target=target)

    def test_of_other_rotary_positions_and_norms(self, trained: Path, tmp_path: Path) -> None:
        scaled = {**ROPE, "rope_type": "linear", "factor": 4.0}
        target = save_tiny_target(
            tmp_path / "t", num_hidden_layers=8, rope_parameters=scaled, rms_norm_eps=1e-5
        )
        said = check(trained / "eagle3", tmp_path / "in", target=target)
        assert [sentence.partition(", but")[0] for sentence in said] == [
            "config.json has rope_type default",
            "config.json has no factor",
            "config.json has rms_norm_eps 1e-06",
        ]
        assert said[2] == (
            "config.json has rms_norm_eps 1e-06, but the target 1e-05, by which sfdd trains its "
            "drafters: use the target that it was trained for."
        )

    @pytest.mark.parametrize(
        ("damage", "what"),
        [
            (
                put(rope_parameters={"rope_theta": 1e6}),
                "rope_theta 1000000.0, but the target 500000.0",
            ),
            (drop("rope_parameters"), "rope_theta 10000, but the target 500000.0"),
            (put(head_dim=16), "head_dim 16, but the target 8"),
        ],
    )
    def test_that_rotates_otherwise(
        self, damage: Damage, what: str, trained: Path, tmp_path: Path, deep_directory: Path
    ) -> None:
        said = check(trained / "eagle3", tmp_path / "in", target=deep_directory, config=damage)
        assert [s for s in said if what in s and "by which sfdd trains its drafters" in s]

    @pytest.mark.parametrize("name", TARGETS)
    @pytest.mark.parametrize("method", ["eagle", "eagle3"])
    def test_of_any_family(self, method: str, name: str, tmp_path: Path) -> None:
        """Whatever sfdd trains is what its target asks for; vLLM just may not serve it."""
        target = make_target(name)
        new_drafter(method, target).save(tmp_path, Provenance({}))
        reason = why_not_served(method, target.config.model_type)
        said = list(findings(read_checkpoint(tmp_path), "vllm", _facts(target)))
        assert said == ([reason] if reason else [])

    def test_that_vllm_does_not_serve(
        self, trained: Path, tmp_path: Path, deep_directory: Path, deep_target: TransformersTarget
    ) -> None:
        checkpoint = read_checkpoint(trained / "eagle3")
        facts = _facts(deep_target)
        assert facts is not None
        gemma = replace(facts, model_type="gemma3_text")
        (sentence,) = findings(checkpoint, "vllm", gemma)
        assert sentence.startswith("vLLM 0.32 cannot serve eagle3 drafters for gemma3_text targets")
        assert list(findings(read_checkpoint(trained / "eagle"), "vllm", gemma)) == []

    def test_of_fewer_layers(self, trained: Path, tmp_path: Path) -> None:
        target = save_tiny_target(tmp_path / "t", num_hidden_layers=2, rope_parameters=ROPE)
        assert check(trained / "eagle3", tmp_path / "in", target=target) == (
            "config.json names aux layer 5, but the target has 2 layers.",
        )


class TestFiles:
    @pytest.mark.parametrize("name", ["pytorch_model.bin", "optimizer.pt", "data.pkl"])
    def test_pickles(self, name: str, trained: Path, tmp_path: Path) -> None:
        source = damaged(trained / "eagle", tmp_path / "in")
        (source / name).write_bytes(b"\x80\x04N.")
        assert check_drafter(CheckConfig("vllm", source)).rejections == (
            f"{name} is a pickle, which can run code when it is opened, and engines read those, too: "
            "remove it.",
        )

    def test_a_second_file_of_tensors(self, trained: Path, tmp_path: Path) -> None:
        source = damaged(trained / "eagle", tmp_path / "in")
        save_file({"fc.weight": torch.zeros(32, 64)}, source / "older.safetensors")
        with pytest.raises(
            DrafterError, match=r"fc\.weight is in both model\.s.* and older\.safet"
        ):
            read_checkpoint(source)

    @pytest.mark.parametrize(
        ("file", "content", "sentence"),
        [
            ("config.json", None, "has no config.json, by which engines know what they load"),
            ("config.json", b"{", "config.json is not JSON"),
            ("config.json", b"[]", "config.json is not a JSON object"),
            ("model.safetensors", None, "has no model.safetensors, or any other safetensors file"),
            ("model.safetensors", b"\x10", "model.safetensors is damaged"),
        ],
    )
    def test_damaged_files(
        self, file: str, content: bytes | None, sentence: str, trained: Path, tmp_path: Path
    ) -> None:
        source = damaged(trained / "eagle", tmp_path / "in")
        if content is None:
            (source / file).unlink()
        else:
            (source / file).write_bytes(content)
        for engine in ("vllm", "sglang"):
            with pytest.raises(DrafterError, match=sentence):
                check_drafter(CheckConfig(engine, source))
            with pytest.raises(DrafterError, match=sentence):
                export_drafter(ExportConfig(engine, tmp_path / "out", source))

    def test_no_directory(self, tmp_path: Path) -> None:
        with pytest.raises(DrafterError, match=r"no directory .*/drafter\. Train a drafter with"):
            check_drafter(CheckConfig("vllm", run=tmp_path))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=5,
)


@settings(max_examples=50, deadline=None)
@example(key="architectures", value=5)
@example(key="eagle_config", value=[2, 4, 5])
@example(key=AUX, value=["2", None])
@example(key="rope_parameters", value="default")
@example(key="num_attention_heads", value=0)
@example(key="dtype", value=["float32"])
@given(
    key=st.sampled_from(
        [
            *(
                "hidden_size",
                "num_attention_heads",
                "vocab_size",
                "draft_vocab_size",
                "head_dim",
                AUX,
            ),
            *("eagle_config", "rope_parameters", "architectures", "dtype", "target_hidden_size"),
        ]
    ),
    value=JSON,
)
def test_no_setting_is_a_traceback(
    key: str, value: Any, trained: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever stands in config.json, check and export answer with sentences."""
    folder = tmp_path_factory.mktemp("odd")
    source = damaged(trained / "eagle3", folder / "in", config=put(**{key: value}))
    for engine in ("vllm", "sglang"):
        check_drafter(CheckConfig(engine, source))
        with suppress(DrafterError):
            export_drafter(ExportConfig(engine, folder / engine, source))


SIZES = Sizes(32, 32, 64, 4, 2, 8, vocabulary=12, draft_vocabulary=4, aux_layers=3)


@given(chosen=st.sets(st.integers(0, 11), min_size=4, max_size=4))
def test_every_choice_of_tokens_is_taken_and_no_absolute_map(chosen: set[int]) -> None:
    """Ids 0, 1, 2, 3 apart, of which an absolute map is none of offsets: t2d tells."""
    ids = torch.tensor(sorted(chosen))
    t2d = torch.zeros(12, dtype=torch.bool).index_fill(0, ids, True)
    assert list(vocabulary_findings(ids - torch.arange(4), t2d, SIZES)) == []
    (sentence,) = vocabulary_findings(ids, t2d, SIZES)
    assert sentence.startswith("d2t holds the target's token ids")
