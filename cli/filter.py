"""`sfdd filter`"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sfdd.filtering.config import BUDGETS, DEFAULT_KEEP, METRICS, FilterConfig, parse_band

from . import display, options

if TYPE_CHECKING:
    from sfdd.filtering.report import FilterReport, Share

_DEFAULT = FilterConfig()
_MOST_SHOWN = 12  # kinds of conversations; --json has more


def filter_data(
    ctx: typer.Context,
    keep: Annotated[
        float, typer.Option(help="Fraction of the scored conversations to keep, in (0, 1].")
    ] = DEFAULT_KEEP,
    keep_rows: Annotated[
        int | None, typer.Option(help="How many conversations to keep, instead of --keep.")
    ] = None,
    keep_tokens: Annotated[
        int | None,
        typer.Option(help="How many supervised tokens to keep at most, instead of --keep."),
    ] = None,
    band: Annotated[
        str | None,
        typer.Option(
            metavar="LO:HI",
            help="Keep what lies between two quantiles of the metric, instead of --keep: 0.2:0.8.",
        ),
    ] = None,
    metric: Annotated[
        str,
        typer.Option(
            help=f"One of {', '.join(METRICS)}, or any numeric column of the scores or of --join."
        ),
    ] = _DEFAULT.metric,
    low: Annotated[
        bool, typer.Option("--low", help="Keep the other end of the metric: the least flat.")
    ] = _DEFAULT.low,
    by: Annotated[
        str | None,
        typer.Option(
            help="Share the budget out: to each source, length (tenths), turns, or value of a column."
        ),
    ] = None,
    match_length: Annotated[
        bool,
        typer.Option(
            "--match-length",
            help="With --metric random: as many of each length as flatness would keep.",
        ),
    ] = _DEFAULT.match_length,
    join: Annotated[
        Path | None,
        typer.Option(help="A .parquet, .csv or .jsonl file with a column id: columns of your own."),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of --metric random, and of lots between equals.")
    ] = _DEFAULT.seed,
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
    budgets: dict[str, Any] = {
        "keep": keep,
        "keep_rows": keep_rows,
        "keep_tokens": keep_tokens,
        "band": band and parse_band(band),
    }
    settings = FilterConfig(
        **{name: budgets[name] for name in _given(ctx, BUDGETS)},
        low=low,
        by=by,
        metric=metric,
        match_length=match_length,
        join=join,
        seed=seed,
        run=run,
        scores=scores,
        data=tuple(data or ()),
    )
    from sfdd.filtering.run import filter_data as run_filter

    report = run_filter(settings)
    if json:
        display.print_json(report)
        return
    display.print_table(
        f"Kept {report.kept:,} of {report.scored:,} scored conversations by {report.metric}",
        _rows(report),
    )
    display.hint("sfdd train-draft", run)


def _given(ctx: typer.Context, names: Sequence[str]) -> list[str]:
    """Those that the user set; flags replace what the configuration file says."""
    sources = {name: ctx.get_parameter_source(name) for name in names}
    set_by: dict[str, list[str]] = {}
    for name, source in sources.items():
        set_by.setdefault(source.name if source else "DEFAULT", []).append(name)
    flags = [*set_by.get("COMMANDLINE", []), *set_by.get("ENVIRONMENT", [])]
    return flags or set_by.get("DEFAULT_MAP", [])


def _rows(report: "FilterReport") -> dict[str, str]:
    """The report for people; a line that says nothing is left out."""
    tokens = report.supervised_tokens_kept / report.supervised_tokens_scored
    return {
        "retention ratio": f"{report.retention_ratio:.3f} ({_asked_for(report)})",
        **_threshold(report),
        "supervised tokens": f"{report.supervised_tokens_kept:,} of "
        f"{report.supervised_tokens_scored:,} ({tokens:.1%})",
        "dropped": f"{report.dropped:,}",
        "not scored": f"{report.skipped:,}",
        **({} if report.joined is None else {"joined": f"{report.joined:,} conversations"}),
        **{
            f"kept by {name}": "\n".join(_shares(shares))
            for name, shares in report.kept_share.items()
            if len(shares) > 1
        },
        **({"note": "\n".join(report.notes)} if report.notes else {}),
        "selection": str(report.selection),
        "distilled": ", ".join(map(str, report.distilled)),
    }


def _asked_for(report: "FilterReport") -> str:
    if report.keep is not None:
        asked = f"{report.keep:g}"
    elif report.keep_rows is not None:
        asked = f"{report.keep_rows:,} conversations"
    elif report.keep_tokens is not None:
        asked = f"{report.keep_tokens:,} supervised tokens"
    else:
        low, high = report.band or (0, 1)
        asked = f"the band {low:g}:{high:g}"
    how = [
        *(["the low end"] if report.low else []),
        *([f"by {report.by}"] if report.by else []),
        *(["lengths as by flatness"] if report.match_length else []),
    ]
    return ", ".join([f"asked for {asked}", *how])


def _threshold(report: "FilterReport") -> dict[str, str]:
    if report.threshold is None:
        return {}
    upper = "" if report.upper_threshold is None else f" to {report.upper_threshold:.6g}"
    return {"threshold": f"{report.metric} {report.threshold:.6g}{upper}"}


def _shares(shares: "list[Share]") -> list[str]:
    shown: list[Any] = shares[:_MOST_SHOWN]
    width = max(len(share.name) for share in shown)
    lines = [
        f"{share.name:<{width}}  {share.share:6.1%}  {share.kept:,} of {share.scored:,}"
        for share in shown
    ]
    more = len(shares) - len(shown)
    return [*lines, f"and {more} more, see --json"] if more else lines
