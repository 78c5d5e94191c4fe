import tomllib
from pathlib import Path

import pytest
import typer
from sfdd_cli.main import app

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.toml"))
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_key_is_an_option_of_its_command(path: Path) -> None:
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    assert tables
    for command, table in tables.items():
        known = {parameter.name for parameter in COMMANDS[command].params}
        assert {key.replace("-", "_") for key in table} <= known


def test_default_config_names_the_defaults() -> None:
    (path,) = (path for path in CONFIGS if path.name == "default.toml")
    for command, table in tomllib.loads(path.read_text(encoding="utf-8")).items():
        defaults = {p.name: p.default for p in COMMANDS[command].params if not p.required}
        for key, value in table.items():
            name = key.replace("-", "_")
            assert name not in defaults or defaults[name] == value, f"{command}.{key}"
