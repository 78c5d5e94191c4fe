"""What a file is taken for, and what is said of one that sfdd does not read."""

import io
import json
import re
import zipfile
from pathlib import Path

import pytest
from helpers import openai, sharegpt

from sfdd.conversations.sources import open_source
from sfdd.errors import DataError

RECORD = openai("Hi", "Hello")


def _zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("d.jsonl", json.dumps(RECORD))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            f"{RECORD}\n{RECORD}\n",
            "looks like Python dict reprs, not JSON; write them with json.dumps.",
        ),
        (
            f"[{RECORD}, {RECORD}]",
            "looks like Python dict reprs, not JSON; write them with json.dumps.",
        ),
        (
            '{"it": "it\'s", "b": None}\n',
            "looks like Python dict reprs, not JSON; write them with json.dumps.",
        ),
        ("<|im_start|>user\nHi<|im_end|>\n", "looks like rendered chat-template text; give"),
        (
            "<|begin_of_text|><|start_header_id|>user",
            "looks like rendered chat-template text; give",
        ),
        ("[INST] Hi [/INST] Hello", "looks like rendered chat-template text; give"),
        ("<s>[INST] Hi [/INST] Hello</s>", "looks like rendered chat-template text; give"),
        ('<|im_start|>system\n{"name": "f"}\n', "looks like rendered chat-template text; give"),
        ("<bos><start_of_turn>user\nHi", "looks like rendered chat-template text; give"),
        (
            "id,prompt,response\n1,Hi,Hello\n",
            "looks like CSV, which sfdd does not read; convert it",
        ),
        (
            'prompt,response\n"Hi, you","a\nb"\n',
            "looks like CSV, which sfdd does not read; convert",
        ),
        ("id\tprompt\n1\tHi\n", "looks like TSV, which sfdd does not read; convert it"),
        (
            "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
            "is a Git LFS pointer, not the data: run 'git lfs pull' where it lies.",
        ),
        ("<!DOCTYPE html>\n<html>{}", "is an HTML page, not the data: download the file itself"),
        ('<html>\n<script>\n{"a": 1}\n</script>', "is an HTML page, not the data: download"),
        (_zip(), "is a zip archive: unpack it and give the files in it."),
        (b"d.jsonl" + bytes(250) + b"ustar\0", "is a tar archive: unpack it"),
        (b"BZh91AY&SY", "is compressed with something other than gzip or zstd: unpack it."),
        ("Once upon a time there was a file.\n", "is not JSON, JSONL, Parquet or Arrow, neither"),
        (b"\x00\x01\x02\x03\x80\x81", "is not JSON, JSONL, Parquet or Arrow, neither plain nor"),
        (
            ",,,",
            "is not JSON, JSONL, Parquet or Arrow, neither plain nor compressed with gzip or zstd.",
        ),
    ],
)
def test_what_sfdd_does_not_read(tmp_path: Path, content: str | bytes, sentence: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=re.escape(f"Data set {path} {sentence}")):
        open_source(str(path))


def test_a_csv_file_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "prompts.csv"
    path.write_text("Only one column\nand a row\n")
    with pytest.raises(DataError, match="looks like CSV"):
        open_source(str(path))


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf", b"\xff\xfe"])
def test_empty_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(f"Data set {path} is empty.")):
        open_source(str(path))


@pytest.mark.parametrize(
    ("content", "source"),
    [
        ('{"a": 1}', "JsonLinesSource"),
        ('{"a": 1}\n{"a": 2}\n', "JsonLinesSource"),
        ('\n\n  {"a": 1}\n', "JsonLinesSource"),
        ('{"a": \n{"a": 2}\n', "JsonLinesSource"),
        ("oops\n" * 15 + '{"a": 2}\n', "JsonLinesSource"),
        ('[{"role": "user"}]\n[]\n', "JsonLinesSource"),
        ('{"a": 1', "JsonSource"),  # cut off; whether it was a line cannot be known
        ('{\n  "a": 1\n}\n', "JsonSource"),
        ('{"a": 1} {"a": 2}', "JsonSource"),
        ('[{"role": "user"}]', "JsonSource"),
        (f"[{json.dumps(RECORD)}]\n[]\n", "JsonSource"),
        ("[", "JsonSource"),
        ("[]", "JsonSource"),
        ("[\n1,\n2\n]", "JsonSource"),
        (f"const data = [\n  {json.dumps(RECORD)},\n]", "JsonSource"),
    ],
)
def test_lines_or_one_text(tmp_path: Path, content: str, source: str) -> None:
    path = tmp_path / "data"
    path.write_text(content)
    assert type(open_source(str(path))).__name__ == source


@pytest.mark.parametrize("content", ["[" + json.dumps(RECORD), json.dumps(RECORD) + "\n"])
def test_only_a_head_is_read(tmp_path: Path, content: str) -> None:
    """A file that would take hours is opened at once: its size is only pretended."""
    path = tmp_path / "data.json"
    path.write_text(content)
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    open_source(str(path))


def test_a_record_may_look_like_something_else_inside(tmp_path: Path) -> None:
    texts = ["<|im_start|>user", "[INST] x [/INST]", "PK", "a,b\nc,d", "{'a': 1}", "<html>"]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(sharegpt(text, "b")) + "\n" for text in texts))
    assert open_source(str(path)).count() == len(texts)
