import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from helpers import openai, sharegpt, write_jsonl

from sfdd.artifacts import digest_files, read_parquet_provenance
from sfdd.errors import ArtifactError, DataError, UsageError
from sfdd.filtering.config import FilterConfig
from sfdd.filtering.run import FilterReport, filter_data
from sfdd.scoring.config import ScoreConfig
from sfdd.scoring.run import score

RECORDS: list[Any] = [
    '{"id": "spaced",   "messages": [{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}',
    "{broken",
    sharegpt("Hi", "Hello there"),
    openai("one", "two", "three", "four"),
    openai("Nobody answers"),
    openai("Ünï", "cödé 🙂"),
]


@pytest.fixture
def scored(tiny_directory: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A scored data set and its run directory."""
    data = write_jsonl(tmp_path / "chat.jsonl", RECORDS)
    run = tmp_path / "run"
    score(ScoreConfig((str(data),), str(tiny_directory), run=run))
    return data, run


def run_filter(run: Path, **settings: Any) -> FilterReport:
    return filter_data(FilterConfig(run=run, **settings))


def test_kept_records_are_the_originals_in_order(scored: tuple[Path, Path]) -> None:
    data, run = scored
    report = run_filter(run, keep=0.5)
    table = pq.read_table(run / "selection.parquet")
    rows = table.filter(table["kept"])["row"].to_pylist()
    lines = data.read_bytes().splitlines(keepends=True)
    assert (run / "distilled" / "chat.jsonl").read_bytes() == b"".join(lines[row] for row in rows)
    assert (report.scored, report.skipped, report.kept, report.dropped) == (4, 2, 2, 2)
    assert report.retention_ratio == 0.5
    values = dict(zip(table["row"].to_pylist(), table["value"].to_pylist(), strict=True))
    assert sorted(rows) == sorted(sorted((0, 2, 3, 5), key=lambda row: values[row])[2:])
    assert report.threshold == min(values[row] for row in rows)


def test_supervised_tokens_are_counted(scored: tuple[Path, Path]) -> None:
    answers = {0: ["b"], 2: ["Hello there"], 3: ["two", "four"], 5: ["cödé 🙂"]}
    tokens = {row: sum(len(t.encode()) + 1 for t in turns) for row, turns in answers.items()}
    for keep in (0.25, 0.5, 1.0):
        report = run_filter(scored[1], keep=keep)
        table = pq.read_table(report.selection)
        kept = table.filter(table["kept"])["row"].to_pylist()
        assert report.supervised_tokens_scored == sum(tokens.values())
        assert report.supervised_tokens_kept == sum(tokens[row] for row in kept)


def test_the_selection_says_where_it_comes_from(scored: tuple[Path, Path]) -> None:
    _, run = scored
    report = run_filter(run, keep=0.25, metric="entropy")
    provenance = read_parquet_provenance(run / "selection.parquet")
    scores = read_parquet_provenance(run / "scores.parquet")
    assert provenance.identity == {**scores.identity, "metric": "entropy", "keep": 0.25}
    assert provenance.about["threshold"] == report.threshold
    digest = digest_files([run / "distilled" / "chat.jsonl"])
    assert provenance.about["distilled"] == {"chat.jsonl": digest}
    assert provenance.about["target"] == scores.about["target"]


def test_filtering_again_replaces_the_selection(scored: tuple[Path, Path]) -> None:
    _, run = scored
    for keep, kept in ((0.25, 1), (1.0, 4), (0.5, 2)):
        run_filter(run, keep=keep)
        assert len((run / "distilled" / "chat.jsonl").read_bytes().splitlines()) == kept


def test_every_format_comes_out_as_it_went_in(tiny_directory: Path, tmp_path: Path) -> None:
    records = [openai(f"Question {i}", f"Answer {i}") for i in range(8)]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    lines = write_jsonl(tmp_path / "a" / "same.jsonl", records)
    others = write_jsonl(tmp_path / "b" / "same.jsonl", records[::-1])
    array = tmp_path / "array.json"
    array.write_text(json.dumps(records))
    parquet = tmp_path / "rows.parquet"
    Dataset.from_list(records).to_parquet(str(parquet))
    folder = tmp_path / "saved"
    Dataset.from_list(records).save_to_disk(str(folder))
    names = tuple(map(str, (lines, others, array, parquet, folder)))
    run = tmp_path / "run"
    score(ScoreConfig(names, str(tiny_directory), run=run))
    report = run_filter(run, keep=0.5)

    assert [path.name for path in report.distilled] == [
        "same.jsonl",
        "same-2.jsonl",
        "array.json",
        "rows.parquet",
        "saved.parquet",
    ]
    first, second, third, fourth, fifth = report.distilled
    kept = [json.loads(line) for line in first.read_text().splitlines()]
    assert 0 < len(kept) < 8
    assert [record for record in records if record in kept] == kept
    assert [json.loads(line) for line in second.read_text().splitlines()] == kept[::-1]
    assert json.loads(third.read_text()) == kept
    assert pq.read_table(fourth).to_pylist() == pq.read_table(fifth).to_pylist() == kept
    assert pq.read_schema(fourth).equals(pq.read_schema(parquet), check_metadata=True)


def test_changed_data_are_refused(scored: tuple[Path, Path]) -> None:
    data, run = scored
    run_filter(run, keep=0.5)
    before = (run / "distilled" / "chat.jsonl").read_bytes()
    data.write_text(data.read_text().replace("Hello", "Bye"))
    with pytest.raises(
        DataError, match=r"has changed since it was scored\. Run 'sfdd score' again"
    ):
        run_filter(run, keep=1.0)
    assert (run / "distilled" / "chat.jsonl").read_bytes() == before


def test_moved_data_can_be_named(scored: tuple[Path, Path], tmp_path: Path) -> None:
    data, run = scored
    moved = data.rename(tmp_path / "moved.jsonl")
    with pytest.raises(DataError, match=r"chat\.jsonl does not exist"):
        run_filter(run)
    report = run_filter(run, data=(str(moved),))
    assert [path.name for path in report.distilled] == ["moved.jsonl"]
    with pytest.raises(UsageError, match="--data names 2 data sets, but 1 were scored"):
        run_filter(run, data=("a", "b"))


def test_the_earlier_distilled_file_of_another_name_is_removed(
    scored: tuple[Path, Path], tmp_path: Path
) -> None:
    data, run = scored
    run_filter(run)
    (run / "distilled" / "mine.txt").write_text("not sfdd's")
    run_filter(run, data=(str(data.rename(tmp_path / "moved.jsonl")),))
    assert {path.name for path in (run / "distilled").iterdir()} == {"moved.jsonl", "mine.txt"}


def test_a_source_of_which_nothing_is_kept_makes_no_file(
    tiny_directory: Path, tmp_path: Path
) -> None:
    bad = write_jsonl(tmp_path / "bad.jsonl", [openai("Nobody answers")])
    good = write_jsonl(tmp_path / "good.jsonl", [openai("Hi", "Hello")])
    run = tmp_path / "run"
    score(ScoreConfig((str(bad), str(good)), str(tiny_directory), run=run))
    assert [path.name for path in run_filter(run).distilled] == ["good.jsonl"]
    assert {path.name for path in (run / "distilled").iterdir()} == {"good.jsonl"}


def test_the_users_own_files_are_never_overwritten(tiny_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "distilled").mkdir()
    own = write_jsonl(tmp_path / "distilled" / "chat.jsonl", [openai("a", "b"), openai("c", "d")])
    before = own.read_bytes()
    score(ScoreConfig((str(own),), str(tiny_directory), run=tmp_path))
    with pytest.raises(ArtifactError, match="is one of the data sets scored; it would be overwr"):
        run_filter(tmp_path, keep=0.5)
    other = write_jsonl(tmp_path / "chat.jsonl", [openai("a", "b"), openai("c", "d")])
    score(ScoreConfig((str(other),), str(tiny_directory), run=tmp_path, overwrite=True))
    with pytest.raises(ArtifactError, match="exists, and sfdd did not write it"):
        run_filter(tmp_path, keep=0.5)
    assert own.read_bytes() == before


def test_a_selection_is_not_a_score_table(scored: tuple[Path, Path]) -> None:
    _, run = scored
    run_filter(run)
    with pytest.raises(ArtifactError, match="is not a finished score table"):
        run_filter(run, scores=run / "selection.parquet")


def test_no_scores(tmp_path: Path) -> None:
    with pytest.raises(
        ArtifactError, match=r"scores\.parquet does not exist\. Run 'sfdd score' first"
    ):
        run_filter(tmp_path)


def test_scores_that_sfdd_did_not_write(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "scores.parquet")
    with pytest.raises(ArtifactError, match="is damaged or was not written by sfdd"):
        run_filter(tmp_path)


def test_nothing_scored(tiny_directory: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "d.jsonl", [openai("Nobody answers")])
    with pytest.raises(DataError, match="None of the 1 records"):
        score(ScoreConfig((str(data),), str(tiny_directory), run=tmp_path / "run"))
    with pytest.raises(ArtifactError, match="holds no scored conversation"):
        run_filter(tmp_path / "run")


@pytest.mark.parametrize("keep", [0, -0.1, 1.01, float("nan")])
def test_keep_outside_its_range(keep: float) -> None:
    with pytest.raises(UsageError, match=f"^--keep is {keep}; it is the fraction to keep"):
        FilterConfig(keep=keep)


def test_unknown_metric() -> None:
    with pytest.raises(
        UsageError, match="--metric is 'sharpness'; choose one of flatness, entropy"
    ):
        FilterConfig(metric="sharpness")


def test_filtering_imports_no_torch(scored: tuple[Path, Path]) -> None:
    """A laptop without a GPU, or without torch, can select."""
    code = (
        "import sys; from sfdd_cli.main import app; app(['filter', '--run', sys.argv[1]],"
        " standalone_mode=False); print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(scored[1])], capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "False"
