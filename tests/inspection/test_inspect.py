"""`inspect_record` on real files, real targets and tables that `score` and `filter_data` wrote."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from conftest import save_tiny_target
from conversations.templates import family_tokenizer
from helpers import openai, sharegpt, write_jsonl
from transformers import AutoModelForCausalLM

from sfdd.artifacts import RunDirectory
from sfdd.conversations.conversation import Conversation
from sfdd.conversations.files import JsonLinesSource
from sfdd.conversations.records import Record
from sfdd.errors import ArtifactError, DataError, UsageError
from sfdd.filtering.config import FilterConfig
from sfdd.filtering.run import filter_data
from sfdd.inspection.config import InspectConfig
from sfdd.inspection.records import find_record
from sfdd.inspection.report import InspectReport, Token
from sfdd.inspection.run import inspect_record
from sfdd.scoring.config import ScoreConfig
from sfdd.scoring.run import score
from sfdd.targets.statistics import STATISTICS
from sfdd.targets.transformers_target import TransformersTarget

RECORDS: list[Any] = [
    openai("Hi", "Hello there"),
    sharegpt("Wie?", "Grün 😀", "Was?", "Gut.", id="second"),
    "{broken",
    openai("Nobody answers", id="unanswered"),
    openai("Q" * 300, "too late", id="cut"),
    openai("twice", "one", id="second"),
    {"input_ids": [1, 70, 71, 72, 2], "loss_mask": [1, 0, 0, 1, 1], "id": "ready"},
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "chat.jsonl", RECORDS)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def scored(data: Path, run: Path, tiny_directory: Path) -> Path:
    """The run, with the flatness of every token."""
    return run_score(data, run, tiny_directory, token_scores=True)


def run_score(data: Path, run: Path, target: Path, **settings: Any) -> Path:
    score(ScoreConfig((str(data),), str(target), run=run, **settings))
    return run


def look(run: Path, *data: Path, target: Path | None = None, **settings: Any) -> InspectReport:
    return inspect_record(
        InspectConfig(
            data=tuple(map(str, data)),
            target=str(target) if target else None,
            run=run,
            **settings,
        )
    )


def row(run: Path, number: int) -> dict[str, Any]:
    return pq.read_table(RunDirectory(run).scores).to_pylist()[number]


def text(tokens: Iterator[Token] | tuple[Token, ...]) -> str:
    return "".join(token.text for token in tokens)


def supervised(report: InspectReport) -> list[Token]:
    return [token for sample in report.samples for token in sample if token.supervised]


def flatness(report: InspectReport) -> list[float | None]:
    return [token.flatness for token in supervised(report)]


class TestNothingScored:
    def test_the_first_record(self, data: Path, run: Path, tiny_directory: Path) -> None:
        report = look(run, data, target=tiny_directory)
        (tokens,) = report.samples
        assert text(tokens) == (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello there<|im_end|>\n"
        )
        assert text(iter(supervised(report))) == "Hello there<|im_end|>"
        assert tokens[0] == Token(1, "<|im_start|>", supervised=False, flatness=None)
        assert (report.num_tokens, report.num_supervised_tokens) == (len(tokens), 12)
        assert (report.id, report.source, report.row) == (f"{data}:0", str(data), 0)
        assert (report.status, report.reason, report.format) == ("rendered", None, "openai")
        assert report.roles == ("user", "assistant")
        assert (report.truncated, report.rewritten, report.flatness) == (False, False, None)
        assert (report.scores, report.notes, set(flatness(report))) == (None, (), {None})
        assert not run.exists()

    @pytest.mark.parametrize("which", [{"row": 1}, {"id": "second"}])
    def test_by_row_and_by_id(
        self, which: dict[str, Any], data: Path, run: Path, tiny_directory: Path
    ) -> None:
        report = look(run, data, target=tiny_directory, **which)
        assert (report.id, report.row, report.format) == ("second", 1, "sharegpt")
        assert text(iter(supervised(report))) == "Grün 😀<|im_end|>Gut.<|im_end|>"
        emoji = [t for t in supervised(report) if t.text == "😀"]
        assert len(emoji) == 1
        assert sum(t.text == "" for t in supervised(report)) == 4  # 3 of 😀, 1 of ü

    def test_an_id_that_is_taken(self, data: Path, run: Path, tiny_directory: Path) -> None:
        report = look(run, data, target=tiny_directory, id=f"{data}:5")
        assert (report.id, text(iter(supervised(report)))) == (f"{data}:5", "one<|im_end|>")

    def test_tokens_as_they_came(self, data: Path, run: Path, tiny_directory: Path) -> None:
        report = look(run, data, target=tiny_directory, id="ready")
        assert [(t.id, t.supervised) for t in report.samples[0]] == [
            *((1, False), (70, False), (71, False)),
            *((72, True), (2, True)),
        ]
        assert (report.format, report.roles) == ("tokenized", ())

    def test_live(self, data: Path, run: Path, tiny_target: TransformersTarget) -> None:
        report = look(run, data, target=Path(tiny_target.source.name), row=1, score=True)
        assert report.scores == "live"
        assert report.vocab_size == 260
        assert len(flatness(report)) == report.num_supervised_tokens
        mean = sum(value or math.nan for value in flatness(report)) / len(flatness(report))
        assert report.flatness == pytest.approx(mean)
        assert report.effective_tokens == pytest.approx(260 * (report.flatness or 0) ** 2)

    def test_no_target_and_no_data(self, data: Path, run: Path, tiny_directory: Path) -> None:
        with pytest.raises(UsageError, match=r"No target given, and nothing was scored in .*run"):
            look(run, data)
        with pytest.raises(UsageError, match="No data set given, and nothing was scored"):
            look(run, target=tiny_directory)


class TestNoSuchRecord:
    def test_a_row(self, data: Path, run: Path, tiny_directory: Path) -> None:
        with pytest.raises(DataError) as error:
            look(run, data, target=tiny_directory, row=7)
        assert str(error.value) == f"{data} has no row 7: it has 7 records, and the first is row 0."

    def test_an_id(self, data: Path, run: Path, tiny_directory: Path) -> None:
        with pytest.raises(DataError, match=r"None of the 7 records of .* has the id 'third'"):
            look(run, data, target=tiny_directory, id="third")

    def test_a_row_of_several_data_sets(
        self, data: Path, run: Path, tiny_directory: Path, tmp_path: Path
    ) -> None:
        other = write_jsonl(tmp_path / "other.jsonl", [openai("a", "b", id="x")])
        with pytest.raises(UsageError, match="--row 0 could be in any of 2 data sets"):
            look(run, data, other, target=tiny_directory, row=0)
        assert look(run, data, other, target=tiny_directory, id="x").source == str(other)

    def test_reading_stops_at_the_record(self, data: Path) -> None:
        class Endless(JsonLinesSource):
            def records(self) -> Iterator[Record]:
                yield from list(super().records())[:2]
                raise AssertionError("read on")

        found = find_record([Endless(data)], 1, None, None)
        assert isinstance(found, Conversation)
        assert found.id == "second"


class TestSkipped:
    @pytest.mark.parametrize(
        ("number", "reason"), [(2, "unreadable: line 3"), (3, "no_assistant_turn")]
    )
    def test_when_it_was_read(
        self, number: int, reason: str, data: Path, run: Path, tiny_directory: Path
    ) -> None:
        report = look(run, data, target=tiny_directory, row=number)
        assert report.status == "skipped"
        assert (report.reason or "").startswith(reason)
        assert (report.samples, report.messages) == ((), ())

    def test_when_it_was_rendered(self, data: Path, run: Path, tiny_directory: Path) -> None:
        report = look(run, data, target=tiny_directory, id="cut", max_length=200)
        assert report.reason == "no_supervised_tokens: within 200 tokens"
        assert report.roles == ("user", "assistant")
        assert [m["content"] for m in report.messages] == ["Q" * 300, "too late"]


class TestScored:
    @pytest.mark.parametrize("number", [0, 1, 5, 6])
    def test_every_token_as_in_the_table(self, number: int, scored: Path) -> None:
        """Target and data are those of the run."""
        report, expected = look(scored, row=number), row(scored, number)
        assert flatness(report) == expected["token_flatness"]
        assert {name: getattr(report, name) for name in STATISTICS} == {
            name: expected[name] for name in STATISTICS
        }
        for name in ("id", "row", "content_hash", "num_tokens", "num_supervised_tokens"):
            assert getattr(report, name) == expected[name]
        assert (report.scores, report.notes) == (str(scored / "scores.parquet"), ())

    def test_computed_now_is_what_was_stored(self, scored: Path) -> None:
        live, stored = look(scored, row=1, score=True), look(scored, row=1)
        assert live.scores == "live"
        assert flatness(live) == pytest.approx(flatness(stored), rel=1e-6)

    def test_without_token_scores(self, data: Path, run: Path, tiny_directory: Path) -> None:
        run_score(data, run, tiny_directory)
        report = look(run, row=1)
        assert report.flatness == row(run, 1)["flatness"]
        assert set(flatness(report)) == {None}
        (note,) = report.notes
        assert note.startswith(f"{run}/scores.parquet holds the means alone.")

    def test_as_scored(self, data: Path, run: Path, tiny_directory: Path) -> None:
        """The choices are those of the scores; a flag wins, and then the scores are of other tokens."""
        run_score(data, run, tiny_directory, token_scores=True, max_length=60)
        report = look(run, row=1)
        assert (report.num_tokens, report.truncated) == (60, True)
        assert flatness(report) == row(run, 1)["token_flatness"]
        whole = look(run, row=1, max_length=500)
        assert not whole.truncated
        assert (whole.flatness, set(flatness(whole))) == (None, {None})
        (note,) = whole.notes
        assert "was made with another max_length (was 60, now 500), so" in note

    def test_other_choices(self, scored: Path) -> None:
        report = look(scored, row=1, last_turn_only=True, reasoning="mask")
        assert text(iter(supervised(report))) == "Gut.<|im_end|>"
        (note,) = report.notes
        assert "reasoning (was keep, now mask); last_turn_only (was False, now True)" in note

    def test_another_target(self, scored: Path, tmp_path: Path) -> None:
        other = save_tiny_target(tmp_path / "other", seed=1)
        report = look(scored, row=1, target=other)
        assert report.flatness is None
        assert f"now {other})" in report.notes[0]

    def test_data_that_changed(self, data: Path, scored: Path) -> None:
        write_jsonl(data, [openai("Hi", "Hello you"), *RECORDS[1:]])
        report = look(scored, row=0)
        assert text(iter(supervised(report))) == "Hello you<|im_end|>"
        assert report.flatness is None
        (note,) = report.notes
        assert note.startswith(f"Row 0 of {data} has changed since it was scored")

    def test_a_conversation_that_was_not_scored(self, data: Path, scored: Path) -> None:
        with data.open("a") as file:
            file.write(json.dumps(openai("new", "newer")) + "\n")
        (note,) = look(scored, row=7).notes
        assert note.startswith(f"{scored}/scores.parquet has no scores of this conversation.")

    def test_the_distilled_data_find_their_scores(self, scored: Path) -> None:
        filter_data(FilterConfig(keep=0.2, run=scored))
        distilled = scored / "distilled" / "chat.jsonl"
        report = look(scored, distilled)
        kept = [r for r in pq.read_table(scored / "scores.parquet").to_pylist() if r["flatness"]]
        flattest = max(kept, key=lambda r: r["flatness"])
        assert report.row != flattest["row"]
        assert (report.row, report.content_hash) == (0, flattest["content_hash"])
        assert flatness(report) == flattest["token_flatness"]

    def test_in_a_later_row_group(self, scored: Path) -> None:
        table = pq.read_table(scored / "scores.parquet")
        pq.write_table(table, scored / "scores.parquet", row_group_size=2)
        report = look(scored, row=5)
        assert flatness(report) == row(scored, 5)["token_flatness"]

    def test_a_damaged_table(self, scored: Path) -> None:
        path = scored / "scores.parquet"
        content = bytearray(path.read_bytes())
        content[4:400] = bytes(396)
        path.write_bytes(content)
        with pytest.raises(ArtifactError, match=r"scores.parquet are damaged"):
            look(scored, row=1)

    def test_writes_nothing(self, scored: Path) -> None:
        before = {path: path.stat().st_mtime_ns for path in scored.rglob("*")}
        look(scored, row=1)
        look(scored, row=0, score=True)
        assert {path: path.stat().st_mtime_ns for path in scored.rglob("*")} == before


def test_logits_that_overflow(data: Path, run: Path, tmp_path: Path) -> None:
    broken = save_tiny_target(tmp_path / "broken")
    model = AutoModelForCausalLM.from_pretrained(broken)
    with torch.no_grad():
        model.lm_head.weight.fill_(3e38)
    model.save_pretrained(broken)
    report = look(run, data, target=broken, score=True)
    assert (report.flatness, report.num_supervised_tokens) == (None, 12)
    assert "non_finite" in report.notes[0]
    with pytest.raises(DataError):
        run_score(data, run, broken)
    assert look(run, data).notes == (
        "This conversation was skipped when it was scored: non_finite.",
    )


class TestRewritten:
    """A template that forgets earlier thoughts: a sample for each answer."""

    THOUGHTS = openai("1?", "<think>\nhm\n</think>\n\nOne", "2?", "<think>\nho\n</think>\n\nTwo")

    @pytest.fixture
    def thinker(self, tmp_path: Path) -> Path:
        directory = save_tiny_target(tmp_path / "thinker")
        family_tokenizer("qwen3").save_pretrained(directory)
        return directory

    def test_every_sample_with_its_flatness(self, thinker: Path, run: Path, tmp_path: Path) -> None:
        data = write_jsonl(tmp_path / "thoughts.jsonl", [self.THOUGHTS])
        run_score(data, run, thinker, token_scores=True)
        report = look(run)
        assert (report.rewritten, len(report.samples)) == (True, 2)
        assert [text(t for t in sample if t.supervised) for sample in report.samples] == [
            "<think>\nhm\n</think>\n\nOne<|im_end|>",
            "<think>\nho\n</think>\n\nTwo<|im_end|>",
        ]
        assert "hm" not in text(report.samples[1])
        stored = row(run, 0)["token_flatness"]
        count = sum(token.supervised for token in report.samples[0])
        assert [t.flatness for t in report.samples[0] if t.supervised] == stored[:count]
        assert [t.flatness for t in report.samples[1] if t.supervised] == stored[count:]

    def test_the_last_alone(self, thinker: Path, run: Path, tmp_path: Path) -> None:
        data = write_jsonl(tmp_path / "thoughts.jsonl", [self.THOUGHTS])
        report = look(run, data, target=thinker, rewritten="last")
        assert len(report.samples) == 1
        assert text(iter(supervised(report))) == "<think>\nho\n</think>\n\nTwo<|im_end|>"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"row": 1, "id": "x"}, "--row and --id both name a record"),
        ({"row": -1}, "--row is -1; the first record is row 0"),
        ({"max_length": 1}, "--max-length must be at least 2"),
        ({"reasoning": "all"}, "--reasoning is 'all'; it must be one of keep"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        InspectConfig(**settings)


def test_lengths_as_score_takes_them(data: Path) -> None:
    settled = InspectConfig(data=("x",), target="y").as_scored(None)
    assert settled.max_length == ScoreConfig(data=("x",), target="y").max_length
    assert settled.mask == ScoreConfig(data=("x",), target="y").mask


def test_smollm2_on_the_readmes_example(
    run: Path, tmp_path: Path, smollm2: TransformersTarget
) -> None:
    data = write_jsonl(tmp_path / "chat.jsonl", [openai("Hi", "Hello there 👩🏽‍🚀")])
    report = look(run, data, target=Path(smollm2.source.name))
    expected = smollm2.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there 👩🏽‍🚀"}],
        tokenize=False,
    )
    assert text(report.samples[0]) == expected
    assert text(iter(supervised(report))) == "Hello there 👩🏽‍🚀<|im_end|>"
