import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from filtering.helpers import make_run
from helpers import openai, sharegpt, write_jsonl

from sfdd.artifacts import (
    PARQUET_METADATA_KEY,
    Provenance,
    digest_files,
    read_parquet_provenance,
)
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


@pytest.mark.parametrize("change", ["longer", "shorter"])
def test_data_with_more_or_fewer_records_are_refused(
    scored: tuple[Path, Path], change: str
) -> None:
    """However the copying of the wrong records may end."""
    data, run = scored
    lines = data.read_bytes().splitlines(keepends=True)
    changed = {"longer": lines * 3, "shorter": lines[:2]}[change]
    data.write_bytes(b"".join(changed))
    with pytest.raises(DataError, match="has changed since it was scored"):
        run_filter(run, keep=1.0)
    assert not (run / "selection.parquet").exists()
    assert not (run / "distilled.partial").exists()


@pytest.mark.parametrize("settings", [{"keep_rows": 2}, {"by": "source"}, {"band": (0.3, 1.0)}])
def test_every_strategy_copies_byte_for_byte(tmp_path: Path, settings: dict[str, Any]) -> None:
    run = make_run(tmp_path, {"chat.jsonl": [0.4, 0.1, 0.3, 0.2]})
    data = tmp_path / "chat.jsonl"
    odd = [
        b'{ "messages":[],\t"x": 1e2}\r\n',
        b"\n",
        b'{"x": "\\u00e9"}  \n',
        b"[1]\n",
        b'{"x": "\xc3"}',
    ]
    data.write_bytes(b"".join(odd))
    table = pq.read_table(run / "scores.parquet")
    about = {"target": "t", "data": {str(data): digest_files([data])}}
    metadata = {PARQUET_METADATA_KEY: Provenance({"target": "t"}, about).to_json()}
    pq.write_table(table.replace_schema_metadata(metadata), run / "scores.parquet")
    (file,) = run_filter(run, **settings).distilled
    kept = pq.read_table(run / "selection.parquet")["kept"].to_pylist()
    records = [odd[0], *odd[2:4], odd[4] + b"\n"]
    assert 0 < sum(kept) < 4
    assert file.read_bytes() == b"".join(
        r for r, is_kept in zip(records, kept, strict=True) if is_kept
    )


@pytest.mark.parametrize(
    ("settings", "identity"),
    [
        ({}, {"metric": "flatness", "keep": 0.5}),
        ({"keep_rows": 2}, {"metric": "flatness", "keep_rows": 2, "seed": 0}),
        ({"keep_tokens": 60, "seed": 4}, {"metric": "flatness", "keep_tokens": 60, "seed": 4}),
        ({"band": (0.0, 0.5)}, {"metric": "flatness", "band": [0.0, 0.5]}),
        ({"low": True}, {"metric": "flatness", "keep": 0.5, "low": True}),
        ({"by": "length"}, {"metric": "flatness", "keep": 0.5, "by": "length"}),
        (
            {"metric": "random", "match_length": True, "seed": 3},
            {"metric": "random", "keep": 0.5, "match_length": True, "seed": 3},
        ),
    ],
)
def test_the_identity_holds_what_decides(
    tmp_path: Path, settings: dict[str, Any], identity: dict[str, Any]
) -> None:
    run = make_run(tmp_path, {"chat.jsonl": [0.4, 0.1, 0.3, 0.2]})
    provenance = read_parquet_provenance(run_filter(run, **settings).selection)
    assert provenance.identity == {"target": "t", **identity}
    budget = {key: identity[key] for key in identity if key in ("keep", "keep_rows", "band")}
    assert provenance.about["settings"].items() >= budget.items()


def test_the_flatness_of_every_token_is_never_read(tmp_path: Path) -> None:
    """It may be a hundred times as large as the rest; here its bytes are no Parquet at all."""
    run = make_run(tmp_path, {"chat.jsonl": [0.4, 0.1, 0.3, 0.2]}, token_flatness=[[0.5] * 99] * 4)
    path = run / "scores.parquet"
    group = pq.read_metadata(path).row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    (large,) = (c for name, c in columns.items() if name.startswith("token_flatness"))
    start = large.dictionary_page_offset or large.data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + large.total_compressed_size] = b"x" * large.total_compressed_size
    path.write_bytes(content)
    with pytest.raises(OSError, match=r"Parquet|Deserializing|decode|page"):
        pq.read_table(path)
    assert run_filter(run).kept == 2


def test_the_selection_has_the_rows_of_the_scores(tmp_path: Path) -> None:
    run = make_run(tmp_path, {"a.jsonl": [0.4, 0.1], "b.jsonl": [0.3]})
    table = pq.read_table(run_filter(run, keep_rows=2).selection)
    assert table.drop_columns(["source"]).to_pylist() == [
        {"id": "0", "row": 0, "num_supervised_tokens": 10, "value": 0.4, "kept": True, "reason": None},
        {
            "id": "1", "row": 1, "num_supervised_tokens": 20, "value": 0.1, "kept": False,
            "reason": "flatness beyond the budget",
        },
        {"id": "2", "row": 0, "num_supervised_tokens": 30, "value": 0.3, "kept": True, "reason": None},
    ]  # fmt: skip
    assert table["source"].to_pylist() == [
        str(tmp_path / name) for name in ("a.jsonl",) * 2 + ("b.jsonl",)
    ]
    assert table.schema.field("source").type == pa.string()


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


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"keep": 0.5, "keep_rows": 3}, "--keep and --keep-rows exclude each other. Give one of"),
        ({"keep_tokens": 5, "band": (0.1, 0.2)}, "--keep-tokens and --band exclude each other"),
        ({"keep_rows": 0}, "--keep-rows is 0; it must be 1 or above"),
        ({"keep_tokens": -1}, "--keep-tokens is -1; it must be 1 or above"),
        ({"band": (0.5, 0.2)}, "--band is 0.5:0.2; it is two fractions from 0 to 1"),
        ({"band": (0.2, 1.2)}, "--band is 0.2:1.2; it is two fractions"),
        ({"band": (0.2, 0.8), "low": True}, "--band names both of its ends, so --low has no mean"),
        ({"metric": "random", "low": True}, "--low has no meaning with --metric random"),
        ({"match_length": True}, "--match-length draws at random, but --metric is 'flatness'"),
        ({"seed": -1}, "--seed is -1; it must be 0 or above"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match="^" + re.escape(complaint)):
        FilterConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"metric": "sharpness"}, "--metric is 'sharpness'; choose one of flatness, entropy, "),
        ({"metric": "id"}, "--metric is 'id', whose values are string. Give a numeric column."),
        ({"by": "topic"}, "--by is 'topic'; choose one of length, turns, id, source, "),
    ],
)
def test_columns_that_are_not_there(
    scored: tuple[Path, Path], settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UsageError, match="^" + re.escape(complaint)):
        run_filter(scored[1], **settings)
    assert not (scored[1] / "selection.parquet").exists()


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
