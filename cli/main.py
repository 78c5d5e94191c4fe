"""`sfdd`: the commands, and how a mistake, an interruption and a bug end."""

import logging
import os
import signal
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sfdd import __version__
from sfdd.errors import SfddError

from .eval import eval_draft
from .export import export
from .export_data import export_data
from .filter import filter_data
from .inspect import inspect
from .score import score
from .train_draft import train_draft


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which schedulers send, ends a command as Ctrl-C does: with what was done on disk."""


def _terminate(signal_number: int, frame: object) -> None:
    raise _Terminated


def _what_next(command: str | None) -> str:
    if command not in ("score", "train-draft"):
        return "Nothing was written; run the command again."
    without = " without --overwrite" if "--overwrite" in sys.argv else ""
    return f"What was finished is kept: run the same command again{without} to continue."


class _Commands(TyperGroup):
    """Turns a user's mistake into one sentence and Ctrl-C into advice; a bug keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        signal.signal(signal.SIGTERM, _terminate)
        try:
            return super().invoke(ctx)
        except SfddError as error:
            if ctx.params.get("debug"):
                raise
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt as stop:
            typer.echo(f"\nInterrupted. {_what_next(ctx.invoked_subcommand)}", err=True)
            raise typer.Exit(143 if isinstance(stop, _Terminated) else 130) from None


class _App(typer.Typer):
    def __call__(self, *args: Any, **options: Any) -> Any:
        try:
            return super().__call__(*args, **options)
        except SystemExit as end:
            # vLLM's threads may still be in C++ when the interpreter ends under them, which aborts the
            # process: all is done and written, and its exit code would say otherwise.
            if "vllm" in sys.modules and isinstance(end.code, int | None):
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(end.code or 0)
            raise


app = _App(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"sfdd {__version__}")
        raise typer.Exit


@app.callback()
def sfdd(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show a traceback for every error.")
    ] = False,
) -> None:
    """Train draft models on the half of the data that teaches them.

    score -> filter -> train-draft -> eval, sharing one run directory (--run, or SFDD_RUN).
    """
    if not sys.stderr.isatty():  # transformers heeds it, too
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.basicConfig(
        stream=sys.stderr, level=logging.DEBUG if debug else logging.WARNING, format="%(message)s"
    )
    if not debug:  # what sfdd itself has chosen
        logging.getLogger("sfdd").setLevel(logging.INFO)


app.command()(score)
app.command("filter")(filter_data)
app.command("train-draft")(train_draft)
app.command("eval")(eval_draft)
app.command()(export)
app.command("export-data")(export_data)
app.command()(inspect)
