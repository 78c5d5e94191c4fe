"""Conversations as each trainer's documented schema has them, read back by what the trainers call."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import byte_tokenizer
from datasets import load_dataset
from helpers import openai, sharegpt, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from sfdd.artifacts import Provenance, digest_files
from sfdd.conversations.config import MaskConfig
from sfdd.conversations.conversation import Conversation, Skipped
from sfdd.conversations.pipeline import open_sources, read_conversations, tokenize_data
from sfdd.errors import ArtifactError, DataError, SfddError, UsageError
from sfdd.export.config import ExportDataConfig
from sfdd.export.data import ExportDataReport, export_data
from sfdd.export.trainers import TRAINERS
from sfdd.filtering.config import FilterConfig
from sfdd.filtering.run import filter_data
from sfdd.scoring.config import ScoreConfig
from sfdd.scoring.run import score

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def with_system(*turns: str, id: str) -> dict[str, Any]:
    record = openai(*turns, id=id)
    return record | {"messages": [{"role": "system", "content": "Be brief."}, *record["messages"]]}


PLAIN = [
    openai("Hi", "Hello!", "And you?", "Fine.", id="a"),
    sharegpt("Où\u2028est\x85la\u2029gare ?", "Là-bas 🚉", id="b"),
]
THOUGHT = openai("2 + 2?", "4", id="thought")
THOUGHT["messages"][1]["reasoning_content"] = "Two and two."
ODD = {
    "system": with_system("Hi", "Hello!", id="system"),
    "developer": {"messages": [{"role": "developer", "content": "x"}, *PLAIN[0]["messages"]]},
    "thought": THOUGHT,
    "call": {
        "messages": [
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "2"},
        ]
    },
    "tools": openai("Hi", "Hello!") | {"tools": [{"name": "add", "parameters": {}}]},
    "muted": {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hm.", "weight": 0},
            {"role": "user", "content": "Hi!"},
            {"role": "assistant", "content": "Hello!", "weight": 1},
        ]
    },
    "tokens": {"input_ids": [1, 50, 60, 2], "loss_mask": [0, 0, 1, 1]},
    "twice": {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "assistant", "content": "there!"},
        ]
    },
    "unread": "{",
    "no answer": openai("Hi"),
}
SKIPPED_AS_TEXT = {"unreadable": 1, "no_assistant_turn": 1, "tools": 2, "muted_turns": 1}
SKIPPED_AS_TEXT |= {"tokens_only": 1, "role_the_trainer_does_not_know": 1}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "plain.jsonl", PLAIN)


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "odd.jsonl", [*PLAIN, *ODD.values()])


def export(trainer: str, data: Path, to: Path, **choices: Any) -> ExportDataReport:
    report = export_data(ExportDataConfig(trainer, to, (str(data),), to.parent, **choices))
    assert report.read == report.written + report.skipped
    assert report.skipped == sum(report.reasons.values())
    return report


def rows(path: Path) -> list[dict[str, Any]]:
    """As JSON; every row on a line of its own, whatever is taken for the end of one."""
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def loaded(path: Path, cache: Path) -> list[dict[str, Any]]:
    """As the trainers read it."""
    kind = "parquet" if path.suffix == ".parquet" else "json"
    data = load_dataset(kind, data_files=str(path), split="train", cache_dir=str(cache))
    return data.to_list()


def messages(source: Path) -> list[tuple[dict[str, Any], ...]]:
    """What sfdd reads of a file."""
    items = read_conversations(open_sources([str(source)]))
    return [item.messages for item in items if isinstance(item, Conversation)]


class TestSchemas:
    """As documented: what a loader would see of two plain conversations."""

    def test_eagle(self, plain: Path, tmp_path: Path) -> None:
        export("eagle", plain, tmp_path / "out.jsonl")
        read = loaded(tmp_path / "out.jsonl", tmp_path)
        assert read == rows(tmp_path / "out.jsonl")
        assert [row["id"] for row in read] == ["a", "b"]
        assert read[0]["conversations"] == [
            {"from": "human", "value": "Hi"},
            {"from": "gpt", "value": "Hello!"},
            {"from": "human", "value": "And you?"},
            {"from": "gpt", "value": "Fine."},
        ]

    @pytest.mark.parametrize(
        ("trainer", "form", "key"),
        [
            ("specforge", None, "conversations"),
            ("speculators", "text", "conversations"),
            ("modelopt", None, "messages"),
            ("automodel", None, "messages"),
        ],
    )
    def test_roles_and_contents(
        self, trainer: str, form: str | None, key: str, plain: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / ("out.parquet" if trainer == "automodel" else "out.jsonl")
        export(trainer, plain, out, form=form)
        read = loaded(out, tmp_path)
        assert [row["id"] for row in read] == ["a", "b"]
        assert [row[key] for row in read] == [
            PLAIN[0]["messages"],
            [
                {"role": "user", "content": "Où\u2028est\x85la\u2029gare ?"},
                {"role": "assistant", "content": "Là-bas 🚉"},
            ],
        ]

    @pytest.mark.parametrize("trainer", ["speculators", "specforge"])
    def test_tokens(self, trainer: str, plain: Path, tmp_path: Path, tiny_directory: Path) -> None:
        """Byte-level tokens: the answer and its end of turn are supervised, nothing else."""
        report = export(
            trainer, plain, tmp_path / "out.jsonl", form="tokens", target=str(tiny_directory)
        )
        assert (report.form, report.rows) == ("tokens", 2)
        read = loaded(tmp_path / "out.jsonl", tmp_path)
        assert read == rows(tmp_path / "out.jsonl")
        tokenizer = byte_tokenizer()
        ids, mask = read[1]["input_ids"], read[1]["loss_mask"]
        assert len(ids) == len(mask)
        assert set(mask) == {0, 1}
        supervised = [i for i, m in zip(ids, mask, strict=True) if m]
        assert tokenizer.decode(supervised) == "Là-bas 🚉<|im_end|>"
        assert tokenizer.decode(ids).startswith("<|im_start|>user\nOù\u2028est")


@pytest.mark.parametrize("trainer", TRAINERS)
class TestEveryTrainer:
    def test_the_same_bytes_every_time(
        self, trainer: str, odd: Path, tmp_path: Path, tiny_directory: Path
    ) -> None:
        for name in ("one", "other"):
            export(trainer, odd, tmp_path / name, target=str(tiny_directory))
        assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()

    def test_a_round_trip_through_sfdds_own_reader(
        self, trainer: str, plain: Path, tmp_path: Path, tiny_directory: Path
    ) -> None:
        suffix = "parquet" if trainer == "automodel" else "jsonl"
        out = export(trainer, plain, tmp_path / f"out.{suffix}", target=str(tiny_directory)).output
        tokenizer = byte_tokenizer()
        before, after = (list(tokenize_data([str(p)], tokenizer, 4096)) for p in (plain, out))
        assert not [item for item in (*before, *after) if isinstance(item, Skipped)]
        for one, other in zip(before, after, strict=True):
            assert one.id == other.id
            assert np.array_equal(one.input_ids, other.input_ids)
            assert np.array_equal(one.loss_mask, other.loss_mask)

    def test_provenance_beside(
        self, trainer: str, plain: Path, tmp_path: Path, tiny_directory: Path
    ) -> None:
        report = export(trainer, plain, tmp_path / "out", target=str(tiny_directory))
        assert report.provenance == tmp_path / "out.provenance"
        provenance = Provenance.from_json(report.provenance.read_text(encoding="utf-8"))
        assert provenance.identity["for"] == trainer
        assert provenance.identity["output"] == digest_files([report.output])
        assert list(provenance.identity["data"]) == [str(plain)]
        assert provenance.about["report"]["written"] == 2

    def test_nothing_left_of_a_failure(self, trainer: str, tmp_path: Path) -> None:
        data = write_jsonl(tmp_path / "in.jsonl", [ODD["no answer"]])
        with pytest.raises(SfddError):
            export(trainer, data, tmp_path / "out", form="text")
        assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


class TestWhatCannotBeSaid:
    @pytest.mark.parametrize(
        ("trainer", "more", "written"),
        [
            # "twice" and the system prompt; the thought, too.
            (
                "eagle",
                {"reasoning": 1, "role_the_trainer_does_not_know": 2, "order_of_turns": 1},
                2,
            ),
            ("specforge", {"reasoning": 1, "order_of_turns": 1}, 3),
            ("modelopt", {}, 5),
            ("automodel", {}, 5),
        ],
    )
    def test_as_text(
        self, trainer: str, more: dict[str, int], written: int, odd: Path, tmp_path: Path
    ) -> None:
        report = export(trainer, odd, tmp_path / "out")
        assert report.reasons == SKIPPED_AS_TEXT | more
        assert (report.read, report.written) == (12, written)

    def test_tokens_say_more(self, odd: Path, tmp_path: Path, tiny_directory: Path) -> None:
        """Whatever sfdd scores: what this template cannot write is skipped by both."""
        target = str(tiny_directory)
        report = export("speculators", odd, tmp_path / "out.jsonl", target=target)
        scored = list(tokenize_data([str(odd)], byte_tokenizer(), 4096))
        skipped = [item for item in scored if isinstance(item, Skipped)]
        assert report.skipped == len(skipped) < report.read
        assert report.reasons.keys() == {item.reason.partition(":")[0] for item in skipped}
        written = rows(tmp_path / "out.jsonl")
        samples = [item for item in scored if not isinstance(item, Skipped)]
        assert [row["input_ids"] for row in written] == [s.input_ids.tolist() for s in samples]
        assert [row["loss_mask"] for row in written] == [
            s.loss_mask.astype(int).tolist() for s in samples
        ]

    @pytest.mark.parametrize("trainer", ["modelopt", "automodel"])
    def test_reasoning_is_on_every_turn_or_none(
        self, trainer: str, plain: Path, odd: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / ("out.parquet" if trainer == "automodel" else "out.jsonl")
        export(trainer, odd, out)
        read = {row["id"]: row["messages"] for row in loaded(out, tmp_path)}
        assert read["thought"] == [
            {"role": "user", "content": "2 + 2?", "reasoning_content": ""},
            {"role": "assistant", "content": "4", "reasoning_content": "Two and two."},
        ]
        assert messages(out)[list(read).index("thought")] == (
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": "4", "reasoning_content": "Two and two."},
        )
        export(trainer, plain, out, overwrite=True)
        assert {
            key for row in loaded(out, tmp_path) for turn in row["messages"] for key in turn
        } == {
            "role",
            "content",
        }

    def test_reasoning_as_scored(self, odd: Path, tmp_path: Path) -> None:
        """Dropped, it is not there to say; rendered but not supervised is more than text can say."""
        assert (
            export("eagle", odd, tmp_path / "a", reasoning="drop").reasons.get("reasoning") is None
        )
        dropped = {row["id"]: row for row in rows(tmp_path / "a")}
        assert dropped["thought"]["conversations"][1] == {"from": "gpt", "value": "4"}
        assert export("modelopt", odd, tmp_path / "b", reasoning="mask").reasons["reasoning"] == 1

    INLINE = "<think>\nTwo and two.\n</think>\n\n"

    @pytest.mark.parametrize(
        ("trainer", "reasoning", "written"),
        [
            ("modelopt", "keep", INLINE + "4"),  # as the chat template was given it
            ("modelopt", "drop", "4"),
            ("modelopt", "mask", None),
            ("eagle", "keep", None),
            ("eagle", "drop", "4"),
            ("specforge", "keep", None),
            ("specforge", "drop", "4"),
        ],
    )
    def test_a_thought_in_the_content(
        self, trainer: str, reasoning: str, written: str | None, tmp_path: Path
    ) -> None:
        thinks = openai("2 + 2?", self.INLINE + "4", id="x")
        data = write_jsonl(tmp_path / "in.jsonl", [PLAIN[0], thinks])
        report = export(trainer, data, tmp_path / "out", reasoning=reasoning)
        assert report.reasons == ({} if written else {"reasoning": 1})
        turns = next(value for key, value in rows(report.output)[-1].items() if key != "id")
        assert (list(turns[-1].values())[-1] == written) == bool(written)

    def test_a_thought_said_twice_is_written_once(self, tmp_path: Path) -> None:
        record = openai("2 + 2?", self.INLINE + "4", id="x")
        record["messages"][1]["reasoning_content"] = "Two and two."
        export("modelopt", write_jsonl(tmp_path / "in.jsonl", [record]), tmp_path / "out")
        assert rows(tmp_path / "out")[0]["messages"][1] == THOUGHT["messages"][1]

    def test_a_thought_that_the_prompt_began(self, tmp_path: Path) -> None:
        """Whether the prompt did, only the target's template knows: it is not written as an answer."""
        data = write_jsonl(tmp_path / "in.jsonl", [openai("?", "Hm.</think>4", id="x"), PLAIN[0]])
        report = export("modelopt", data, tmp_path / "out", reasoning="drop")
        assert report.reasons == {"reasoning": 1}

    def test_inline_thoughts_alone(self, tmp_path: Path) -> None:
        data = write_jsonl(tmp_path / "in.jsonl", [openai("?", self.INLINE, id="x"), PLAIN[0]])
        report = export("modelopt", data, tmp_path / "out", reasoning="drop")
        assert report.reasons == {"empty_conversation": 1}

    def test_an_answer_of_thoughts_alone(self, tmp_path: Path) -> None:
        record = openai("2 + 2?", "", id="x")
        record["messages"][1]["reasoning_content"] = "Hm."
        data = write_jsonl(tmp_path / "in.jsonl", [record, PLAIN[0]])
        report = export("modelopt", data, tmp_path / "out", reasoning="drop")
        assert report.reasons == {"empty_conversation": 1}

    def test_the_last_turn_alone_is_noted(self, plain: Path, tmp_path: Path) -> None:
        (note,) = export("modelopt", plain, tmp_path / "out", last_turn_only=True).notes
        assert note.startswith("Only the last answer of a conversation was scored")

    def test_turns_that_specforge_would_cut(self, tmp_path: Path) -> None:
        """It drops what comes before the user, and all from an answer that follows no user."""
        user, assistant = ({"role": r, "content": r} for r in ("user", "assistant"))
        system = {"role": "system", "content": "s"}
        orders = {
            "fits": [system, user, user, assistant, user],
            "begins with the assistant": [assistant, user, assistant],
            "answers twice": [user, assistant, assistant],
            "answers the system": [user, system, assistant],
            "two systems": [system, system, user, assistant],
        }
        data = write_jsonl(
            tmp_path / "in.jsonl", [{"id": n, "messages": m} for n, m in orders.items()]
        )
        assert export("specforge", data, tmp_path / "out").reasons == {"order_of_turns": 4}
        assert [row["id"] for row in rows(tmp_path / "out")] == ["fits"]

    @pytest.mark.parametrize("trainer", ["eagle", "modelopt", "automodel"])
    def test_tokens_for_who_reads_none(self, trainer: str, plain: Path, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="takes conversations, not tokens: leave --form out"):
            export(trainer, plain, tmp_path / "out", form="tokens")

    def test_nothing_at_all(self, tmp_path: Path) -> None:
        data = write_jsonl(tmp_path / "in.jsonl", [ODD["call"], ODD["tools"]])
        with pytest.raises(DataError) as error:
            export("specforge", data, tmp_path / "out")
        assert str(error.value) == (
            "None of the 2 conversations can be written as SpecForge reads them (2 tools), so nothing "
            "was. Try --form tokens."
        )


TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"])},
    optional={
        "content": st.text(max_size=4),
        "reasoning_content": st.just("Hm."),
        "tool_calls": st.just([CALL]),
        "weight": st.sampled_from([0, 1]),
    },
)


@settings(max_examples=60, deadline=None)
@given(
    chats=st.lists(st.lists(TURN, max_size=4), min_size=1, max_size=4),
    trainer=st.sampled_from(list(TRAINERS)),
    form=st.sampled_from(["text", "tokens"]),
)
def test_counts_add_up_and_what_is_written_is_what_was_read(
    chats: list[Any],
    trainer: str,
    form: str,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_directory: Path,
) -> None:
    """Every conversation is written as sfdd reads it, or skipped; `export` adds up the counts."""
    folder = tmp_path_factory.mktemp("any")
    records = [{"id": str(i), "messages": turns} for i, turns in enumerate(chats)]
    data = write_jsonl(folder / "in.jsonl", records)
    out = folder / ("out.parquet" if trainer == "automodel" else "out.jsonl")
    try:
        report = export(trainer, data, out, form=form, target=str(tiny_directory))
    except (DataError, UsageError):
        assert not out.exists()
        return
    before = {
        item.id: item
        for item in read_conversations(open_sources([str(data)]))
        if isinstance(item, Conversation)
    }
    after = list(read_conversations(open_sources([str(out)])))
    assert len(after) == report.rows >= report.written
    if form == "text":
        assert report.rows == report.written
        assert all(item.messages == before[item.id].messages for item in after)  # type: ignore[union-attr]


class TestOutput:
    def test_only_with_overwrite(self, plain: Path, tmp_path: Path) -> None:
        out = export("eagle", plain, tmp_path / "out").output
        before = out.read_bytes()
        with pytest.raises(ArtifactError, match=r"out exists\. Choose another output, or add --ov"):
            export("modelopt", plain, out)
        assert out.read_bytes() == before
        export("modelopt", plain, out, overwrite=True)
        assert "messages" in rows(out)[0]

    def test_a_file_in_the_place_of_the_provenance(self, plain: Path, tmp_path: Path) -> None:
        mine = tmp_path / "out.provenance"
        mine.write_text("years of work")
        with pytest.raises(ArtifactError, match=r"out\.provenance exists\. Choose another output"):
            export("eagle", plain, tmp_path / "out")
        assert mine.read_text() == "years of work"
        assert not (tmp_path / "out").exists()
        export("eagle", plain, tmp_path / "out", overwrite=True)
        assert Provenance.from_json(mine.read_text()).identity["for"] == "eagle"

    def test_no_provenance_of_what_was_not_put_in_place(
        self, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replace = Path.replace

        def refuse(self: Path, to: Path) -> Path:
            if to.name == "out":
                raise OSError("No space left on device")
            return replace(self, to)

        monkeypatch.setattr(Path, "replace", refuse)
        with pytest.raises(ArtifactError, match="No space left on device"):
            export("eagle", plain, tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["plain.jsonl"]

    def test_never_the_data(self, plain: Path, tmp_path: Path) -> None:
        with pytest.raises(ArtifactError, match="is one of the data sets to export"):
            export("eagle", plain, plain, overwrite=True)
        with pytest.raises(ArtifactError, match="is a directory"):
            export("eagle", plain, tmp_path, overwrite=True)

    def test_ids_without_the_folders_of_this_machine(self, tmp_path: Path) -> None:
        data = write_jsonl(tmp_path / "chat.jsonl", [openai("a", "b"), openai("c", "d", id="own")])
        export("eagle", data, tmp_path / "out")
        assert [row["id"] for row in rows(tmp_path / "out")] == ["chat.jsonl:0", "own"]

    def test_more_rows_than_a_parquet_group(self, tmp_path: Path) -> None:
        data = write_jsonl(
            tmp_path / "in.jsonl", (openai(str(i), "x", id=str(i)) for i in range(2500))
        )
        out = export("automodel", data, tmp_path / "out.parquet").output
        file = pq.ParquetFile(out)
        assert [file.metadata.row_group(i).num_rows for i in range(3)] == [1000, 1000, 500]
        assert file.read()["id"].to_pylist() == [str(i) for i in range(2500)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_directory: Path) -> Path:
    """A run scored with choices of its own, and filtered."""
    folder = tmp_path_factory.mktemp("run")
    chats = [openai("Hi", "a " * i, "More", "b " * i, id=f"c{i}") for i in range(1, 9)]
    data = write_jsonl(folder / "chat.jsonl", chats)
    mask = MaskConfig(last_turn_only=True)
    score(ScoreConfig((str(data),), str(tiny_directory), folder / "run", mask, max_length=70))
    filter_data(FilterConfig(keep=1.0, run=folder / "run"))
    return folder / "run"


class TestOfARun:
    def test_the_distilled_data_as_scored(self, run: Path, tmp_path: Path) -> None:
        """Tokens by the run's target, cut where it was cut, the last answer supervised alone."""
        report = export_data(ExportDataConfig("speculators", tmp_path / "out.jsonl", run=run))
        assert (report.read, report.written, report.form) == (8, 8, "tokens")
        assert report.data == (str(run / "distilled/chat.jsonl"),)
        tokenizer, mask = byte_tokenizer(), MaskConfig(last_turn_only=True)
        expected = list(tokenize_data(report.data, tokenizer, 70, mask))
        written = rows(report.output)
        assert [row["input_ids"] for row in written] == [c.input_ids.tolist() for c in expected]  # type: ignore[union-attr]
        assert [sum(row["loss_mask"]) for row in written] == [
            c.num_supervised_tokens
            for c in expected  # type: ignore[union-attr]
        ]
        assert report.truncated == sum(c.truncated for c in expected) > 0  # type: ignore[union-attr]

    def test_what_the_run_says_can_be_said_otherwise(self, run: Path, tmp_path: Path) -> None:
        config = ExportDataConfig(
            "speculators", tmp_path / "out", run=run, last_turn_only=False, max_length=4096
        )
        report = export_data(config)
        tokens = list(tokenize_data(report.data, byte_tokenizer(), 4096))
        assert [row["input_ids"] for row in rows(report.output)] == [
            c.input_ids.tolist()
            for c in tokens  # type: ignore[union-attr]
        ]

    def test_text_is_written_whole(self, run: Path, tmp_path: Path) -> None:
        report = export_data(ExportDataConfig("modelopt", tmp_path / "text.jsonl", run=run))
        tokens = export_data(ExportDataConfig("speculators", tmp_path / "tokens.jsonl", run=run))
        assert tokens.truncated > 0
        assert report.notes[-1] == (
            f"{tokens.truncated} of the scored conversations were cut at 70 tokens, and text is written "
            "whole: set the trainer to cut it there, or it learns more than was scored."
        )
        assert tokens.notes == ()
        (run / "scores.parquet").rename(tmp_path / "scores.parquet")
        again = ExportDataConfig("modelopt", tmp_path / "again.jsonl", run=run)
        assert len(export_data(again).notes) == 1  # of the last turn alone
        (tmp_path / "scores.parquet").rename(run / "scores.parquet")

    def test_default_output(self, run: Path) -> None:
        report = export_data(ExportDataConfig("automodel", run=run))
        assert report.output == run / "export/automodel.parquet"
        about = Provenance.from_json(report.provenance.read_text(encoding="utf-8")).about
        assert about["run"]["identity"]["keep"] == 1.0

    def test_a_target_that_selected_nothing(self, run: Path, tmp_path: Path) -> None:
        other = tmp_path / "other"
        other.mkdir()
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = str(tokenizer.chat_template).replace("assistant", "bot")
        tokenizer.save_pretrained(other)
        config = ExportDataConfig("speculators", tmp_path / "out", run=run, target=str(other))
        with pytest.raises(ArtifactError, match=r"The data were selected by .*chat_template"):
            export_data(config)

    def test_distilled_files_that_were_changed(
        self, run: Path, tmp_path: Path, tiny_directory: Path
    ) -> None:
        data = write_jsonl(tmp_path / "chat.jsonl", [openai("Hi", "a " * i) for i in range(1, 5)])
        mine = tmp_path / "run"
        score(ScoreConfig((str(data),), str(tiny_directory), mine))
        filter_data(FilterConfig(run=mine))
        with (mine / "distilled/chat.jsonl").open("a") as file:
            file.write(json.dumps(openai("More", "more")) + "\n")
        with pytest.raises(ArtifactError, match="is not what 'sfdd filter' wrote"):
            export_data(ExportDataConfig("eagle", run=mine))

    def test_a_run_without_data(self, tmp_path: Path, plain: Path) -> None:
        with pytest.raises(UsageError, match="has no distilled data"):
            export_data(ExportDataConfig("eagle", run=tmp_path))
        with pytest.raises(
            UsageError, match="Tokens are made by a target's tokenizer, and nothing"
        ):
            export("speculators", plain, tmp_path / "out")
