"""Running sfdd's commands as a user would, from benchmarks that need several of them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def sfdd(*words: object, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run one command, its progress on stderr; its result. A failure ends the process with its code."""
    line = [str(word) for word in words]
    print(f"\n$ sfdd {' '.join(line)}", file=sys.stderr, flush=True)
    done = subprocess.run(
        [str(Path(sys.executable).with_name("sfdd")), *line, "--json"],
        cwd=ROOT,
        env=os.environ | (env or {}),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.returncode)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def up_to_date(result: Path, made_from: Iterable[Path]) -> dict[str, Any] | None:
    """The JSON in a file, unless one of what it was made from is newer."""
    if not result.exists():
        return None
    if result.stat().st_mtime <= max(path.stat().st_mtime for path in made_from):
        return None
    print(f"\n{result} is up to date", file=sys.stderr)
    earlier: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return earlier
