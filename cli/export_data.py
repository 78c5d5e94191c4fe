"""`sfdd export-data`"""

from pathlib import Path
from typing import Annotated

import typer

from sfdd.artifacts import DEFAULT_RUN
from sfdd.errors import UsageError
from sfdd.export.config import FORMS, ExportDataConfig
from sfdd.export.trainers import TRAINERS

from . import display, options


def export_data(
    ctx: typer.Context,
    trainer: Annotated[
        str, typer.Option("--for", help=f"Who is to read it: {', '.join(TRAINERS)}.")
    ],
    output: Annotated[
        Path | None,
        typer.Argument(
            help="File to write; default: RUN/export/ and the trainer's name.", show_default=False
        ),
    ] = None,
    run: options.Run = DEFAULT_RUN,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Files, saved data sets or hub ids, instead of the distilled data of the run."
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            help=f"{' or '.join(FORMS)} (input_ids and loss_mask).",
            show_default="as the trainer reads best",
        ),
    ] = None,
    target: options.OptionalTarget = None,
    format: options.Format = None,
    reasoning: options.ReasoningAsScored = None,
    rewritten: options.RewrittenAsScored = None,
    last_turn_only: options.LastTurnOnlyAsScored = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens kept of a conversation; longer ones are cut.", show_default="as scored"
        ),
    ] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output.")] = False,
    json: options.Json = False,
    config: options.Config = None,
) -> None:
    """Write the distilled conversations as another trainer of drafters reads them.

    What its format cannot say is skipped and counted. Beside the file: what it was made of.
    """
    settings = ExportDataConfig(
        trainer=trainer,
        output=output,
        data=tuple(data or ()),
        run=run,
        form=form,
        target=target,
        format=format,
        reasoning=reasoning,
        rewritten=rewritten,
        last_turn_only=last_turn_only,
        max_length=max_length,
        trust_remote_code=trust_remote_code,
        overwrite=overwrite,
    )
    _refuse_what_text_does_without(ctx, settings)
    from sfdd.export.data import export_data as run_export

    with display.progress() as on_progress:
        report = run_export(settings, on_progress)
    if json:
        display.print_json(report)
        return
    rows = {
        "read": f"{report.read:,}",
        "written": f"{report.written:,} as {report.form}, {report.rows:,} rows",
        "skipped": display.counted(report.skipped, report.reasons),
        "truncated": f"{report.truncated:,}",
        **({"note": "\n".join(report.notes)} if report.notes else {}),
        "data": "\n".join(report.data),
        "provenance": str(report.provenance),
    }
    display.print_table(f"Wrote {report.output} for {report.trainer}", rows)
    typer.echo(f"Next: {report.trainer}: {report.hand_over}", err=True)


def _refuse_what_text_does_without(ctx: typer.Context, settings: ExportDataConfig) -> None:
    trainer = TRAINERS[settings.trainer]
    if trainer.chosen(settings.form) != "text":
        return
    instead = ", or add --form tokens" if "tokens" in trainer.hand_over else ""
    for option in options.typed(ctx, "target", "max_length", "rewritten", "trust_remote_code"):
        raise UsageError(
            f"{option} is for tokens, but what {trainer.name} is given is text, whole and as it stands: "
            f"leave it out{instead}."
        )
