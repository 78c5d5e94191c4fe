"""JSON and JSONL files: plain, compressed, in any encoding, whole or damaged."""

import codecs
import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from conversations.reading import kept, read, values
from helpers import openai, sharegpt, write_jsonl

from sfdd.conversations.files import JsonLinesSource, JsonSource
from sfdd.conversations.records import Record
from sfdd.conversations.sources import open_source

RECORDS = [sharegpt("Hi", f"Hello {i} \u00e9\U0001f600", id=str(i)) for i in range(5)]
JSONL = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS)


def zstd(*frames: bytes) -> bytes:
    """Data as a zstd file of some frames."""
    out = b""
    for frame in frames:
        buffer = pa.BufferOutputStream()
        with pa.CompressedOutputStream(buffer, "zstd") as stream:
            stream.write(frame)
        out += buffer.getvalue().to_pybytes()
    return out


class TestJsonLines:
    def test_records_count_and_kept_bytes(self, tmp_path: Path) -> None:
        lines = [
            b'{"id": 1,   "text": "spaces stay"}\n',
            b"\n",
            b'{"id": 2, "text": "\xe2\x80\xa8 and \xc2\x85 do not split"}\r\n',
            b" \r\n",
            b'{"id": 3, "text": "no line feed at the end"}',
        ]
        path = tmp_path / "data.jsonl"
        path.write_bytes(b"".join(lines))
        assert isinstance(open_source(str(path)), JsonLinesSource)
        assert values(path) == [json.loads(line) for line in (lines[0], lines[2], lines[4])]
        out = kept(path, {0, 1, 2}, tmp_path / "out.jsonl").read_bytes()
        assert out == lines[0] + lines[2] + lines[4] + b"\n"
        assert kept(path, {1}, tmp_path / "one.jsonl").read_bytes() == lines[2]

    def test_a_broken_line_is_handed_on_with_its_number(self, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "d.jsonl", [RECORDS[0], "", '{"id": ', RECORDS[1]])
        assert read(path) == [
            Record(0, RECORDS[0]),
            Record(1, error="line 3: Expecting value at character 8"),
            Record(2, RECORDS[1]),
        ]

    @pytest.mark.parametrize("broken", [1, 2, 10])
    def test_broken_first_lines_do_not_make_it_something_else(
        self, tmp_path: Path, broken: int
    ) -> None:
        path = write_jsonl(tmp_path / "d.jsonl", ['{"id": '] * broken + [RECORDS[0], RECORDS[1]])
        assert [bool(record.error) for record in read(path)] == [True] * broken + [False] * 2

    def test_types_that_vary_by_row(self, tmp_path: Path) -> None:
        rows = [
            {"id": 1, "x": "text"},
            {"id": "2", "x": {"deep": [1]}},
            {"id": None, "x": [1, "a"]},
        ]
        assert values(write_jsonl(tmp_path / "d.jsonl", rows)) == rows

    def test_bytes_that_are_not_utf8_spoil_their_own_line(self, tmp_path: Path) -> None:
        path = tmp_path / "d.jsonl"
        path.write_bytes(b'{"id": 1}\n{"id": "\xff\xfe"}\n{"id": 3}\n')
        first, second, third = read(path)
        assert (first.value, third.value) == ({"id": 1}, {"id": 3})
        assert second.error.startswith("line 2: 'utf-8' codec can't decode byte 0xff in position 8")

    def test_a_line_is_not_guessed_to_be_utf16(self, tmp_path: Path) -> None:
        path = tmp_path / "d.jsonl"
        path.write_bytes(b'{"id": 1}\n{\x00"\x00a\x00\n{"id": 3}\n')
        assert [bool(record.error) for record in read(path)] == [False, True, False]

    def test_absurd_nesting_is_a_broken_line(self, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "d.jsonl", [RECORDS[0], "[" * 100_000])
        assert [bool(record.error) for record in read(path)] == [False, True]


class TestJson:
    def test_array(self, tmp_path: Path) -> None:
        path = tmp_path / "d.json"
        path.write_text(json.dumps(RECORDS, indent=3))
        assert isinstance(open_source(str(path)), JsonSource)
        assert values(path) == RECORDS
        out = kept(path, {1, 3}, tmp_path / "out.json").read_text()
        assert json.loads(out) == [RECORDS[1], RECORDS[3]]
        # wording, not only meaning: the indentation of the original is still there
        assert json.dumps(RECORDS, indent=3)[2:-2].split("},\n   {")[1] in out

    def test_none_kept_of_an_array_is_an_empty_array(self, tmp_path: Path) -> None:
        path = tmp_path / "d.json"
        path.write_text(json.dumps(RECORDS))
        assert json.loads(kept(path, set(), tmp_path / "out.json").read_text()) == []
        assert values(tmp_path / "out.json") == []

    @pytest.mark.parametrize("indent", [2, 0])
    def test_one_pretty_printed_object(self, tmp_path: Path, indent: int) -> None:
        path = tmp_path / "d.json"
        path.write_text(json.dumps(RECORDS[0], indent=indent))
        assert values(path) == [RECORDS[0]]
        out = kept(path, {0}, tmp_path / "out.json").read_text()
        assert out == json.dumps(RECORDS[0], indent=indent) + "\n"

    def test_objects_one_after_another(self, tmp_path: Path) -> None:
        path = tmp_path / "jq.json"
        texts = [json.dumps(record, indent=2) for record in RECORDS]
        path.write_text("\n".join(texts))
        assert values(path) == RECORDS
        assert kept(path, {0, 4}, tmp_path / "o.json").read_text() == f"{texts[0]}\n{texts[4]}\n"

    def test_arrays_one_after_another(self, tmp_path: Path) -> None:
        path = tmp_path / "d.json"
        path.write_text(f"{json.dumps(RECORDS[:2])}\n{json.dumps(RECORDS[2:])}\n")
        assert values(path) == RECORDS

    def test_lists_line_by_line_are_not_one_array(self, tmp_path: Path) -> None:
        path = tmp_path / "d.json"
        path.write_text('[{"role": "user"}]\n[]\n{"id": 1}\n')
        assert values(path) == [[{"role": "user"}], [], {"id": 1}]

    def test_the_first_element_may_be_broken(self, tmp_path: Path) -> None:
        path = tmp_path / "d.json"
        path.write_text('[{"id" 1},\n' + json.dumps(RECORDS)[1:])
        first, *others = read(path)
        assert first.error == "line 1, character 7: Expecting ':' delimiter"
        assert [record.value for record in others] == RECORDS

    def test_one_line_longer_than_the_head(self, tmp_path: Path) -> None:
        long = [sharegpt("x" * 1_500_000, f"{i}") for i in range(2)]
        for text in (json.dumps(long), json.dumps(long[0]), "\n".join(map(json.dumps, long))):
            path = tmp_path / "d.json"
            path.write_text(text)
            assert values(path) == (long[:1] if text == json.dumps(long[0]) else long)

    def test_bytes_that_are_not_utf8_spoil_their_own_string(self, tmp_path: Path) -> None:
        path = tmp_path / "d.json"
        path.write_bytes(json.dumps(RECORDS).encode().replace(b"Hello 1", b"Hell\xff 1"))
        records = read(path)
        assert not any(record.error for record in records)
        assert records[1].value["conversations"][1]["value"].startswith("Hell\udcff 1")
        out = kept(path, {1, 2}, tmp_path / "out.json").read_bytes()
        assert b"Hell\xff 1" in out


ENCODINGS = {
    "utf-8": JSONL.encode(),
    "utf-8 with mark": codecs.BOM_UTF8 + JSONL.encode(),
    "utf-16 le": JSONL.encode("utf-16-le"),
    "utf-16 be": JSONL.encode("utf-16-be"),
    "utf-16 le with mark": codecs.BOM_UTF16_LE + JSONL.encode("utf-16-le"),
    "utf-16 be with mark": codecs.BOM_UTF16_BE + JSONL.encode("utf-16-be"),
}
PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "plain": lambda data: data,
    "gzip": gzip.compress,
    "gzip members": lambda data: gzip.compress(data[:100]) + gzip.compress(data[100:]) + bytes(512),
    "zstd": zstd,
    "zstd frames": lambda data: zstd(data[:100], data[100:], b""),
}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("encoding", ENCODINGS)
class TestEncodingAndCompression:
    def test_lines(self, tmp_path: Path, encoding: str, packing: str) -> None:
        path = tmp_path / "named.anyhow"
        path.write_bytes(PACKINGS[packing](ENCODINGS[encoding]))
        assert isinstance(open_source(str(path)), JsonLinesSource)
        assert values(path) == RECORDS
        out = kept(path, {1, 4}, tmp_path / "out")
        assert out.read_bytes()[:2] == (
            {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5"}.get(packing.split()[0], JSONL[:2].encode())
        )
        assert values(out) == [RECORDS[1], RECORDS[4]]

    def test_array(self, tmp_path: Path, encoding: str, packing: str) -> None:
        path = tmp_path / "named.anyhow"
        text = codecs.decode(ENCODINGS[encoding], encoding.replace(" ", "-").split("-with")[0])
        array = "[" + text.removeprefix("\ufeff").replace("}\n{", "},\r\n{") + "]"
        mark = "\ufeff" * encoding.endswith("mark")
        data = (mark + array).encode(encoding.replace(" ", "-").split("-with")[0])
        path.write_bytes(PACKINGS[packing](data))
        assert isinstance(open_source(str(path)), JsonSource)
        assert values(path) == RECORDS
        assert values(kept(path, {0, 2}, tmp_path / "out")) == [RECORDS[0], RECORDS[2]]


class TestWriting:
    def test_utf16_becomes_utf8_and_keeps_its_line_ends(self, tmp_path: Path) -> None:
        path = tmp_path / "d.jsonl"
        path.write_bytes(JSONL.replace("\n", "\r\n").encode("utf-16"))
        lines = JSONL.encode().splitlines(keepends=True)
        out = kept(path, {2}, tmp_path / "out.jsonl").read_bytes()
        assert out == lines[2].replace(b"\n", b"\r\n")

    @pytest.mark.parametrize("packing", ["gzip", "zstd"])
    def test_the_same_rows_make_the_same_file(self, tmp_path: Path, packing: str) -> None:
        path = tmp_path / "d.jsonl.gz"
        path.write_bytes(PACKINGS[packing](JSONL.encode()))
        assert open_source(str(path)).file_name == "d.jsonl.gz"
        first, second = (kept(path, {0, 1}, tmp_path / name).read_bytes() for name in "ab")
        assert first == second
        if packing == "gzip":
            assert first[4:8] == bytes(4)  # no time of writing
            assert gzip.decompress(first).decode().splitlines() == JSONL.split("\n")[:2]


SMALL = [sharegpt("a", f"b{i}", id=str(i)) for i in range(3)]
SMALL_LINES = [json.dumps(record) + "\n" for record in SMALL]


class TestTruncation:
    """Cut at every byte: no exception, whole records before the cut, and as many counted as read."""

    @staticmethod
    def check(path: Path, whole: list[object], max_errors: int = 1) -> list[str]:
        records = read(path)
        errors = [record.error for record in records if record.error]
        assert [record.value for record in records if not record.error] == whole
        assert [bool(record.error) for record in records] == [False] * len(whole) + [True] * len(
            errors
        )
        assert len(errors) <= max_errors
        return errors

    def test_lines(self, tmp_path: Path) -> None:
        data = "".join(SMALL_LINES).encode()
        ends = [len("".join(SMALL_LINES[: i + 1])) - 1 for i in range(3)]
        for cut in range(1, len(data) + 1):
            path = tmp_path / f"{cut}.jsonl"
            path.write_bytes(data[:cut])
            number = sum(end <= cut for end in ends)
            errors = self.check(path, SMALL[:number])
            assert bool(errors) == (cut not in (*ends, *(end + 1 for end in ends)))
            assert all(f"line {number + 1}" in error for error in errors)

    def test_array(self, tmp_path: Path) -> None:
        data = json.dumps(SMALL, indent=1).encode()
        for cut in range(1, len(data) + 1):
            path = tmp_path / f"{cut}.json"
            path.write_bytes(data[:cut])
            texts = [json.dumps(SMALL[: i + 1], indent=1)[:-2].encode() for i in range(3)]
            errors = self.check(path, SMALL[: sum(len(text) <= cut for text in texts)])
            assert len(errors) == (cut < len(data))
            assert all("cut off" in error for error in errors)

    def test_utf16(self, tmp_path: Path) -> None:
        data = "".join(SMALL_LINES).encode("utf-16")
        for cut in range(4, len(data)):
            path = tmp_path / f"{cut}.jsonl"
            path.write_bytes(data[:cut])
            text = data[: cut - cut % 2].decode("utf-16")
            whole = sum(text.startswith("".join(SMALL_LINES[: i + 1])[:-1]) for i in range(3))
            self.check(path, SMALL[:whole])

    @pytest.mark.parametrize("packing", ["gzip", "gzip members", "zstd frames"])
    @pytest.mark.parametrize("is_array", [False, True])
    def test_compressed(self, tmp_path: Path, packing: str, is_array: bool) -> None:
        data = json.dumps(SMALL).encode() if is_array else "".join(SMALL_LINES).encode()
        packed = PACKINGS[packing](data)
        most = 0
        for cut in range(4, len(packed)):
            path = tmp_path / f"{cut}"
            path.write_bytes(packed[:cut])
            records = [r for r in read(path) if not r.error]
            errors = self.check(path, SMALL[: len(records)])
            most = max(most, len(records))
            # Between two members or frames the compressed data are whole.
            if packing == "gzip":
                assert errors[0].startswith("line ")
                assert "the compressed data are damaged or cut off (" in errors[0]
        assert most >= (1 if packing == "zstd frames" else 2)

    def test_a_flipped_byte_ends_a_gzip_file_where_it_is(self, tmp_path: Path) -> None:
        lines = [json.dumps(sharegpt("a", f"{i * 7919}")) + "\n" for i in range(2000)]
        packed = bytearray(gzip.compress("".join(lines).encode()))
        packed[len(packed) // 2] ^= 0xFF
        path = tmp_path / "d.jsonl.gz"
        path.write_bytes(packed)
        *records, last = read(path)
        assert len(records) > 500
        whole = sum(not record.error for record in records)
        assert [r.value for r in records[:whole]] == [json.loads(line) for line in lines[:whole]]
        assert last.error.startswith("line ")
        assert "the compressed data are damaged or cut off (Error -3" in last.error

    def test_a_cut_off_zstd_block_costs_only_itself(self, tmp_path: Path) -> None:
        lines = [json.dumps({"i": i, "text": f"{i * 7919}" * 20}) + "\n" for i in range(20_000)]
        packed = zstd("".join(lines).encode())
        path = tmp_path / "d.jsonl.zst"
        path.write_bytes(packed[:-20])
        *records, last = read(path)
        assert [r.value["i"] for r in records] == list(range(len(records)))
        size = len("".join(lines[: len(records)]))
        assert len("".join(lines)) - size < 128 * 1024 + 200  # zstd's largest block
        assert f"line {len(records) + 1}: the compressed data are damaged or cut off" in last.error


@pytest.mark.parametrize("is_array", [False, True])
@pytest.mark.parametrize("packing", ["plain", "gzip", "zstd"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, is_array: bool, packing: str) -> None:
    lines = [json.dumps(openai("Hi " * 300, f"Hello {i} " * 300)) for i in range(8_000)]
    text = "[" + ",\n".join(lines) + "]" if is_array else "\n".join(lines)
    assert len(text) > 30_000_000
    path = tmp_path / "data"
    path.write_bytes(PACKINGS[packing](text.encode()))
    del lines, text
    tracemalloc.start()
    try:
        source = open_source(str(path))
        tracemalloc.reset_peak()  # recognition parses a head of 1 MiB
        assert sum(1 for _ in source.records()) == source.count() == 8_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000
