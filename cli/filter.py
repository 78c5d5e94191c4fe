"""`sfdd filter`"""

from pathlib import Path
from typing import Annotated

import typer

from sfdd.filtering.config import METRICS, FilterConfig

from . import display, options

_DEFAULT = FilterConfig()


def filter_data(
    keep: Annotated[
        float, typer.Option(help="Fraction of the scored conversations to keep, in (0, 1].")
    ] = _DEFAULT.keep,
    metric: Annotated[str, typer.Option(help=f"One of {', '.join(METRICS)}.")] = _DEFAULT.metric,
    seed: Annotated[int, typer.Option(help="Seed of --metric random.")] = _DEFAULT.seed,
    run: options.Run = _DEFAULT.run,
    scores: Annotated[
        Path | None, typer.Option(help="Score table; default: the run's scores.parquet.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Where a scored data set is now, if it moved; once per data set."),
    ] = None,
    json: options.Json = False,
    config: options.Config = None,
) -> None:
    """Keep the conversations that teach a drafter most.

    Writes RUN/selection.parquet (kept and dropped, with the threshold) and RUN/distilled/: the kept
    records in the format, order and wording they came in. Never scores again.
    """
    settings = FilterConfig(
        keep=keep, metric=metric, seed=seed, run=run, scores=scores, data=tuple(data or ())
    )
    from sfdd.filtering.run import filter_data as run_filter

    report = run_filter(settings)
    if json:
        display.print_json(report)
        return
    display.print_table(
        f"Kept {report.kept:,} of {report.scored:,} scored conversations by {report.metric}",
        {
            "retention ratio": f"{report.retention_ratio:.3f} (asked for {report.keep:g})",
            "threshold": f"{report.metric} {report.threshold:.6g}",
            "supervised tokens": f"{report.supervised_tokens_kept:,} of "
            f"{report.supervised_tokens_scored:,} "
            f"({report.supervised_tokens_kept / report.supervised_tokens_scored:.1%})",
            "dropped": f"{report.dropped:,}",
            "not scored": f"{report.skipped:,}",
            "selection": str(report.selection),
            "distilled": ", ".join(map(str, report.distilled)),
        },
    )
    display.hint("sfdd train-draft", run)
