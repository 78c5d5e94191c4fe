import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filtering.helpers import make_run, write_lines

from sfdd.errors import DataError, UsageError
from sfdd.filtering.config import FilterConfig
from sfdd.filtering.joining import column_names, join
from sfdd.filtering.run import FilterReport, filter_data

IDS = pa.chunked_array([["a", "b"], ["c", "7"]])
ROWS = [
    {"id": "c", "quality": 3.5, "topic": "maths"},
    {"id": "7", "quality": 1.0, "topic": "maths"},
    {"id": "a", "quality": None, "topic": "talk"},
    {"id": "z", "quality": 9.0, "topic": "talk"},
]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Rows in the form that the file's name says."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        write_lines(path, rows)
    return path


def joined(path: Path, *wanted: str) -> dict[str, list[Any]]:
    names = {name: name for name in column_names(path)}
    return join(path, IDS, names, wanted).columns.to_pydict()


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
class TestEveryForm:
    def test_columns_in_the_order_of_the_scores(self, tmp_path: Path, suffix: str) -> None:
        path = write(tmp_path / f"own{suffix}", ROWS)
        assert column_names(path) == ["quality", "topic"]
        assert joined(path, "quality") == {
            "quality": [None, None, 3.5, 1.0],
            "topic": ["talk", None, "maths", "maths"],
        }
        assert join(path, IDS, {"topic": "topic"}, []).matched == 3

    def test_an_id_twice_is_refused(self, tmp_path: Path, suffix: str) -> None:
        path = write(tmp_path / f"own{suffix}", [*ROWS, *ROWS[1:2], *ROWS[1:2]])
        with pytest.raises(DataError, match=r"has the id '7' 3 times. Give every conversation one"):
            joined(path, "quality")

    def test_no_common_id(self, tmp_path: Path, suffix: str) -> None:
        path = write(tmp_path / f"own{suffix}", [{"id": "x/1", "n": 1}, {"id": "x/2", "n": 2}])
        complaint = "is one of the score table's: 'x/1' there, 'a' here."
        with pytest.raises(DataError, match=complaint):
            joined(path, "n")

    def test_no_id(self, tmp_path: Path, suffix: str) -> None:
        path = write(tmp_path / f"own{suffix}", [{"key": "a", "n": 1}])
        with pytest.raises(DataError, match="has no column 'id' to join by; it has key, n"):
            column_names(path)

    def test_no_file(self, tmp_path: Path, suffix: str) -> None:
        with pytest.raises(DataError, match=r"Cannot read .*own.* to join it: "):
            column_names(tmp_path / f"own{suffix}")

    def test_damage(self, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"own{suffix}"
        path.write_bytes(b'id,n\n1\n2,3,4\n"')
        with pytest.raises(DataError, match=r"Cannot read .*own.* to join it: "):
            column_names(path)

    def test_a_column_of_many_texts_tells_no_kinds(self, tmp_path: Path, suffix: str) -> None:
        rows = [{"id": str(i), "text": f"{i}!", "topic": "ab"[i % 2], "x": 0.5} for i in range(60)]
        names = {name: name for name in ("text", "topic", "x")}
        path = write(tmp_path / f"own{suffix}", rows)
        assert join(path, IDS, names, []).columns.column_names == ["topic"]
        assert join(path, IDS, names, ["text"]).kinds == ("topic",)

    def test_whole_numbers_that_have_fractions_further_down(
        self, tmp_path: Path, suffix: str
    ) -> None:
        rows = [{"id": str(i), "n": 1 if i < 200_000 else 1.5} for i in range(200_001)]
        path = write(tmp_path / f"own{suffix}", rows)
        assert joined(path, "n")["n"] == [None, None, None, 1.0]


def test_ids_are_text_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text('id,n\n007,1\n7,2\na,"3"\n')
    assert joined(path, "n") == {"n": [3, None, None, 2]}
    numbers = write(tmp_path / "own.jsonl", [{"id": 7, "n": 2}, {"id": 8, "n": 3}])
    assert joined(numbers, "n") == {"n": [None, None, None, 2]}


def test_a_data_set_can_be_joined_to_itself(tmp_path: Path) -> None:
    """Nested values, whatever they look like, are not looked at."""
    rows = [
        {"id": "a", "messages": [{"role": "user", "content": "x" * 3_000_000}], "topic": "t"},
        {"id": "b", "messages": "none", "topic": None, "tools": {"a": 1}},
        {"id": "c", "topic": "t"},
    ]
    path = write(tmp_path / "own.jsonl", rows)
    assert column_names(path) == ["topic"]
    assert joined(path, "topic") == {"topic": ["t", None, "t", None]}


def test_another_kind_of_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--join is .*own.xlsx; give a .parquet, .csv or .jsonl"):
        column_names(tmp_path / "own.xlsx")


class TestFilter:
    FLAT = (0.1, 0.2, 0.3, 0.4)

    def run(self, tmp_path: Path, rows: list[dict[str, Any]], **settings: Any) -> FilterReport:
        run = make_run(tmp_path, {"chat.jsonl": self.FLAT})
        own = write(tmp_path / "own.jsonl", rows)
        return filter_data(FilterConfig(run=run, join=own, **settings))

    def kept(self, report: FilterReport) -> list[str]:
        table = pq.read_table(report.selection)
        return table.filter(table["kept"])["id"].to_pylist()

    def test_by_the_users_own_metric(self, tmp_path: Path) -> None:
        rows = [{"id": "0", "quality": 5}, {"id": "2", "quality": 3}, {"id": "1", "quality": 4}]
        report = self.run(tmp_path, rows, metric="quality", keep=0.5)
        assert self.kept(report) == ["0", "1"]
        assert (report.joined, report.without_value, report.dropped) == (3, 1, 2)
        assert report.notes == ["1 scored conversations have no finite quality: dropped."]
        table = pq.read_table(report.selection)
        assert table["reason"].to_pylist() == [
            None, None, "quality beyond the threshold", "no finite quality",
        ]  # fmt: skip

    def test_its_low_end(self, tmp_path: Path) -> None:
        rows = [{"id": str(i), "quality": 5 - i} for i in range(4)]
        report = self.run(tmp_path, rows, metric="quality", low=True, keep_rows=1)
        assert self.kept(report) == ["3"]

    def test_by_the_users_own_strata(self, tmp_path: Path) -> None:
        rows = [{"id": str(i), "topic": topic} for i, topic in enumerate(["a", "a", "b", "b"])]
        report = self.run(tmp_path, rows, by="topic")
        assert self.kept(report) == ["1", "3"]
        shares = report.kept_share["topic"]
        assert [(s.name, s.kept, s.scored, s.threshold) for s in shares] == [
            ("a", 1, 2, 0.2),
            ("b", 1, 2, 0.4),
        ]

    def test_a_name_that_both_tables_have(self, tmp_path: Path) -> None:
        rows = [
            {"id": str(i), "source": source, "flatness": -i, "length": "s"}
            for i, source in enumerate(["a", "a", "b", "b"])
        ]
        for name in ("source", "length"):
            complaint = (
                f"--by is '{name}', which the joined table has, too. Write joined.{name} for"
            )
            with pytest.raises(UsageError, match=re.escape(complaint)):
                self.run(tmp_path / name, rows, by=name)
        report = self.run(tmp_path / "x", rows, by="joined.source")
        assert self.kept(report) == ["1", "3"]  # by the score table's flatness
        assert set(report.kept_share) == {"source", "length", "joined.source"}

    def test_what_was_joined_is_part_of_the_identity(self, tmp_path: Path) -> None:
        rows = [{"id": "0", "quality": 5}, {"id": "2", "quality": 3}]
        identities = []
        for i in range(2):
            rows[0]["quality"] = i
            report = self.run(tmp_path / str(i), rows, metric="quality")
            metadata = pq.read_schema(report.selection).metadata[b"sfdd.provenance"]
            identities.append(json.loads(metadata)["identity"])
        assert identities[0].keys() == identities[1].keys() == {"target", "metric", "keep", "join"}
        assert identities[0]["join"] != identities[1]["join"]
