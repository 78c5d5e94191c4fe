import json
from pathlib import Path

import pytest
import torch
from conftest import byte_tokenizer, save_tiny_target
from safetensors.torch import load_file, save_file

from sfdd.errors import TargetError, UsageError
from sfdd.targets import smollm2 as embedded
from sfdd.targets.loading import TargetSource
from sfdd.targets.transformers_target import TransformersTarget


def test_a_path_that_does_not_exist() -> None:
    with pytest.raises(TargetError) as error:
        TransformersTarget.load("./nowhere")
    assert str(error.value) == (
        "Target ./nowhere does not exist. Give a local model directory, a GGUF file, a hub id such "
        "as HuggingFaceTB/SmolLM2-135M-Instruct, or 'smollm2'."
    )


def test_a_hub_id_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(TargetError, match="Cannot load the tokenizer of target nobody/nothing: "):
        TransformersTarget.load("nobody/nothing")


def test_no_chat_template(tmp_path: Path) -> None:
    directory = save_tiny_target(tmp_path / "base")
    (directory / "chat_template.jinja").unlink()
    byte_tokenizer(chat_template=None).save_pretrained(directory)
    with pytest.raises(
        TargetError, match="has no chat template, so conversations cannot be rendered"
    ):
        TransformersTarget.load(str(directory))


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    directory = save_tiny_target(tmp_path / "broken", tie_word_embeddings=False)
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        TargetError, match=r"lacks 1 weights .*first: model.layers.1.mlp.up_proj.weight"
    ):
        TransformersTarget.load(str(directory))


def test_a_tokenizer_larger_than_the_model(tmp_path: Path) -> None:
    directory = save_tiny_target(tmp_path / "small", vocab_size=200)
    with pytest.raises(TargetError, match="has 259 tokens, but the model embeds 200"):
        TransformersTarget.load(str(directory))


def test_an_unknown_dtype(tiny_directory: Path) -> None:
    with pytest.raises(UsageError, match="--dtype is 'int8'; choose one of auto, float32"):
        TransformersTarget.load(str(tiny_directory), dtype="int8")


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    directory = save_tiny_target(tmp_path / "pickled")
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    torch.save(weights, directory / "pytorch_model.bin")
    with pytest.raises(TargetError, match="Cannot load the model"):
        TransformersTarget.load(str(directory))


def test_changed_weights_and_template_change_the_fingerprint(tmp_path: Path) -> None:
    directory = save_tiny_target(tmp_path / "target")
    before = TransformersTarget.load(str(directory)).identity
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-6
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    template = directory / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    after = TransformersTarget.load(str(directory)).identity
    assert {k for k in before if before[k] != after[k]} == {"target", "chat_template"}


class TestEmbeddedTarget:
    def test_is_a_plain_safetensors_directory(self, smollm2: TransformersTarget) -> None:
        directory = TargetSource("smollm2").directory
        assert directory == embedded.cache_directory()
        config = json.loads((directory / "config.json").read_text())
        assert "quantization_config" not in config
        assert config["rms_norm_eps"] == 1e-5
        assert config["dtype"] == "float32"
        assert smollm2.vocab_size == 49_152

    def test_splits_numbers_into_digits(self, smollm2: TransformersTarget) -> None:
        tokens = smollm2.tokenizer.tokenize("In 2024, 3.14")
        assert tokens == ["In", "Ġ", "2", "0", "2", "4", ",", "Ġ", "3", ".", "1", "4"]

    def test_knows_the_capital_of_france(self, smollm2: TransformersTarget) -> None:
        prompt = smollm2.tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is the capital of France?"}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        out = smollm2.model.generate(**prompt, max_new_tokens=12, do_sample=False)
        answer = smollm2.tokenizer.decode(out[0, prompt["input_ids"].shape[1] :])
        assert answer == "The capital of France is Paris.<|im_end|>"

    def test_a_gguf_file_loads_as_it_is(self, smollm2: TransformersTarget) -> None:
        gguf = embedded._wheel_gguf()
        assert gguf is not None
        target = TransformersTarget.load(str(gguf))
        assert target.tokenizer.chat_template == smollm2.tokenizer.chat_template
        assert target.identity["target"] != smollm2.identity["target"]
        for name, parameter in target.model.named_parameters():
            assert torch.equal(parameter, smollm2.model.get_parameter(name)), name

    def test_is_converted_where_the_cache_is_empty(
        self, smollm2: TransformersTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        location = embedded.locate()
        assert location == str(tmp_path / "sfdd" / "smollm2-135m-instruct")
        assert TargetSource(location).fingerprint() == smollm2.identity["target"]
        assert [path.name for path in (tmp_path / "sfdd").iterdir()] == ["smollm2-135m-instruct"]

    def test_falls_back_to_the_hub_id(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(embedded, "_WHEEL_MODULE", "no_such_module")
        assert embedded.locate() == embedded.HUB_ID
