"""The README's commands run as they stand there, and what it names exists."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line.partition("#")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.S)
    for line in block.splitlines()
    if line.startswith("sfdd ")
]
OVERWRITING = ("score", "train-draft", "export", "export-data")
TARGETS = ("meta-llama/Llama-3.1-8B-Instruct", "smollm2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the README's reader has: data/, and files of their own."""
    (tmp_path / "data").mkdir()
    for name in ("chat_openai.jsonl", "chat_sharegpt.jsonl", "eval_prompts.jsonl"):
        lines = (ROOT / "data" / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (tmp_path / "data" / name).write_text("".join(lines[:6]), encoding="utf-8")
    for own, sample in (
        ("chats", "chat_openai"),
        ("other", "chat_openai"),
        ("prompts", "eval_prompts"),
    ):
        (tmp_path / f"{own}.jsonl").write_bytes((tmp_path / f"data/{sample}.jsonl").read_bytes())
    return tmp_path


def test_every_command_runs(folder: Path, tiny_directory: Path) -> None:
    assert {command.split()[1] for command in COMMANDS} == {
        "score",
        "inspect",
        "filter",
        "train-draft",
        "export",
        "export-data",
        "eval",
    }
    sfdd = Path(sys.executable).with_name("sfdd")
    for command in COMMANDS:
        words = [str(tiny_directory) if w in TARGETS else w for w in shlex.split(command)[1:]]
        if words[0] in OVERWRITING and "--check" not in words:
            words.append("--overwrite")  # the README shows several ways to make the same thing
        done = subprocess.run(
            [str(sfdd), *words],
            cwd=folder,
            capture_output=True,
            text=True,
            env={k: v for k, v in os.environ.items() if not k.startswith("SFDD_")},
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_every_file_named_exists() -> None:
    table = README.partition("## Files")[2].partition("\n## ")[0]
    for path in re.findall(r"^\| `([^`]+)`", table, re.M):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\((?!http)([^)]+)\)", README):
        assert (ROOT / link).exists(), link


def test_every_package_is_in_the_file_map() -> None:
    packages = {f"`{p.parent.relative_to(ROOT)}/`" for p in ROOT.glob("sfdd/*/__init__.py")}
    assert not {package for package in packages if package not in README}


def test_every_make_target_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.M))
    assert {"demo", "test", "bench"} <= named <= targets
