import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import byte_tokenizer, save_tiny_target
from datasets import Dataset
from helpers import openai, sharegpt, write_jsonl

from sfdd.artifacts import RunDirectory, read_parquet_provenance
from sfdd.conversations.conversation import TokenizedConversation
from sfdd.conversations.pipeline import tokenize_data
from sfdd.conversations.sources import open_source
from sfdd.errors import ArtifactError, DataError
from sfdd.progress import Progress
from sfdd.scoring.config import ScoreConfig
from sfdd.scoring.run import ScoreReport, score
from sfdd.scoring.schema import score_schema
from sfdd.targets.statistics import STATISTICS
from sfdd.targets.transformers_target import TransformersTarget

RECORDS: list[Any] = [
    sharegpt("Hi", "Hello there", id="first"),
    "{broken",
    openai("How are you?", "Fine, thanks. And you?", "Good.", "Great to hear!", id="second"),
    openai("Nobody answers"),
    openai("Tell me a story", "Once upon a time. " * 30, id="long"),
    openai("Q" * 300, "too late", id="cut"),
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "chat.jsonl", RECORDS)


def run_score(data: Path, target: Path, run: Path, **settings: Any) -> ScoreReport:
    return score(ScoreConfig((str(data),), str(target), run=run, **settings))


def rows(run: Path) -> list[dict[str, Any]]:
    return pq.read_table(RunDirectory(run).scores).to_pylist()


def test_every_record_has_its_row(data: Path, tiny_directory: Path, tmp_path: Path) -> None:
    report = run_score(data, tiny_directory, tmp_path / "run", max_length=200)
    table = pq.read_table(tmp_path / "run" / "scores.parquet")
    assert table.schema.remove_metadata().equals(score_schema(token_scores=False))
    assert (report.read, report.scored, report.skipped) == (6, 3, 3)
    assert report.read == report.scored + report.skipped == table.num_rows
    assert report.reasons == {"unreadable": 1, "no_assistant_turn": 1, "no_supervised_tokens": 1}
    assert report.truncated == 1

    by_row = table.to_pylist()
    assert [row["row"] for row in by_row] == [0, 1, 2, 3, 4, 5]
    assert [row["id"] for row in by_row] == [
        "first",
        f"{data}:1",
        "second",
        f"{data}:3",
        "long",
        "cut",
    ]
    assert [row["status"] for row in by_row] == ["scored", "skipped"] * 2 + ["scored", "skipped"]
    assert by_row[1]["reason"].startswith("unreadable: line 2: Expecting property name")
    assert by_row[5]["reason"] == "no_supervised_tokens: within 200 tokens"
    assert by_row[4]["truncated"]
    assert by_row[4]["num_tokens"] == 200
    assert by_row[0]["num_supervised_tokens"] == len("Hello there") + 1
    assert all(by_row[1][name] is None for name in STATISTICS)


def test_scores_are_those_of_plain_transformers(
    data: Path, tiny_directory: Path, tiny_target: TransformersTarget, tmp_path: Path
) -> None:
    run_score(data, tiny_directory, tmp_path / "run", token_scores=True)
    found = {row["row"]: row for row in rows(tmp_path / "run") if row["status"] == "scored"}
    items = tokenize_data([str(data)], tiny_target.tokenizer, 4096)
    conversations = [item for item in items if isinstance(item, TokenizedConversation)]
    assert len(conversations) == len(found) == 4
    for conversation in conversations:
        ids = torch.from_numpy(conversation.input_ids).long()
        with torch.no_grad():
            logits = tiny_target.model(ids[None]).logits[0].double()
        positions = torch.from_numpy(conversation.loss_mask).nonzero()[:, 0]
        p = logits[positions - 1].softmax(-1)
        uniform = torch.full_like(p, 1 / p.shape[-1])
        flatness = torch.nn.functional.cosine_similarity(p, uniform, dim=-1)
        top = p.topk(2).values
        row = found[conversation.origin.row]
        expected = {
            "flatness": flatness,
            "entropy": -torch.xlogy(p, p).sum(-1),
            "top1": top[:, 0],
            "margin": top[:, 0] - top[:, 1],
            "energy": -logits[positions - 1].logsumexp(-1),
            "nll": -p.log()[range(len(p)), ids[positions]],
        }
        for name, values in expected.items():
            assert row[name] == pytest.approx(values.mean().item(), rel=1e-5), name
        np.testing.assert_allclose(row["token_flatness"], flatness.numpy(), rtol=1e-5)


def test_the_file_says_where_it_comes_from(
    data: Path, tiny_directory: Path, tiny_target: TransformersTarget, tmp_path: Path
) -> None:
    run_score(data, tiny_directory, tmp_path / "run")
    provenance = read_parquet_provenance(tmp_path / "run" / "scores.parquet")
    assert dict(tiny_target.identity).items() <= provenance.identity.items()
    assert provenance.identity["max_length"] == 4096
    assert provenance.about["target"] == str(tiny_directory)
    assert provenance.about["data"] == {str(data): open_source(str(data)).fingerprint()}
    assert provenance.about["versions"]["torch"] == torch.__version__


def test_batching_and_other_containers_change_nothing(tiny_directory: Path, tmp_path: Path) -> None:
    records = [openai(f"Question {i}", "word " * (i % 13 + 1)) for i in range(60)]
    as_lines = write_jsonl(tmp_path / "d.jsonl", records)
    as_array = tmp_path / "d.json"
    as_array.write_text(json.dumps(records))
    as_parquet = tmp_path / "d.parquet"
    Dataset.from_list(records).to_parquet(str(as_parquet))
    as_folder = tmp_path / "saved"
    Dataset.from_list(records).save_to_disk(str(as_folder))

    values = []
    for i, data in enumerate([as_lines, as_lines, as_array, as_parquet, as_folder]):
        run = tmp_path / f"run{i}"
        run_score(data, tiny_directory, run, batch_tokens=2 if i == 0 else 1000)
        values.append([[row[name] for name in STATISTICS] for row in rows(run)])
    for other in values[1:]:
        np.testing.assert_allclose(other, values[0], rtol=1e-5, atol=1e-6)


def test_several_data_sets_keep_their_order(tiny_directory: Path, tmp_path: Path) -> None:
    paths = [write_jsonl(tmp_path / f"{n}.jsonl", [openai(n, n)] * 3) for n in "zam"]
    score(ScoreConfig(tuple(map(str, paths)), str(tiny_directory), run=tmp_path / "run"))
    assert [(row["source"], row["row"]) for row in rows(tmp_path / "run")] == [
        (str(path), row) for path in paths for row in range(3)
    ]


def test_progress_adds_up(data: Path, tiny_directory: Path, tmp_path: Path) -> None:
    moments: list[Progress] = []
    config = ScoreConfig((str(data),), str(tiny_directory), run=tmp_path / "run", batch_tokens=2)
    report = score(config, moments.append)
    assert moments[-1].done == moments[-1].total == report.read
    assert moments[-1].tokens == report.num_tokens
    assert [m.done for m in moments] == sorted(m.done for m in moments)


class TestRerun:
    def test_a_finished_run_is_not_scored_again(
        self, data: Path, tiny_directory: Path, tmp_path: Path
    ) -> None:
        run_score(data, tiny_directory, tmp_path / "run")
        before = rows(tmp_path / "run")
        report = run_score(data, tiny_directory, tmp_path / "run")
        assert report.resumed == report.read == 6
        assert report.tokens_per_second == 0
        assert rows(tmp_path / "run") == before

    def test_appended_records_are_scored_alone(
        self, data: Path, tiny_directory: Path, tmp_path: Path
    ) -> None:
        run_score(data, tiny_directory, tmp_path / "run")
        before = rows(tmp_path / "run")
        with data.open("a") as handle:
            handle.write(json.dumps(openai("New", "Record")) + "\n")
        report = run_score(data, tiny_directory, tmp_path / "run")
        assert (report.read, report.resumed) == (7, 6)
        assert rows(tmp_path / "run")[:6] == before

    def test_edited_and_removed_records_are_refused(
        self, data: Path, tiny_directory: Path, tmp_path: Path
    ) -> None:
        run_score(data, tiny_directory, tmp_path / "run")
        original = data.read_text()
        data.write_text(original.replace("Hello there", "Hello here"))
        with pytest.raises(DataError, match="has changed since it was scored: record 0 differs"):
            run_score(data, tiny_directory, tmp_path / "run")
        data.write_text("".join(original.splitlines(keepends=True)[:-1]))
        with pytest.raises(DataError, match="has changed since it was scored: 1 records"):
            run_score(data, tiny_directory, tmp_path / "run")
        report = run_score(data, tiny_directory, tmp_path / "run", overwrite=True)
        assert (report.read, report.resumed) == (5, 0)

    @pytest.mark.parametrize(
        ("settings", "name"),
        [
            ({"max_length": 100}, "max_length (was 4096, now 100)"),
            ({"dtype": "bfloat16"}, "dtype (was float32, now bfloat16)"),
            ({"token_scores": True}, "token_scores (was False, now True)"),
        ],
    )
    def test_other_settings_are_refused_by_name(
        self,
        data: Path,
        tiny_directory: Path,
        tmp_path: Path,
        settings: dict[str, Any],
        name: str,
    ) -> None:
        run_score(data, tiny_directory, tmp_path / "run")
        with pytest.raises(ArtifactError) as error:
            run_score(data, tiny_directory, tmp_path / "run", **settings)
        assert f"holds scores made with another {name}. Start again with --overwrite" in str(
            error.value
        )

    def test_other_data_are_refused_before_anything_is_computed(
        self, data: Path, tiny_directory: Path, tmp_path: Path
    ) -> None:
        run_score(data, tiny_directory, tmp_path / "run")
        other = write_jsonl(tmp_path / "other.jsonl", [openai("a", "b")])
        with pytest.raises(ArtifactError, match=r"holds scores of .*chat\.jsonl\. Name all"):
            run_score(other, tiny_directory, tmp_path / "run")
        both = ScoreConfig((str(data), str(other)), str(tiny_directory), run=tmp_path / "run")
        report = score(both)
        assert (report.read, report.resumed) == (7, 6)

    def test_the_same_file_written_differently(
        self, data: Path, tiny_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run_score(data, tiny_directory, tmp_path / "run")
        monkeypatch.chdir(tmp_path)
        assert run_score(Path("./chat.jsonl"), tiny_directory, Path("run")).resumed == 6

    def test_a_damaged_table_is_named(
        self, data: Path, tiny_directory: Path, tmp_path: Path
    ) -> None:
        run_score(data, tiny_directory, tmp_path / "run")
        (tmp_path / "run" / "scores.parquet").write_bytes(b"PAR1")
        with pytest.raises(ArtifactError, match=r"scores\.parquet are damaged .*--overwrite"):
            run_score(data, tiny_directory, tmp_path / "run")

    def test_another_target_is_refused_by_name(
        self, data: Path, tiny_directory: Path, tmp_path: Path
    ) -> None:
        run_score(data, tiny_directory, tmp_path / "run")
        other = save_tiny_target(tmp_path / "other", seed=1)
        with pytest.raises(ArtifactError) as error:
            run_score(data, other, tmp_path / "run")
        assert f"another target (was {tiny_directory}, now {other})" in str(error.value)


def test_non_finite_logits_are_a_reason(data: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    target = save_tiny_target(tmp_path / "target")
    weights = load_file(target / "model.safetensors")
    (token,) = byte_tokenizer()("Q", add_special_tokens=False)["input_ids"]
    weights["model.embed_tokens.weight"][token] = float("nan")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    good = write_jsonl(tmp_path / "d.jsonl", [openai("hi", "hello"), openai("Q", "hello")])
    report = run_score(good, target, tmp_path / "run")
    assert report.reasons == {"non_finite": 1}
    first, second = rows(tmp_path / "run")
    assert first["status"] == "scored"
    assert (second["status"], second["flatness"]) == ("skipped", None)


def test_nothing_scored_is_an_error_after_the_table_is_written(
    tiny_directory: Path, tmp_path: Path
) -> None:
    data = write_jsonl(tmp_path / "d.jsonl", [openai("Nobody answers")])
    with pytest.raises(
        DataError, match=r"None of the 1 records could be scored \(no_assistant_turn 1\)"
    ):
        run_score(data, tiny_directory, tmp_path / "run")
    assert [row["reason"] for row in rows(tmp_path / "run")] == ["no_assistant_turn"]


def test_the_targets_context_bounds_the_length(data: Path, tmp_path: Path) -> None:
    target = save_tiny_target(tmp_path / "short", max_position_embeddings=64)
    run_score(data, target, tmp_path / "run")
    assert max(row["num_tokens"] for row in rows(tmp_path / "run")) == 64
    identity = read_parquet_provenance(tmp_path / "run" / "scores.parquet").identity
    assert identity["max_length"] == 64


def test_unwritable_run_directory(data: Path, tiny_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        ArtifactError, match=r"^Cannot write to .*file/run: Not a directory\. Choose"
    ):
        run_score(data, tiny_directory, tmp_path / "file" / "run")
