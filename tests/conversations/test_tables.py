"""Parquet and Arrow files."""

import gzip
import json
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conversations.reading import kept, read, values
from datasets import load_dataset
from helpers import openai, sharegpt

from sfdd.conversations.sources import open_source
from sfdd.conversations.tables import ArrowSource, ParquetSource
from sfdd.errors import DataError

RECORDS = [openai("Hi", f"Hello {i}", id=str(i)) for i in range(9)]
TABLE = pa.Table.from_pylist([{**record, "other": i} for i, record in enumerate(RECORDS)])


def zstd(data: bytes) -> bytes:
    buffer = pa.BufferOutputStream()
    with pa.CompressedOutputStream(buffer, "zstd") as stream:
        stream.write(data)
    return buffer.getvalue().to_pybytes()


def write_arrow(path: Path, table: pa.Table, rows_a_batch: int = 3, as_file: bool = True) -> Path:
    new = pa.ipc.new_file if as_file else pa.ipc.new_stream
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows_a_batch)
    return path


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
        assert isinstance(open_source(str(path)), ParquetSource)
        assert values(path) == [openai("Hi", f"Hello {i}") for i in range(600)]
        rows = {0, 99, 100, 599}
        out = pq.ParquetFile(kept(path, rows, tmp_path / "out.parquet"))
        assert out.read().equals(table.take(sorted(rows)))
        assert out.num_row_groups == 1  # not one a batch
        assert out.schema_arrow.metadata[b"note"] == b"stays"

    def test_a_cell_that_python_cannot_hold_spoils_its_own_row(self, tmp_path: Path) -> None:
        when = pa.array([0, 2**62, 1], pa.timestamp("ms"))
        path = tmp_path / "d.parquet"
        pq.write_table(pa.table({"when": when}), path)
        assert [bool(record.error) for record in read(path)] == [False, True, False]

    def test_only_the_columns_of_a_conversation_are_read(self, tmp_path: Path) -> None:
        pq.write_table(TABLE, tmp_path / "d.parquet")
        assert values(tmp_path / "d.parquet") == RECORDS

    def test_a_table_without_conversations_is_read_whole(self, tmp_path: Path) -> None:
        rows = [{"prompt": "p", "chosen": "c", "rejected": "r"}]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
        assert values(tmp_path / "d.parquet") == rows

    def test_a_null_in_a_struct_is_an_absent_key(self, tmp_path: Path) -> None:
        arguments = [{"city": "x", "unit": None}, {"city": None, "unit": "c"}, None]
        calls = [{"function": {"name": "f", "arguments": a}} for a in arguments]
        table = pa.table({"messages": [[{"role": "assistant", "tool_calls": calls}]], "id": [None]})
        pq.write_table(table, tmp_path / "d.parquet")
        (record,) = values(tmp_path / "d.parquet")
        assert record == {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"function": {"name": "f", "arguments": {"city": "x"}}},
                        {"function": {"name": "f", "arguments": {"unit": "c"}}},
                        {"function": {"name": "f"}},
                    ],
                }
            ]
        }

    def test_types_that_vary_by_row_are_what_they_were(self, tmp_path: Path) -> None:
        """`datasets` keeps such values as JSON texts of the type arrow.json."""
        records = [
            {"messages": [{"role": "user", "content": "text"}], "tools": [{"x": 1}]},
            {"messages": [{"role": "user", "content": [{"text": None}]}], "tools": [{"x": "one"}]},
        ]
        (tmp_path / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        cache = str(tmp_path / "cache")
        path = tmp_path / "d.parquet"
        data = load_dataset(
            "json", data_files=str(tmp_path / "d.jsonl"), split="train", cache_dir=cache
        )
        data.to_parquet(str(path))
        assert values(path) == records

    def test_a_row_may_be_huge(self, tmp_path: Path) -> None:
        text = "x" * 2_000_000
        table = pa.table(
            {"messages": [[{"role": "user", "content": text + str(i)}] for i in range(40)]}
        )
        path = tmp_path / "d.parquet"
        pq.write_table(table, path, use_dictionary=False)
        del table
        tracemalloc.start()
        try:
            lengths = [
                len(r.value["messages"][0]["content"]) for r in open_source(str(path)).records()
            ]
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert lengths == [2_000_001] * 10 + [2_000_002] * 30
        assert peak < 20_000_000  # of 80

    @pytest.mark.parametrize("pack", [gzip.compress, zstd])
    def test_compressed_as_a_whole(self, tmp_path: Path, pack: Any) -> None:
        pq.write_table(TABLE, tmp_path / "d.parquet")
        path = tmp_path / "d.parquet.gz"
        path.write_bytes(pack((tmp_path / "d.parquet").read_bytes()))
        source = open_source(str(path))
        assert isinstance(source, ParquetSource)
        assert source.file_name == "d.parquet"
        assert source.name == str(path)
        assert values(path) == RECORDS
        assert pq.read_table(kept(path, {1, 8}, tmp_path / "out")).equals(TABLE.take([1, 8]))

    def test_compressed_and_cut_off(self, tmp_path: Path) -> None:
        pq.write_table(TABLE, tmp_path / "d.parquet")
        path = tmp_path / "d.parquet.gz"
        path.write_bytes(gzip.compress((tmp_path / "d.parquet").read_bytes())[:-30])
        with pytest.raises(
            DataError, match="as Parquet: the compressed data are damaged or cut off"
        ):
            list(open_source(str(path)).records())

    def test_damaged_as_a_whole(self, tmp_path: Path) -> None:
        path = tmp_path / "d.parquet"
        path.write_bytes(b"PAR1 not really")
        with pytest.raises(DataError, match=r"Cannot read .*d\.parquet as Parquet"):
            list(open_source(str(path)).records())

    @pytest.mark.parametrize("checksums", [True, False])
    def test_a_damaged_row_group_costs_its_own_rows(self, tmp_path: Path, checksums: bool) -> None:
        path = tmp_path / "d.parquet"
        pq.write_table(
            TABLE, path, row_group_size=3, compression="zstd", write_page_checksum=checksums
        )
        column = pq.ParquetFile(path).metadata.row_group(1).column(1)
        start = column.dictionary_page_offset or column.data_page_offset
        data = bytearray(path.read_bytes())
        for i in range(start, start + column.total_compressed_size):
            data[i] ^= 0xFF
        path.write_bytes(data)
        records = read(path)
        assert [r.value for r in records] == [*RECORDS[:3], None, None, None, *RECORDS[6:]]
        assert all(r.error.startswith("row group 1 is damaged: ") for r in records[3:6])
        assert pq.read_table(kept(path, {0, 8}, tmp_path / "o")).equals(TABLE.take([0, 8]))
        with pytest.raises(DataError, match="Cannot copy records 3 to 5 of"):
            kept(path, {0, 4}, tmp_path / "o")

    def test_damage_anywhere_is_no_crash(self, tmp_path: Path) -> None:
        pq.write_table(TABLE, tmp_path / "whole.parquet", row_group_size=3)
        data = (tmp_path / "whole.parquet").read_bytes()
        footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        path = tmp_path / "d.parquet"
        for i in range(4, footer, 5):
            path.write_bytes(data[:i] + bytes([data[i] ^ 0xFF]) + data[i + 1 :])
            assert len(read(path)) == 9
        for cut in range(4, len(data), 50):
            path.write_bytes(data[:cut])
            with pytest.raises(DataError):
                list(open_source(str(path)).records())


class TestArrow:
    @pytest.mark.parametrize("as_file", [True, False])
    def test_records_and_kept_rows(self, tmp_path: Path, as_file: bool) -> None:
        path = write_arrow(tmp_path / "d.arrow", TABLE, as_file=as_file)
        assert isinstance(open_source(str(path)), ArrowSource)
        assert values(path) == RECORDS
        out = kept(path, {1, 2, 8}, tmp_path / "out.arrow")
        opened = pa.ipc.open_file(str(out)) if as_file else pa.ipc.open_stream(str(out))
        assert opened.read_all().equals(TABLE.take([1, 2, 8]))

    def test_the_cache_of_datasets(self, tmp_path: Path) -> None:
        (tmp_path / "d.json").write_text(json.dumps([sharegpt("a", "b")]))
        data = load_dataset(
            "json", data_files=str(tmp_path / "d.json"), cache_dir=str(tmp_path / "cache")
        )
        path = Path(data["train"].cache_files[0]["filename"])
        assert path.suffix == ".arrow"
        assert values(path) == [sharegpt("a", "b")]

    def test_compressed_as_a_whole(self, tmp_path: Path) -> None:
        write_arrow(tmp_path / "d.arrow", TABLE)
        path = tmp_path / "d.arrow.gz"
        path.write_bytes(gzip.compress((tmp_path / "d.arrow").read_bytes())[:-4])
        *records, last = read(path)
        assert [record.value for record in records] == RECORDS
        assert last.error.startswith("row 9: the compressed data are damaged or cut off")

    @pytest.mark.parametrize("as_file", [True, False])
    def test_cut_off_anywhere(self, tmp_path: Path, as_file: bool) -> None:
        data = write_arrow(tmp_path / "whole", TABLE, as_file=as_file).read_bytes()
        path = tmp_path / "d.arrow"
        most = 0
        for cut in [*range(8, len(data), 31), len(data)]:
            path.write_bytes(data[:cut])
            try:
                records = read(path)
            except DataError:
                assert most == 0  # so early that not even the columns are known
                continue
            whole = [record.value for record in records if not record.error]
            assert whole == RECORDS[: len(whole)]
            assert [record.error for record in records[len(whole) :]] == (
                [f"row {len(whole)}: " + r.error.partition(": ")[2] for r in records[len(whole) :]]
            )
            assert len(records) - len(whole) <= 1
            most = len(whole)
        assert most == 9

    def test_damage_anywhere_is_no_crash(self, tmp_path: Path) -> None:
        data = write_arrow(tmp_path / "whole", TABLE).read_bytes()
        path = tmp_path / "d.arrow"
        for i in range(8, len(data), 3):
            path.write_bytes(data[:i] + bytes([data[i] ^ 0xFF]) + data[i + 1 :])
            with suppress(DataError):  # where not even the columns are known
                read(path)
