"""Whatever happens to a run, what is done stays, and what is wrong is said."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CHATML, byte_tokenizer, save_tiny_target
from helpers import openai, random_conversation, write_jsonl
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from sfdd.artifacts import RunDirectory
from sfdd.conversations.config import MaskConfig
from sfdd.errors import ArtifactError, TargetError
from sfdd.scoring.config import ScoreConfig
from sfdd.scoring.run import ScoreReport, score
from sfdd.scoring.watch import Watch
from sfdd.targets.statistics import STATISTICS, TokenStats
from sfdd.targets.transformers_target import TransformersTarget

RECORDS = [openai(f"Question {i}", "word " * (i % 13 + 1), id=f"c{i}") for i in range(120)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "chat.jsonl", RECORDS)


def run_score(data: Path, target: Path, run: Path, **settings: Any) -> ScoreReport:
    return score(ScoreConfig((str(data),), str(target), run=run, **settings))


def sfdd(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The command, after some code of the test's in the same process."""
    program = f"{code}\nimport sys\nfrom sfdd_cli.main import app\napp(sys.argv[1:])"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


class TestShards:
    @pytest.fixture
    def run(self, data: Path, tiny_directory: Path, tmp_path: Path) -> Path:
        """A run whose first half of the rows lies in shards."""
        run_score(data, tiny_directory, tmp_path / "run", shard_index=0, num_shards=2)
        return tmp_path / "run"

    @pytest.mark.parametrize("damage", ["cut", "emptied", "a bit flipped", "another's"])
    def test_a_damaged_shard_is_scored_again(
        self, damage: str, run: Path, data: Path, tiny_directory: Path, caplog: Any
    ) -> None:
        (shard,) = (run / "scores.partial").glob("*.parquet")
        content = bytearray(shard.read_bytes())
        content[len(content) // 3] ^= 1
        shard.write_bytes(
            {"cut": content[:-20], "emptied": b"", "a bit flipped": content, "another's": b"PAR1"}[
                damage
            ]
        )
        report = run_score(data, tiny_directory, run)
        assert (report.read, report.scored, report.resumed) == (120, 120, 0)
        assert f"{shard} is damaged; its records are scored again" in caplog.text

    def test_what_a_killed_process_was_writing_is_removed(
        self, run: Path, data: Path, tiny_directory: Path
    ) -> None:
        (shard,) = (run / "scores.partial").glob("*.parquet")
        (run / "scores.partial" / f".{shard.name}.123.tmp").write_bytes(b"PAR1")
        assert run_score(data, tiny_directory, run).read == 120
        assert not (run / "scores.partial").exists()

    def test_files_of_the_users_are_left_alone(
        self, run: Path, data: Path, tiny_directory: Path
    ) -> None:
        for name in ("scores.partial/notes.txt", "scores.partial/mine.parquet", "keep.me"):
            (run / name).write_text("mine")
        report = run_score(data, tiny_directory, run, overwrite=True)
        assert (report.read, report.resumed) == (120, 0)
        for name in ("scores.partial/notes.txt", "scores.partial/mine.parquet", "keep.me"):
            assert (run / name).read_text() == "mine"

    def test_a_damaged_table_is_named_before_anything_is_computed(
        self, run: Path, data: Path, tiny_directory: Path
    ) -> None:
        run_score(data, tiny_directory, run)
        table = RunDirectory(run).scores
        content = bytearray(table.read_bytes())
        content[len(content) // 2] ^= 1
        table.write_bytes(content)
        with pytest.raises(ArtifactError, match=r"scores\.parquet are damaged .*--overwrite"):
            run_score(data, tiny_directory, run)


def test_a_full_disk(data: Path, tiny_directory: Path, tmp_path: Path) -> None:
    """No file may grow beyond a limit, as on a disk that is full; what was written before stays."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))"
    shards = "from sfdd.scoring import store; store._SECONDS_PER_SHARD = 0.0"
    arguments = ("score", data, "--target", tiny_directory, "--run", tmp_path / "run")
    done = sfdd(f"{shards}\n{limit}", *arguments, "--batch-tokens", 50)
    assert done.returncode == 1
    assert "Error: Cannot write" in done.stderr
    assert (
        "Free the disk or choose another place with --run; what was finished is kept" in done.stderr
    )
    assert "Traceback" not in done.stderr


class TestRefusedByName:
    def test_another_tokenizer(self, data: Path, tmp_path: Path) -> None:
        target = save_tiny_target(tmp_path / "target")
        run_score(data, target, tmp_path / "run")
        tokenizer = AutoTokenizer.from_pretrained(target)
        tokenizer.add_tokens(["word"])
        tokenizer.save_pretrained(target)
        with pytest.raises(ArtifactError, match=r"made with another tokenizer \(was"):
            run_score(data, target, tmp_path / "run")

    def test_another_template(self, data: Path, tmp_path: Path) -> None:
        target = save_tiny_target(tmp_path / "target")
        run_score(data, target, tmp_path / "run")
        byte_tokenizer(CHATML.replace("assistant", "Assistant")).save_pretrained(target)
        with pytest.raises(ArtifactError, match=r"made with another chat_template \(was"):
            run_score(data, target, tmp_path / "run")

    def test_another_mask(self, data: Path, tiny_directory: Path, tmp_path: Path) -> None:
        run_score(data, tiny_directory, tmp_path / "run")
        with pytest.raises(ArtifactError, match=r"another last_turn_only \(was False, now True\)"):
            run_score(data, tiny_directory, tmp_path / "run", mask=MaskConfig(last_turn_only=True))


class TestSigns:
    def broken_target(self, directory: Path, letter: str) -> Path:
        """A target whose logits are undefined once it has read a certain letter."""
        target = save_tiny_target(directory)
        weights = load_file(target / "model.safetensors")
        (token,) = byte_tokenizer()(letter, add_special_tokens=False)["input_ids"]
        weights["model.embed_tokens.weight"][token] = float("nan")
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
        return target

    def test_too_many_undefined_logits_stop_the_run(self, tmp_path: Path) -> None:
        records = [openai("Z" if i % 20 == 0 else "hi", "hello") for i in range(400)]
        data = write_jsonl(tmp_path / "d.jsonl", records)
        target = self.broken_target(tmp_path / "target", "Z")
        with pytest.raises(
            TargetError, match=r"for \d+ of the first \d+ conversations, more than 1 %"
        ):
            run_score(data, target, tmp_path / "run", batch_tokens=500)
        assert list((tmp_path / "run" / "scores.partial").glob("*.parquet"))

    def test_a_few_are_marked(self, tmp_path: Path) -> None:
        records = [openai("Z" if i == 50 else "hi", "hello") for i in range(150)]
        data = write_jsonl(tmp_path / "d.jsonl", records)
        target = self.broken_target(tmp_path / "target", "Z")
        report = run_score(data, target, tmp_path / "run", batch_tokens=500)
        assert report.reasons == {"non_finite": 1}

    def stats(self, nll: float, count: int) -> TokenStats:
        values = {name: np.full(count, 0.5, np.float32) for name in STATISTICS}
        return TokenStats(**(values | {"nll": np.full(count, nll, np.float32)}))

    @pytest.mark.parametrize(("nll", "warned"), [(5.57, True), (5.55, False)])
    def test_a_target_that_knows_nothing_draws_a_warning(
        self, nll: float, warned: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        """log 260 is 5.5607."""
        watch = Watch("some/target", 260)
        with caplog.at_level(logging.WARNING):
            for _ in range(30):
                watch.see(self.stats(nll, 100))
        assert caplog.text.count("some/target looks untrained") == warned

    def test_a_trained_target_draws_none(
        self, smollm2: TransformersTarget, caplog: pytest.LogCaptureFixture
    ) -> None:
        watch = Watch("smollm2", smollm2.vocab_size)
        ids = smollm2.tokenizer("The capital of France is Paris, and it lies on the river Seine.")
        sample = random_conversation(len(ids["input_ids"]), 1, seed=0)
        sample.input_ids[:] = ids["input_ids"]
        with caplog.at_level(logging.WARNING):
            watch.see(smollm2.token_stats([sample])[0])
            watch.judge()
        assert "untrained" not in caplog.text


def test_json_lines_of_a_long_run(data: Path, tiny_directory: Path, tmp_path: Path) -> None:
    done = sfdd(
        "from sfdd_cli import display; display._SECONDS_BETWEEN_LINES = 0.0",
        "score", data, "--target", tiny_directory, "--run", tmp_path / "run", "--log-json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert {line["event"] for line in lines} == {"progress", "finished"}
    last = lines[-1]
    assert (last["event"], last["read"], last["scored"]) == ("finished", 120, 120)
    assert 0 <= last["padding"] < 0.05
    assert last["tokens_per_second"] > 0
    assert [line["done"] for line in lines if line["event"] == "progress"][-1] == 120
