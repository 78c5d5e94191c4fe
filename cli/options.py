"""Options that several commands share, and the configuration file behind them."""

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from sfdd.conversations.config import FORMATS

_LISTS = ("data", "prompts")  # may be written as one string


def _load_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Take defaults from the command's table: a flag or environment variable still wins."""
    if path is None or ctx.resilient_parsing:
        return path
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"cannot read {path}: {error}") from error
    commands = list(getattr(ctx.parent and ctx.parent.command, "commands", ()))
    for name, table in tables.items():
        if name not in commands:
            raise typer.BadParameter(f"{path}: unknown table [{name}]{_near(name, commands)}")
        if not isinstance(table, dict):
            raise typer.BadParameter(f"{path}: {name} is not a table; write [{name}]")
    table = tables.get(ctx.info_name or "", {})
    settings = {key.replace("-", "_"): value for key, value in table.items()}
    known = [p.name for p in ctx.command.params if p.name not in (None, "config")]
    for key in settings:
        if key not in known:
            where = f"{path}, [{ctx.info_name}]"
            raise typer.BadParameter(f"{where}: unknown key {key!r}{_near(key, known)}")
    for name in _LISTS:
        if isinstance(settings.get(name), str):
            settings[name] = [settings[name]]
    ctx.default_map = {**(ctx.default_map or {}), **settings}
    return path


def _near(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(sorted(known))}"


def typed(ctx: typer.Context, *names: str) -> list[str]:
    """Those of some options that stand on the command line, not in a file or the environment."""
    sources = {name: ctx.get_parameter_source(name) for name in names}
    given = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    return [f"--{name.replace('_', '-')}" for name in given]


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        callback=_load_config,
        is_eager=True,
        help="TOML file with a table per command; flags and environment win.",
    ),
]
Run = Annotated[
    Path, typer.Option("--run", envvar="SFDD_RUN", help="Run directory that the commands share.")
]
Target = Annotated[
    str,
    typer.Option(
        "--target",
        envvar="SFDD_TARGET",
        help="Target model: directory, GGUF file, hub id, or 'smollm2'.",
    ),
]
OptionalTarget = Annotated[
    str | None,
    typer.Option(
        "--target",
        envvar="SFDD_TARGET",
        help="Target model; default: the one that the run or the drafter records.",
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format", help=f"Read every record as {', '.join(FORMATS)}; default: as what it is."
    ),
]
_REASONING = (
    "Reasoning of thinking models: keep (rendered and supervised), mask (rendered only) or drop."
)
_REWRITTEN = (
    "Where the chat template rewrites earlier turns: expand to a sample per assistant turn, or "
    "supervise the last one only."
)
_LAST_TURN = "Supervise only the last assistant turn of every conversation."
Reasoning = Annotated[str, typer.Option("--reasoning", help=_REASONING)]
Rewritten = Annotated[str, typer.Option("--rewritten", help=_REWRITTEN)]
LastTurnOnly = Annotated[bool, typer.Option("--last-turn-only", help=_LAST_TURN)]
# Of commands that follow the scoring of the run.
ReasoningAsScored = Annotated[
    str | None, typer.Option("--reasoning", help=_REASONING, show_default="as scored")
]
RewrittenAsScored = Annotated[
    str | None, typer.Option("--rewritten", help=_REWRITTEN, show_default="as scored")
]
LastTurnOnlyAsScored = Annotated[
    bool | None,
    typer.Option("--last-turn-only/--every-turn", help=_LAST_TURN, show_default="as scored"),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1 …")]
Dtype = Annotated[
    str, typer.Option("--dtype", help="auto (float32 on a CPU), float32, bfloat16 or float16.")
]
AttnImplementation = Annotated[
    str | None, typer.Option("--attn-implementation", help="Passed to transformers: sdpa, eager …")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the target.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Start again instead of continuing.")]
LogJson = Annotated[
    bool, typer.Option("--log-json", help="Progress as JSON, a line at a time, on stderr.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
