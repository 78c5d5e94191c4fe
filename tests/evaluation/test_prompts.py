"""Prompt files: what is read, and what a bad line says."""

from pathlib import Path

import pytest

from sfdd.errors import DataError, UsageError
from sfdd.evaluation.config import EvalConfig
from sfdd.evaluation.prompts import Prompt, read_prompts

GOOD = '{"id": "a/1", "set": "a", "category": "code", "turns": ["One", "Two"], "reference": null}\n'


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_text(text, encoding=encoding)
    return path


def test_reads_turns_and_fills_in_what_is_missing(tmp_path: Path) -> None:
    path = write(
        tmp_path / "own.jsonl", GOOD + '\n{"turns": ["Line\u2028separator"]}\n', "utf-8-sig"
    )
    assert read_prompts([path]) == [
        Prompt("a/1", "a", "code", ("One", "Two")),
        Prompt("own/3", "own", "", ("Line\u2028separator",)),
    ]


def test_the_limit_is_per_file(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, GOOD * 3) for name in ("a.jsonl", "b.jsonl")]
    assert len(read_prompts(paths, limit=2)) == 4
    assert len(read_prompts(paths)) == 6


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'id': 1}", "line 2 is not JSON: Expecting property name"),
        ('["Hello"]', "line 2 is not a prompt: it needs 'turns'"),
        ('{"turns": []}', "line 2 is not a prompt"),
        ('{"turns": "Hello"}', "line 2 is not a prompt"),
        ('{"turns": ["Hello", ""]}', "line 2 is not a prompt"),
        ('{"turns": [{"role": "user"}]}', "line 2 is not a prompt"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "bad.jsonl", f"{GOOD}{line}\n")
    with pytest.raises(DataError) as caught:
        read_prompts([path])
    assert str(caught.value).startswith(f"{path}, {message}")


def test_missing_empty_and_undecodable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: No such file or directory"):
        read_prompts([tmp_path / "none.jsonl"])
    with pytest.raises(DataError, match=r"empty\.jsonl holds no prompts"):
        read_prompts([write(tmp_path / "empty.jsonl", "\n")])
    with pytest.raises(DataError, match=r"Cannot read prompts from .*latin\.jsonl"):
        read_prompts([write(tmp_path / "latin.jsonl", '{"turns": ["é"]}', "latin-1")])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": ()}, "No prompts given"),
        ({"num_speculative_tokens": 0}, "--num-speculative-tokens must be at least 1, not 0"),
        ({"max_new_tokens": 0}, "--max-new-tokens must be at least 1"),
        ({"limit": 0}, "--limit must be at least 1"),
        ({"temperature": -1.0}, "--temperature must be 0, or at least 0.001, not -1.0"),
        ({"temperature": float("nan")}, "--temperature must be 0, or at least"),
        ({"seed": -1}, "--seed must be at least 0"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EvalConfig(**({"prompts": (Path("p.jsonl"),)} | settings))  # type: ignore[arg-type]
