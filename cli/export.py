"""`sfdd export`"""

import json as json_text
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sfdd.artifacts import DEFAULT_RUN
from sfdd.errors import TargetError, UsageError
from sfdd.export.config import DTYPES, ENGINES, CheckConfig, ExportConfig

from . import display, options

if TYPE_CHECKING:
    from sfdd.export.drafters import CheckReport, Described


def export(
    ctx: typer.Context,
    engine: Annotated[str, typer.Option("--for", help=f"The engine: {' or '.join(ENGINES)}.")],
    directory: Annotated[
        Path | None,
        typer.Argument(
            help="Directory to write, default RUN/export/ and the engine's name; with --check the one to "
            "check, default RUN/drafter.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Write nothing; say what the engine would reject."),
    ] = False,
    files_only: Annotated[
        bool, typer.Option("--files-only", help="With --check: load no target, run no draft step.")
    ] = False,
    drafter: Annotated[
        Path | None, typer.Option(help="Drafter to export; default: the one of the run.")
    ] = None,
    run: options.Run = DEFAULT_RUN,
    dtype: Annotated[
        str | None,
        typer.Option(
            help=f"Write the weights as {', '.join(DTYPES[:-1])} or {DTYPES[-1]}.",
            show_default="as stored",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            envvar="SFDD_TARGET",
            help="With --check: the target model, with which a draft step is run; default: the one that "
            "the drafter records.",
        ),
    ] = None,
    device: options.Device = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output.")] = False,
    json: options.Json = False,
    config: options.Config = None,
) -> None:
    """Write the drafter as a serving engine loads it, or check one in a form that sfdd trains or writes.

    What sfdd trains, vLLM loads as it is; SGLang wants other names. Whatever is written is checked, too.
    """
    if check:
        for option in options.typed(ctx, "drafter", "dtype", "overwrite"):
            raise UsageError(
                f"--check writes nothing, so {option} has no meaning with it: leave it out."
            )
        if files_only and options.typed(ctx, "target"):
            raise UsageError(
                "--files-only loads no target, but --target names one: leave out one of the two."
            )
        _check(
            CheckConfig(
                engine=engine,
                drafter=directory,
                run=run,
                target=target,
                files_only=files_only,
                device=device,
                trust_remote_code=trust_remote_code,
            ),
            json,
        )
        return
    for option in options.typed(ctx, "target", "files_only", "device", "trust_remote_code"):
        raise UsageError(
            f"{option} is for --check, which alone loads a target: leave it out, or add --check."
        )
    settings = ExportConfig(
        engine=engine,
        output=directory,
        drafter=drafter,
        run=run,
        dtype=dtype,
        overwrite=overwrite,
    )
    from sfdd.export.drafters import export_drafter

    report = export_drafter(settings)
    if json:
        display.print_json(report)
        return
    display.print_table(
        f"Wrote {report.output} for {ENGINES[engine]}",
        {**_rows(report.described), "drafter": str(report.drafter)},
    )
    typer.echo(f"Next: {_check_command(engine, report.output, report.described)}", err=True)


def _check(settings: CheckConfig, json: bool) -> None:
    from sfdd.export.drafters import check_drafter

    report = check_drafter(settings)
    if json:
        display.print_json(report)
    elif report.accepted:
        _show_accepted(report)
    else:
        for rejection in report.rejections:
            typer.echo(f"Error: {rejection}", err=True)
    if not report.accepted:
        raise typer.Exit(1)


def _show_accepted(report: "CheckReport") -> None:
    name, described = ENGINES[report.engine], report.described
    step = (
        f"not run: {report.not_drafted}"
        if report.drafted is None
        else f"drafts token {report.drafted}"
    )
    display.print_table(
        f"{name} would load {report.drafter}",
        {
            **_rows(described),
            "draft step": step,
            **({"note": "\n".join(report.notes)} if report.notes else {}),
        },
    )
    typer.echo(f"Next: {_serve_command(report)}", err=True)


def _rows(described: "Described") -> dict[str, str]:
    rows = {
        "method": described.method,
        "tensors": f"{described.tensors}, {described.parameters:,} parameters in {described.dtype}",
    }
    if described.aux_layers:
        rows["aux layers"] = ", ".join(map(str, described.aux_layers))
        rows["draft vocabulary"] = f"{described.draft_vocab_size:,}"
    return rows | {"target": described.target or "not recorded"}


def _check_command(engine: str, directory: Path, described: "Described") -> str:
    target = "" if described.target else " --target TARGET"
    return f"sfdd export --check {shlex.quote(str(directory))} --for {engine}{target}"


def _serve_command(report: "CheckReport") -> str:
    method, drafter = report.described.method, str(report.drafter)
    target = shlex.quote(_weights(report.described.target) or "TARGET")
    if report.engine == "vllm":
        speculative = {"method": method, "model": drafter, "num_speculative_tokens": 5}
        return (
            f"vllm serve {target} --speculative-config {shlex.quote(json_text.dumps(speculative))}"
        )
    return (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {method.upper()} "
        f"--speculative-draft-model-path {shlex.quote(drafter)}"
    )


def _weights(target: str | None) -> str | None:
    """Where an engine finds a target; None where sfdd alone reads it."""
    from sfdd.targets.loading import TargetSource

    try:
        return TargetSource(target).weights if target else None
    except TargetError:
        return None
