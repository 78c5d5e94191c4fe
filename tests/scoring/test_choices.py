"""What is supervised is chosen once, recorded, and means the same to every later step."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import save_tiny_target
from conversations.templates import family_tokenizer
from helpers import openai, write_jsonl

from sfdd.artifacts import RunDirectory, read_parquet_provenance
from sfdd.conversations.config import MaskConfig
from sfdd.conversations.conversation import TokenizedConversation
from sfdd.conversations.pipeline import tokenize_data
from sfdd.errors import ArtifactError, DataError, UsageError
from sfdd.filtering.config import FilterConfig
from sfdd.filtering.run import filter_data
from sfdd.scoring.config import ScoreConfig
from sfdd.scoring.plan import plan, role_pattern
from sfdd.scoring.run import ScoreReport, score
from sfdd.targets.transformers_target import TransformersTarget
from sfdd.training.config import TrainConfig
from sfdd.training.data import with_run_defaults
from sfdd.training.run import train

THOUGHTS = openai(
    "Hi", "<think>\nhm\n</think>\n\nYo", "Bye", "<think>\nso\n</think>\n\nCiao", id="t"
)
PLAIN = [openai(f"Q{i}", f"A{i} " * (i + 1), id=f"p{i}") for i in range(6)]


@pytest.fixture(scope="module")
def thinking_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a template that drops earlier thoughts."""
    directory = save_tiny_target(tmp_path_factory.mktemp("targets") / "thinking")
    family_tokenizer("qwen3").save_pretrained(directory)
    return directory


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "chat.jsonl", [THOUGHTS, *PLAIN, {"messages": []}, PLAIN[0]])


def run_score(data: Path, target: Path, run: Path, **choices: Any) -> ScoreReport:
    config = ScoreConfig(
        (str(data),),
        str(target),
        run=run,
        mask=MaskConfig(**choices),
        token_scores=True,
        batch_tokens=80,
    )
    return score(config)


def rows(run: Path) -> list[dict[str, Any]]:
    return pq.read_table(RunDirectory(run).scores).to_pylist()


def test_a_rewritten_conversation_is_one_row_over_all_its_samples(
    data: Path, thinking_target: Path, tmp_path: Path
) -> None:
    report = run_score(data, thinking_target, tmp_path / "run")
    assert (report.read, report.scored, report.skipped, report.rewritten) == (9, 8, 1, 1)
    row = rows(tmp_path / "run")[0]
    assert (row["id"], row["num_samples"], row["rewritten"]) == ("t", 2, True)

    target = TransformersTarget.load(str(thinking_target))
    samples = [
        item
        for item in tokenize_data([str(data)], target.tokenizer, 4096)
        if isinstance(item, TokenizedConversation) and item.id == "t"
    ]
    assert row["num_tokens"] == sum(map(len, samples))
    expected = []
    for sample in samples:
        with torch.no_grad():
            logits = (
                target.model(torch.from_numpy(sample.input_ids).long()[None]).logits[0].double()
            )
        p = logits[torch.from_numpy(sample.loss_mask).nonzero()[:, 0] - 1].softmax(-1)
        expected += (1 / (p.shape[-1] ** 0.5 * p.norm(dim=-1))).tolist()
    thought = len("<think>\nhm\n</think>\n\n")
    assert row["num_supervised_tokens"] == len(expected) == 2 * thought + len("Yo.Ciao.")
    np.testing.assert_allclose(row["token_flatness"], expected, rtol=1e-5)
    assert row["flatness"] == pytest.approx(np.mean(expected), rel=1e-5)


def test_choices_are_recorded_and_another_choice_is_refused_by_name(
    data: Path, thinking_target: Path, tmp_path: Path
) -> None:
    run_score(data, thinking_target, tmp_path / "run", reasoning="mask", rewritten="last")
    identity = read_parquet_provenance(tmp_path / "run" / "scores.parquet").identity
    assert (identity["reasoning"], identity["rewritten"]) == ("mask", "last")
    assert (identity["format"], identity["last_turn_only"]) == (None, False)
    with pytest.raises(ArtifactError, match=r"another reasoning \(was mask, now drop\)\."):
        run_score(data, thinking_target, tmp_path / "run", reasoning="drop", rewritten="last")


def test_each_choice_supervises_what_it_says(
    data: Path, thinking_target: Path, tmp_path: Path
) -> None:
    counts = {}
    for name, choices in {
        "keep": {},
        "mask": {"reasoning": "mask"},
        "drop": {"reasoning": "drop"},
        "last": {"rewritten": "last"},
        "last turn": {"last_turn_only": True},
    }.items():
        run_score(data, thinking_target, tmp_path / name, **choices)
        row = rows(tmp_path / name)[0]
        counts[name] = (row["num_samples"], row["num_supervised_tokens"])
    thought = len("<think>\nhm\n</think>\n\n")
    answers = len("Yo") + 1, len("Ciao") + 1
    assert counts == {
        "keep": (2, 2 * thought + sum(answers)),
        "mask": (2, sum(answers)),
        "drop": (2, sum(answers)),
        "last": (1, thought + answers[1]),
        "last turn": (1, thought + answers[1]),
    }


def test_a_rerun_knows_the_samples_of_a_finished_conversation(
    data: Path, thinking_target: Path, tmp_path: Path
) -> None:
    run_score(data, thinking_target, tmp_path / "run")
    before = rows(tmp_path / "run")
    report = run_score(data, thinking_target, tmp_path / "run")
    assert (report.resumed, report.tokens_per_second) == (9, 0)
    assert rows(tmp_path / "run") == before


def test_exact_copies_are_counted_and_scored(
    data: Path, tiny_directory: Path, tmp_path: Path
) -> None:
    report = run_score(data, tiny_directory, tmp_path / "run")
    assert report.duplicates == 1
    first, copy = (rows(tmp_path / "run")[i] for i in (1, 8))
    assert first["content_hash"] == copy["content_hash"]
    assert (first["id"], copy["id"]) == ("p0", f"{data}:8")


def test_a_format_that_is_not_the_datas(data: Path, tiny_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"None of the 9 records .*not_a_conversation 9"):
        run_score(data, tiny_directory, tmp_path / "run", format="alpaca")
    with pytest.raises(
        UsageError, match="--format is 'chatml'; it must be one of sharegpt, openai"
    ):
        MaskConfig(format="chatml")


class TestTraining:
    def test_the_drafter_learns_the_tokens_that_were_scored(
        self, data: Path, thinking_target: Path, tmp_path: Path
    ) -> None:
        run_score(data, thinking_target, tmp_path / "run", reasoning="mask", rewritten="last")
        filter_data(FilterConfig(keep=1.0, run=tmp_path / "run"))
        config = with_run_defaults(TrainConfig(run=tmp_path / "run"))
        assert config.mask == MaskConfig(reasoning="mask", rewritten="last")
        told = with_run_defaults(TrainConfig(run=tmp_path / "run", reasoning="drop"))
        assert told.mask == MaskConfig(reasoning="drop", rewritten="last")

    def test_every_sample_is_trained_on_and_conversations_are_counted(
        self, data: Path, thinking_target: Path, tmp_path: Path
    ) -> None:
        run_score(data, thinking_target, tmp_path / "run")
        filter_data(FilterConfig(keep=1.0, run=tmp_path / "run"))
        report = train(TrainConfig(run=tmp_path / "run", max_steps=1, held_out=0.0))
        assert report.conversations == 8
        scored = [row for row in rows(tmp_path / "run") if row["status"] == "scored"]
        assert report.tokens == sum(row["num_tokens"] for row in scored)


class TestDryRun:
    def test_it_counts_what_score_will_do_and_writes_nothing(
        self, data: Path, thinking_target: Path, tmp_path: Path
    ) -> None:
        config = ScoreConfig((str(data),), str(thinking_target), run=tmp_path / "run")
        planned = plan(config)
        assert not (tmp_path / "run").exists()
        done = score(config)
        for name in ("read", "scored", "skipped", "truncated", "rewritten", "duplicates"):
            assert getattr(planned, name) == getattr(done, name), name
        assert planned.reasons == done.reasons == {"empty_conversation": 1}
        assert planned.num_tokens == done.num_tokens
        assert planned.num_supervised_tokens == done.num_supervised_tokens
        assert planned.samples == sum(row["num_samples"] for row in rows(tmp_path / "run"))
        assert planned.formats == {"openai": 8, "none": 1}
        assert planned.roles == {"user assistant": 7, "(user assistant)+": 1}
        assert planned.seconds == pytest.approx(planned.num_tokens / planned.tokens_per_second)

    def test_nothing_to_score(self, tiny_directory: Path, tmp_path: Path) -> None:
        empty = write_jsonl(tmp_path / "d.jsonl", [openai("Nobody answers")])
        with pytest.raises(DataError, match=r"None of the 1 records .*no_assistant_turn 1"):
            plan(ScoreConfig((str(empty),), str(tiny_directory), run=tmp_path / "run"))

    @pytest.mark.parametrize(
        ("roles", "pattern"),
        [
            ("system user assistant", "system user assistant"),
            ("user assistant user assistant user assistant", "(user assistant)+"),
            ("user assistant tool assistant tool assistant", "user (assistant tool)+ assistant"),
            ("user user assistant", "(user)+ assistant"),
            ("", "(tokens)"),
        ],
    )
    def test_role_patterns(self, roles: str, pattern: str) -> None:
        assert role_pattern(roles.split()) == pattern
