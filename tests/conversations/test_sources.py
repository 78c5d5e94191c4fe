import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from helpers import openai, sharegpt, write_jsonl

from sfdd.conversations.files import JsonLinesSource, JsonSource, ParquetSource
from sfdd.conversations.hub import DatasetSource
from sfdd.conversations.sources import open_source
from sfdd.errors import DataError

RECORDS = [sharegpt("Hi", f"Hello {i}", id=str(i)) for i in range(5)]


def values(path: Path) -> list[object]:
    return [record.value for record in open_source(str(path)).records()]


def kept(path: Path, rows: set[int], destination: Path) -> Path:
    open_source(str(path)).write_kept(rows.__contains__, destination)
    return destination


class TestJsonLines:
    def test_records_count_and_kept_bytes(self, tmp_path: Path) -> None:
        lines = [
            b'{"id": 1,   "text": "spaces stay"}\n',
            b"\n",
            b'{"id": 2, "text": "\xe2\x80\xa8 does not split"}\r\n',
            b'{"id": 3, "text": "no line feed at the end"}',
        ]
        path = tmp_path / "data.jsonl"
        path.write_bytes(b"".join(lines))
        source = open_source(str(path))
        assert isinstance(source, JsonLinesSource)
        assert source.count() == 3
        assert [record.value["id"] for record in source.records()] == [1, 2, 3]
        assert [record.row for record in source.records()] == [0, 1, 2]
        out = kept(path, {0, 1, 2}, tmp_path / "out.jsonl").read_bytes()
        assert out == lines[0] + lines[2] + lines[3] + b"\n"
        assert kept(path, {1}, tmp_path / "one.jsonl").read_bytes() == lines[2]

    def test_a_broken_line_is_handed_on_with_its_number(self, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "d.jsonl", [RECORDS[0], "", '{"id": ', RECORDS[1]])
        records = list(open_source(str(path)).records())
        assert [bool(record.error) for record in records] == [False, True, False]
        assert records[1].error.startswith("line 3: Expecting value")

    def test_a_broken_first_line_does_not_make_it_an_object(self, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "d.jsonl", ['{"id": ', RECORDS[0]])
        assert [bool(record.error) for record in open_source(str(path)).records()] == [True, False]

    def test_byte_order_mark(self, tmp_path: Path) -> None:
        path = tmp_path / "d.jsonl"
        path.write_bytes(b"\xef\xbb\xbf" + json.dumps(RECORDS[0]).encode() + b"\n")
        assert values(path) == [RECORDS[0]]

    def test_bytes_that_are_not_utf8(self, tmp_path: Path) -> None:
        path = tmp_path / "d.jsonl"
        path.write_bytes(b'{"id": 1}\n{"id": "\xff\xfe"}\n{"id": 3}\n')
        assert [bool(record.error) for record in open_source(str(path)).records()] == [
            False,
            True,
            False,
        ]

    def test_absurd_nesting_is_a_broken_line(self, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "d.jsonl", [RECORDS[0], "[" * 100_000])
        assert [bool(record.error) for record in open_source(str(path)).records()] == [False, True]


class TestJson:
    def test_array(self, tmp_path: Path) -> None:
        path = tmp_path / "d.json"
        path.write_text(json.dumps(RECORDS, indent=3))
        source = open_source(str(path))
        assert isinstance(source, JsonSource)
        assert source.count() == 5
        assert values(path) == RECORDS
        out = kept(path, {1, 3}, tmp_path / "out.json").read_text()
        assert json.loads(out) == [RECORDS[1], RECORDS[3]]
        # wording, not only meaning: the indentation of the original is still there
        assert json.dumps(RECORDS, indent=3)[2:-2].split("},\n   {")[1] in out

    def test_one_pretty_printed_object(self, tmp_path: Path) -> None:
        path = tmp_path / "d.json"
        path.write_text(json.dumps(RECORDS[0], indent=2))
        assert values(path) == [RECORDS[0]]

    @pytest.mark.parametrize(
        ("end", "more"),
        [
            (', {"id": "cut off', []),
            (', {"id": 9} {"id": 10}]', [{"id": 9}]),
            (",", []),
            ("", []),
            ('] {"id": 9}', []),
        ],
    )
    def test_a_damaged_array_yields_what_came_before_and_says_so(
        self, tmp_path: Path, end: str, more: list[object]
    ) -> None:
        path = tmp_path / "d.json"
        path.write_text(json.dumps(RECORDS)[:-1] + end)
        *records, damage = open_source(str(path)).records()
        assert [record.value for record in records] == RECORDS + more
        assert not any(record.error for record in records)
        assert "could" in damage.error
        assert "be read" in damage.error

    def test_lists_line_by_line_are_not_one_array(self, tmp_path: Path) -> None:
        path = tmp_path / "d.json"
        path.write_text('[{"role": "user"}]\n[]\n{"id": 1}\n')
        assert values(path) == [[{"role": "user"}], [], {"id": 1}]

    def test_empty_array(self, tmp_path: Path) -> None:
        path = tmp_path / "d.json"
        path.write_text("[ ]")
        assert values(path) == []


class TestParquet:
    def test_records_and_kept_rows_keep_their_types(self, tmp_path: Path) -> None:
        table = pa.table(
            {
                "messages": [openai("Hi", f"Hello {i}")["messages"] for i in range(600)],
                "weight": pa.array(range(600), pa.int16()),
                "tag": pa.array(["x"] * 600).dictionary_encode(),
            }
        ).replace_schema_metadata({"note": "stays"})
        path = tmp_path / "d.parquet"
        pq.write_table(table, path, row_group_size=100)
        source = open_source(str(path))
        assert isinstance(source, ParquetSource)
        assert source.count() == 600
        records = list(source.records())
        assert [record.row for record in records] == list(range(600))
        assert records[599].value["messages"][1]["content"] == "Hello 599"
        rows = {0, 99, 100, 599}
        out = pq.read_table(kept(path, rows, tmp_path / "out.parquet"))
        assert out.equals(table.take(sorted(rows)))
        assert out.schema.metadata[b"note"] == b"stays"

    def test_a_cell_that_python_cannot_hold_spoils_its_own_row(self, tmp_path: Path) -> None:
        when = pa.array([0, 2**62, 1], pa.timestamp("ms"))
        path = tmp_path / "d.parquet"
        pq.write_table(pa.table({"when": when}), path)
        records = list(open_source(str(path)).records())
        assert [bool(record.error) for record in records] == [False, True, False]

    def test_only_the_columns_of_a_conversation_are_read(self, tmp_path: Path) -> None:
        table = pa.table({"id": ["a"], "messages": [openai("x", "y")["messages"]], "other": [1]})
        pq.write_table(table, tmp_path / "d.parquet")
        assert values(tmp_path / "d.parquet") == [openai("x", "y", id="a")]

    def test_damaged(self, tmp_path: Path) -> None:
        path = tmp_path / "d.parquet"
        path.write_bytes(b"PAR1 not really")
        with pytest.raises(DataError, match=r"Cannot read .*d\.parquet as Parquet"):
            list(open_source(str(path)).records())


class TestDatasets:
    def test_saved_data_set(self, tmp_path: Path) -> None:
        Dataset.from_list(RECORDS).save_to_disk(str(tmp_path / "saved"))
        source = open_source(str(tmp_path / "saved"))
        assert isinstance(source, DatasetSource)
        assert source.count() == 5
        assert values(tmp_path / "saved") == RECORDS
        assert source.file_name == "saved.parquet"
        source.write_kept({2, 4}.__contains__, tmp_path / source.file_name)
        assert pq.read_table(tmp_path / source.file_name).to_pylist() == [RECORDS[2], RECORDS[4]]

    def test_fingerprint_is_of_the_content(self, tmp_path: Path) -> None:
        for name, records in (("a", RECORDS), ("b", RECORDS), ("c", RECORDS[::-1])):
            Dataset.from_list(records).save_to_disk(str(tmp_path / name))
        a, b, c = (open_source(str(tmp_path / name)).fingerprint() for name in "abc")
        assert a == b != c

    def test_saved_splits(self, tmp_path: Path) -> None:
        split = Dataset.from_list(RECORDS)
        DatasetDict(train=split, test=split).save_to_disk(str(tmp_path / "both"))
        assert open_source(str(tmp_path / "both")).count() == 5
        DatasetDict(a=split, b=split).save_to_disk(str(tmp_path / "unclear"))
        with pytest.raises(DataError, match="has the splits a, b; name one"):
            open_source(str(tmp_path / "unclear"))

    def test_a_folder_that_is_none(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="is not a data set made by save_to_disk"):
            open_source(str(tmp_path))

    def test_a_hub_id_that_cannot_be_had(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        with pytest.raises(
            DataError, match="nobody/nothing is neither a file here nor a hub data set"
        ):
            open_source("nobody/nothing")


def test_missing_file() -> None:
    with pytest.raises(
        DataError,
        match=re.escape(
            "Data set no/such.jsonl does not exist. Give a JSONL, JSON or Parquet file, a folder made "
            "by save_to_disk, or a hub id such as org/name."
        ),
    ):
        open_source("no/such.jsonl")


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_empty_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(f"Data set {path} is empty.")):
        open_source(str(path))


@pytest.mark.parametrize("name", ["teknium/OpenHermes-2.5", "HuggingFaceH4/ultrachat_200k"])
def test_hub_ids_with_dots_are_hub_ids(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="is neither a file here nor a hub data set"):
        open_source(name)


def test_fingerprint_follows_the_content(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", RECORDS)
    before = open_source(str(path)).fingerprint()
    assert open_source(str(path)).fingerprint() == before
    path.write_text(path.read_text().replace("Hello 3", "Hello 4"))
    assert open_source(str(path)).fingerprint() != before
