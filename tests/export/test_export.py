"""A drafter as each engine loads it, by hand-written lists of what that is."""

import json
from pathlib import Path

import pytest
import torch
from conftest import save_tiny_target
from export.conftest import DRAFT_TO_TARGET
from export.helpers import Tensors, damaged, read_config, shapes
from safetensors.torch import load_file
from transformers import LlamaConfig

from sfdd.artifacts import Provenance
from sfdd.drafters.drafter import read_provenance
from sfdd.drafters.layer import token_embeddings
from sfdd.drafters.loading import load_drafter
from sfdd.errors import ArtifactError, DrafterError, TargetError
from sfdd.export.checkpoint import read_checkpoint
from sfdd.export.config import CheckConfig, ExportConfig
from sfdd.export.drafters import check_drafter, export_drafter
from sfdd.export.layouts import as_trained
from sfdd.targets.transformers_target import TransformersTarget

ENGINES = ("vllm", "sglang")
METHODS = ("eagle", "eagle3", "whole")

EAGLE = {
    "fc.weight": [32, 64],
    "layers.0.self_attn.q_proj.weight": [32, 32],
    "layers.0.self_attn.k_proj.weight": [16, 32],
    "layers.0.self_attn.v_proj.weight": [16, 32],
    "layers.0.self_attn.o_proj.weight": [32, 32],
    "layers.0.mlp.gate_proj.weight": [64, 32],
    "layers.0.mlp.up_proj.weight": [64, 32],
    "layers.0.mlp.down_proj.weight": [32, 64],
    "layers.0.post_attention_layernorm.weight": [32],
}
EAGLE3 = {
    "fc.weight": [32, 96],
    "midlayer.input_layernorm.weight": [32],
    "midlayer.hidden_norm.weight": [32],
    "midlayer.self_attn.q_proj.weight": [32, 64],
    "midlayer.self_attn.k_proj.weight": [16, 64],
    "midlayer.self_attn.v_proj.weight": [16, 64],
    "midlayer.self_attn.o_proj.weight": [32, 32],
    "midlayer.post_attention_layernorm.weight": [32],
    "midlayer.mlp.gate_proj.weight": [64, 32],
    "midlayer.mlp.up_proj.weight": [64, 32],
    "midlayer.mlp.down_proj.weight": [32, 64],
    "norm.weight": [32],
}
SMALL_HEAD = {"lm_head.weight": [100, 32], "d2t": [100], "t2d": [260]}


def export(trained: Path, engine: str, output: Path, **settings: object) -> Path:
    return export_drafter(ExportConfig(engine, output, trained, **settings)).output  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "engine", "expected"),
    [
        ("eagle", "vllm", EAGLE),
        ("eagle", "sglang", EAGLE | {"fc.bias": [32]}),
        ("eagle3", "vllm", EAGLE3 | SMALL_HEAD),
        ("eagle3", "sglang", EAGLE3 | SMALL_HEAD),
        ("whole", "vllm", EAGLE3 | {"lm_head.weight": [260, 32]}),
        ("whole", "sglang", EAGLE3 | {"lm_head.weight": [260, 32]}),
    ],
)
def test_tensors(
    method: str, engine: str, expected: dict[str, list[int]], trained: Path, tmp_path: Path
) -> None:
    assert shapes(export(trained / method, engine, tmp_path / "out")) == expected


def test_eagle_for_sglang(trained: Path, tmp_path: Path) -> None:
    output = export(trained / "eagle", "sglang", tmp_path / "out")
    assert read_config(output)["architectures"] == ["LlamaForCausalLMEagle"]
    assert not load_file(output / "model.safetensors")["fc.bias"].any()


def test_aux_layers_as_each_engine_counts(trained: Path, tmp_path: Path) -> None:
    """The residual stream after 2, 4 and 5 layers is what SGLang's layers 1, 3 and 4 give."""
    key = "eagle_aux_hidden_state_layer_ids"
    for engine, counted in (("vllm", [2, 4, 5]), ("sglang", [1, 3, 4])):
        config = read_config(export(trained / "eagle3", engine, tmp_path / engine))
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert config["eagle_config"] == {"use_aux_hidden_state": True, key: counted}
        assert config[key] == [2, 4, 5]
        assert (config["draft_vocab_size"], config["target_hidden_size"]) == (100, 32)


def test_the_maps(trained: Path, tmp_path: Path) -> None:
    tensors = load_file(
        export(trained / "eagle3", "sglang", tmp_path / "out") / "model.safetensors"
    )
    assert tensors["d2t"].tolist() == list(range(3, 103))  # 3 - 0, 5 - 1, 7 - 2 …
    assert tensors["t2d"].nonzero()[:, 0].tolist() == DRAFT_TO_TARGET.tolist()


def test_rotary_positions_that_any_transformers_finds(trained: Path, tmp_path: Path) -> None:
    output = export(trained / "eagle3", "sglang", tmp_path / "out")
    config = read_config(output)
    assert (config["rope_theta"], config["rope_scaling"]) == (500_000.0, None)
    assert LlamaConfig.from_pretrained(output).rope_parameters["rope_theta"] == 500_000.0


def test_scaled_rotary_positions(trained: Path, tmp_path: Path) -> None:
    scaled = {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}
    source = damaged(
        trained / "eagle", tmp_path / "in", config=lambda c: c.update(rope_parameters=scaled)
    )
    output = export(source, "sglang", tmp_path / "out")
    config = read_config(output)
    assert config["rope_theta"] == 1e6
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert LlamaConfig.from_pretrained(output).rope_parameters == scaled


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("engine", ENGINES)
def test_dtypes(dtype: str, engine: str, trained: Path, tmp_path: Path) -> None:
    output = export(trained / "eagle3", engine, tmp_path / "out", dtype=dtype)
    tensors, config = load_file(output / "model.safetensors"), read_config(output)
    assert (tensors.pop("d2t").dtype, tensors.pop("t2d").dtype) == (torch.int64, torch.bool)
    assert {tensor.dtype for tensor in tensors.values()} == {getattr(torch, dtype)}
    assert config["dtype"] == dtype
    assert config.get("torch_dtype", dtype) == dtype
    stored = load_file(trained / "eagle3/model.safetensors")["fc.weight"]
    assert torch.equal(tensors["fc.weight"], stored.to(getattr(torch, dtype)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", METHODS)
def test_back_to_what_was_trained(method: str, engine: str, trained: Path, tmp_path: Path) -> None:
    """From engine to engine and back, nothing is lost."""
    there = export(trained / method, engine, tmp_path / "there")
    back = as_trained(read_checkpoint(there)).tensors
    stored = load_file(trained / method / "model.safetensors")
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name], stored[name]) for name in stored)
    again = export(there, "vllm", tmp_path / "again")
    direct = export(trained / method, "vllm", tmp_path / "direct")
    one, other = (load_file(d / "model.safetensors") for d in (again, direct))
    assert all(torch.equal(one[name], other[name]) for name in other)


@torch.inference_mode()
def draft(directory: Path, target: TransformersTarget) -> int:
    """The token drafted after the tokens 0 to 7, step by step."""
    drafter = load_drafter(directory, target)
    ids = torch.arange(8)[None]
    last, aux = target.hidden_and_aux_states(ids, aux_layers=drafter.aux_layers)
    states = drafter.fuse(last if aux is None else aux)
    read = token_embeddings(target.embedding, ids[:, 1:])
    own = drafter(read, states[:, :7])[0, 6:]
    drafted = int(drafter.head(target)(drafter.normed(own)).argmax())
    return drafted if drafter.draft_to_target is None else int(drafter.draft_to_target[drafted])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", METHODS)
def test_a_draft_step_of_what_was_written(
    method: str,
    engine: str,
    trained: Path,
    tmp_path: Path,
    deep_directory: Path,
    deep_target: TransformersTarget,
) -> None:
    output = export(trained / method, engine, tmp_path / "out")
    report = check_drafter(CheckConfig(engine, output, target=str(deep_directory)))
    assert report.accepted, report.rejections
    assert report.drafted == draft(trained / method, deep_target)
    assert report.notes == ()


def test_the_training_output_is_what_vllm_loads(
    trained: Path, deep_target: TransformersTarget
) -> None:
    """With a draft step of the target that it records, unless that is left out."""
    for method in ("eagle", "eagle3"):
        report = check_drafter(CheckConfig("vllm", trained / method))
        assert report.accepted
        assert report.drafted == draft(trained / method, deep_target)
        report = check_drafter(CheckConfig("vllm", trained / method, files_only=True))
        assert (report.accepted, report.drafted) == (True, None)
        assert report.not_drafted == "the files alone were checked"


def test_a_recorded_target_that_is_gone(trained: Path, tmp_path: Path) -> None:
    """Said, and no reason to reject the drafter; one that was named is."""
    gone = str(tmp_path / "gone")
    record = {"identity": {}, "about": {"target": gone}}
    source = damaged(trained / "eagle3", tmp_path / "in")
    (source / "provenance.json").write_text(json.dumps(record))
    report = check_drafter(CheckConfig("vllm", source))
    assert (report.accepted, report.drafted) == (True, None)
    assert str(report.not_drafted).startswith(f"Target {gone} does not exist.")
    with pytest.raises(TargetError, match="does not exist"):
        check_drafter(CheckConfig("vllm", source, target=gone))


class TestOthersDrafters:
    """What vLLM loads and `sfdd train-draft` does not write."""

    def test_a_layer_by_its_other_name(
        self, trained: Path, tmp_path: Path, deep_target: TransformersTarget
    ) -> None:
        def renamed(tensors: Tensors) -> None:
            for name in [n for n in tensors if n.startswith("midlayer.")]:
                tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)

        source = damaged(
            trained / "eagle3",
            tmp_path / "in",
            tensors=renamed,
            config=lambda c: c.update(architectures=["LlamaForCausalLM"]),
        )
        report = check_drafter(CheckConfig("vllm", source))
        assert (report.accepted, report.described.method) == (True, "eagle3")
        assert report.drafted == draft(trained / "eagle3", deep_target)
        assert shapes(export(source, "sglang", tmp_path / "out")) == EAGLE3 | SMALL_HEAD

    @pytest.mark.parametrize("method", ["eagle", "eagle3"])
    def test_the_targets_own_embeddings(
        self, method: str, trained: Path, tmp_path: Path, deep_target: TransformersTarget
    ) -> None:
        rows = deep_target.embedding.weight
        for name, held in (("same", rows), ("other", rows + 1)):
            source = damaged(
                trained / method,
                tmp_path / name,
                tensors=lambda t, held=held: t.update({"embed_tokens.weight": held}),
            )
            report = check_drafter(CheckConfig("vllm", source))
            assert report.accepted
            if name == "same":
                assert report.drafted == draft(trained / method, deep_target)
            else:
                assert report.drafted is None
                assert str(report.not_drafted).startswith("it holds other embeddings than the tar")
                sglang = export(source, "sglang", tmp_path / f"sglang-{name}")
                (said,) = check_drafter(CheckConfig("sglang", sglang)).rejections
                assert (
                    said == "embed_tokens.weight is not the target's, which SGLang reads instead."
                )

    def test_aux_layers_that_may_be_counted_either_way(self, trained: Path, tmp_path: Path) -> None:
        key = "eagle_aux_hidden_state_layer_ids"
        source = damaged(trained / "eagle3", tmp_path / "in", config=lambda c: c.pop(key))
        with pytest.raises(DrafterError, match=r"names aux layers in eagle_config alone, where vL"):
            export(source, "sglang", tmp_path / "out")

    def test_nothing_is_written_to_check(
        self, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
        assert check_drafter(CheckConfig("vllm", trained / "eagle3")).drafted is not None


def test_what_was_exported_for_sglang_vllm_loads_too(trained: Path, tmp_path: Path) -> None:
    """EAGLE-3 alone: each engine reads the aux layers elsewhere in config.json."""
    output = export(trained / "eagle3", "sglang", tmp_path / "out")
    assert check_drafter(CheckConfig("vllm", output)).accepted


def test_what_was_exported_is_not_evaluated(
    trained: Path, tmp_path: Path, deep_target: TransformersTarget
) -> None:
    """And no advice is given that would cost a good drafter."""
    output = export(trained / "eagle", "sglang", tmp_path / "out")
    with pytest.raises(DrafterError) as error:
        load_drafter(output, deep_target)
    assert str(error.value) == (
        f"The drafter in {output} is in SGLang's form. Give the one that it was exported from, by "
        "default RUN/drafter."
    )


def test_the_provenance_is_kept(trained: Path, tmp_path: Path) -> None:
    output = export(trained / "eagle3", "sglang", tmp_path / "out", dtype="bfloat16")
    before, after = read_provenance(trained / "eagle3"), read_provenance(output)
    assert after.identity == before.identity
    assert after.about["settings"] == {"epochs": 3}
    assert after.about["export"]["engine"] == "sglang"
    assert after.about["export"]["dtype"] == "bfloat16"
    assert after.about["export"]["drafter"] == "eagle3"
    assert str(tmp_path) not in json.dumps(after.about["export"])


def test_defaults_are_the_runs(trained: Path, tmp_path: Path) -> None:
    damaged(trained / "eagle3", tmp_path / "run/drafter")
    report = export_drafter(ExportConfig("vllm", run=tmp_path / "run"))
    assert report.output == tmp_path / "run/export/vllm"
    assert report.described.parameters == sum(
        tensor.numel()
        for tensor in load_file(report.output / "model.safetensors").values()
        if tensor.is_floating_point()
    )
    assert check_drafter(CheckConfig("vllm", run=tmp_path / "run")).drafter == (
        tmp_path / "run/drafter"
    )


class TestLeftovers:
    """Of an export that was killed."""

    def test_are_removed_by_the_next(self, trained: Path, tmp_path: Path) -> None:
        for name in (".out-abcd1234", ".out.77.earlier"):
            damaged(trained / "eagle", tmp_path / name)
        (tmp_path / ".out-thesis_1").mkdir()
        (tmp_path / ".out-thesis_1/thesis.tex").write_text("years of work")
        export(trained / "eagle", "vllm", tmp_path / "out", overwrite=True)
        assert sorted(p.name for p in tmp_path.iterdir()) == [".out-thesis_1", "out"]

    def test_an_earlier_export_is_put_back(self, trained: Path, tmp_path: Path) -> None:
        damaged(trained / "eagle", tmp_path / ".out.77.earlier")
        with pytest.raises(ArtifactError, match=r"out exists\. Choose another output"):
            export(trained / "eagle3", "vllm", tmp_path / "out")
        assert shapes(tmp_path / "out") == EAGLE
        assert [p.name for p in tmp_path.iterdir()] == ["out"]


class TestReplacing:
    def test_only_with_overwrite(self, trained: Path, tmp_path: Path) -> None:
        output = export(trained / "eagle", "vllm", tmp_path / "out")
        with pytest.raises(ArtifactError, match=r"out exists\. Choose another output, or add --ov"):
            export(trained / "eagle3", "vllm", output)
        assert shapes(output) == EAGLE
        export(trained / "eagle3", "vllm", output, overwrite=True)
        assert "midlayer.hidden_norm.weight" in shapes(output)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]

    def test_never_what_is_more_than_an_export(self, trained: Path, tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine/thesis.tex").write_text("years of work")
        with pytest.raises(ArtifactError, match=r"holds more than an export \(thesis.tex\)"):
            export(trained / "eagle", "vllm", tmp_path / "mine", overwrite=True)
        assert (tmp_path / "mine/thesis.tex").read_text() == "years of work"

    def test_never_the_drafter_itself(self, trained: Path) -> None:
        with pytest.raises(ArtifactError, match="is the drafter to export"):
            export(trained / "eagle", "vllm", trained / "eagle", overwrite=True)

    def test_a_failure_leaves_what_was_there(self, trained: Path, tmp_path: Path) -> None:
        """1e6 is more than float16 can hold."""
        output = export(trained / "eagle", "vllm", tmp_path / "out")
        before = (output / "model.safetensors").read_bytes()
        large = damaged(
            trained / "eagle", tmp_path / "large", tensors=lambda t: t["fc.weight"].fill_(1e6)
        )
        with pytest.raises(
            DrafterError, match=r"fc\.weight has values that are not finite: export"
        ):
            export(large, "vllm", output, dtype="float16", overwrite=True)
        assert (output / "model.safetensors").read_bytes() == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "out"]


def test_a_target_that_the_drafter_was_not_trained_for(trained: Path, tmp_path: Path) -> None:
    """Of the same sizes, so that it loads: the note says in what it differs."""
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    other = save_tiny_target(tmp_path / "other", seed=1, num_hidden_layers=8, rope_parameters=rope)
    report = check_drafter(CheckConfig("vllm", trained / "eagle3", target=str(other)))
    assert report.accepted
    (note,) = report.notes
    assert note.startswith("It was trained for another target, so fewer drafts may be accepted: ta")


def test_a_drafter_without_provenance(trained: Path, tmp_path: Path) -> None:
    source = damaged(trained / "eagle", tmp_path / "in")
    (source / "provenance.json").unlink()
    (note,) = check_drafter(CheckConfig("vllm", source)).notes
    assert note.startswith("It has no readable provenance.json")
    (source / "provenance.json").write_bytes(b"\xff\xfe{}")
    report = check_drafter(CheckConfig("vllm", source))
    assert report.notes == (note,)
    assert report.not_drafted == "no target is recorded, give --target"
    output = export(source, "vllm", tmp_path / "out")
    about = Provenance.from_json((output / "provenance.json").read_text()).about
    assert json.loads(json.dumps(about["export"]))["engine"] == "vllm"
