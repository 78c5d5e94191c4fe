"""Who may import whom: data flows one way, and heavy packages have owners."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STAGES = ("scoring", "filtering", "training", "evaluation", "inspection", "export")
# Each room may import what stands before it; the stages stand side by side.
FLOORS = ("errors", "progress", "artifacts", "conversations", "targets", "drafters")
OWNERS = {
    "datasets": "sfdd/conversations",
    "vllm": "sfdd/targets",
    "typer": "cli",
    "rich": "cli",
    "click": "nobody",
}
NO_TORCH = ("errors", "progress", "artifacts", "conversations", "filtering")


def modules(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(name: str) -> str:
    """`sfdd.targets.loading.X` -> `targets`."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def test_data_flow_one_way() -> None:
    for path, tree in modules("sfdd"):
        if path.name == "__init__.py":
            continue
        here = path.with_suffix("").parts[1]
        for name in imported(tree):
            if not name.startswith("sfdd."):
                continue
            there = room(name)
            assert name.split(".")[0] == "sfdd"
            if here in STAGES:
                assert there == here or there in FLOORS, f"{path} imports {name}"
            else:
                assert FLOORS.index(there) <= FLOORS.index(here), f"{path} imports {name}"


def test_the_library_never_imports_the_command_line() -> None:
    for path, tree in modules("sfdd"):
        assert not [n for n in imported(tree) if n.split(".")[0] in ("cli", "sfdd_cli")], path


def test_heavy_packages_have_owners() -> None:
    for path, tree in modules("sfdd", "cli"):
        for name in imported(tree):
            owner = OWNERS.get(name.split(".")[0])
            assert owner is None or path.as_posix().startswith(owner), f"{path} imports {name}"


@pytest.mark.parametrize("part", NO_TORCH)
def test_no_torch_where_it_is_not_needed(part: str) -> None:
    names = [
        ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        for path, _ in modules("sfdd")
        if path.with_suffix("").parts[1] == part
    ]
    assert names
    code = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_modules_stay_readable() -> None:
    for path, _ in modules("sfdd", "cli"):
        assert len((ROOT / path).read_text(encoding="utf-8").splitlines()) <= 300, path
