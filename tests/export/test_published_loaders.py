"""The trainers' own loaders on exported files, where they are installed.

They pin versions of their own, so an environment of its own per trainer is best: install sfdd there with
one of specforge, speculators, nvidia-modelopt[hf] or nemo-automodel, and run this file.
"""

import json
from pathlib import Path

import datasets
import pytest
from helpers import openai, write_jsonl

from sfdd.export.config import ExportDataConfig
from sfdd.export.data import export_data
from sfdd.targets.loading import TargetSource

THOUGHT = {"role": "assistant", "content": "4", "reasoning_content": "Two and two."}
CHATS = [
    openai("Hi", "Hello!", "And you?", "Fine.", id="a"),
    openai("Où est\u2028la gare ?", "Là-bas 🚉", id="b"),
    {"id": "c", "messages": [{"role": "user", "content": "2 + 2?"}, THOUGHT]},
    openai("Bye", "Bye!", id="d"),
]


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def exported(trainer: str, folder: Path, target: Path, form: str | None = None) -> Path:
    data = write_jsonl(folder / "chat.jsonl", CHATS)
    suffix = "parquet" if trainer == "automodel" else "jsonl"
    config = ExportDataConfig(
        trainer, folder / f"out.{suffix}", (str(data),), form=form, target=str(target)
    )
    return export_data(config).output


def tokens(path: Path) -> list[tuple[list[int], list[int]]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(row["input_ids"], row["loss_mask"]) for row in rows]


def test_speculators(tmp_path: Path, tiny_directory: Path) -> None:
    preprocessing = pytest.importorskip("speculators.data_generation.preprocessing")
    path = exported("speculators", tmp_path, tiny_directory)
    raw, _ = preprocessing.load_raw_dataset(str(path))
    tokenizer = TargetSource(str(tiny_directory)).load_tokenizer()
    data = preprocessing.build_speculator_training_dataset(raw, tokenizer, 4096, num_proc=1)
    read = [(row["input_ids"].tolist(), row["loss_mask"].tolist()) for row in data]
    assert read == tokens(path)
    assert len(read) == 3  # this template writes no thoughts


@pytest.mark.parametrize("form", ["text", "tokens"])
def test_specforge(form: str, tmp_path: Path, tiny_directory: Path) -> None:
    """Text that it masks itself, and tokens that it leaves as they are."""
    prompts = pytest.importorskip("specforge.data.prompt_builder")
    path = exported("specforge", tmp_path, tiny_directory, form)
    tokenizer = TargetSource(str(tiny_directory)).load_tokenizer()
    tasks = prompts.prepare_prompt_tasks(
        str(path),
        tokenizer,
        chat_template="qwen",
        max_length=4096,
        is_preformatted=False,
        train_only_last_turn=False,
        cache_dir=str(tmp_path / "cache"),
        cache_key="test",
        num_proc=1,
    )
    read = [(task["payload"]["input_ids"], task["payload"]["loss_mask"]) for task in tasks]
    assert len(read) == 3
    if form == "tokens":
        assert read == tokens(path)
    learned = {
        tokenizer.decode([i for i, m in zip(*row, strict=True) if m]).strip() for row in read
    }
    assert {"Là-bas 🚉<|im_end|>", "Bye!<|im_end|>"} <= learned


def test_modelopt(tmp_path: Path, tiny_directory: Path) -> None:
    plugin = pytest.importorskip("modelopt.torch.utils.plugins.transformers_dataset")
    path = exported("modelopt", tmp_path, tiny_directory)
    data = plugin.ShardedDataset("json", data_files=str(path))
    tokenizer = TargetSource(str(tiny_directory)).load_tokenizer()
    collate = plugin.LanguageDataCollator(tokenizer=tokenizer, train_len=128, return_labels=True)
    batch = collate([data[i] for i in range(len(data))])
    texts = [tokenizer.decode(ids) for ids in batch["input_ids"]]
    assert len(texts) == 4
    assert (
        "<|im_start|>user\nAnd you?<|im_end|>\n<|im_start|>assistant\nFine.<|im_end|>" in texts[0]
    )


def test_automodel(tmp_path: Path, tiny_directory: Path) -> None:
    chats = pytest.importorskip("nemo_automodel.components.datasets.llm.chat_dataset")
    path = exported("automodel", tmp_path, tiny_directory)
    tokenizer = TargetSource(str(tiny_directory)).load_tokenizer()
    data = chats.ChatDataset(str(path), tokenizer, unshifted=True, seq_length=128)
    samples = [data[i] for i in range(len(data))]
    assert len(samples) == 4
    supervised = [
        i for i, m in zip(samples[1]["input_ids"], samples[1]["loss_mask"], strict=True) if m
    ]
    assert "Là-bas 🚉<|im_end|>" in tokenizer.decode(supervised)
