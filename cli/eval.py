"""`sfdd eval`"""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sfdd.artifacts import DEFAULT_RUN
from sfdd.evaluation.config import DEFAULT_PROMPTS, EvalConfig

from . import display, options

if TYPE_CHECKING:
    from sfdd.evaluation.report import EvalReport, Measurement

_DEFAULT = EvalConfig(prompts=(DEFAULT_PROMPTS,))


def eval_draft(
    prompts: Annotated[
        list[Path] | None,
        typer.Argument(
            help=f"JSONL files of prompts (id, set, category, turns). [default: {DEFAULT_PROMPTS}]",
            show_default=False,
        ),
    ] = None,
    target: options.OptionalTarget = None,
    drafter: Annotated[
        Path | None, typer.Option(help="Drafter directory; default: the one of the run.")
    ] = None,
    run: options.Run = DEFAULT_RUN,
    num_speculative_tokens: Annotated[
        int, typer.Option(help="Draft tokens proposed per verification.")
    ] = _DEFAULT.num_speculative_tokens,
    temperature: Annotated[
        float, typer.Option(help="0 decodes greedily; above, by the exact rejection rule.")
    ] = _DEFAULT.temperature,
    max_new_tokens: Annotated[
        int, typer.Option(help="Tokens per response.")
    ] = _DEFAULT.max_new_tokens,
    limit: Annotated[int | None, typer.Option(help="Prompts read from each file.")] = None,
    seed: Annotated[
        int, typer.Option(help="Of the sampling, and of the untrained drafter.")
    ] = _DEFAULT.seed,
    untrained: Annotated[
        bool, typer.Option("--untrained", help="Also measure an untrained drafter: the floor.")
    ] = _DEFAULT.untrained,
    dtype: options.Dtype = _DEFAULT.dtype,
    device: options.Device = _DEFAULT.device,
    attn_implementation: options.AttnImplementation = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
    config: options.Config = None,
) -> None:
    """Measure the drafter: acceptance length, and speedup over decoding without one.

    Draft-verify decoding with the real target, interleaved with the autoregressive baseline. Writes
    RUN/eval.json.
    """
    found = (DEFAULT_PROMPTS,) if DEFAULT_PROMPTS.is_file() else ()
    settings = EvalConfig(
        prompts=tuple(prompts or found),
        target=target,
        drafter=drafter,
        run=run,
        num_speculative_tokens=num_speculative_tokens,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
        limit=limit,
        untrained=untrained,
        dtype=dtype,
        device=device,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
    )
    from sfdd.evaluation.run import evaluate

    with display.progress() as on_progress:
        report = evaluate(settings, on_progress)
    print(report.to_json() if json else _describe(report, settings))


def _describe(report: "EvalReport", settings: EvalConfig) -> str:
    overall = report.overall
    title = (
        f"{overall.num_prompts:,} prompts, {overall.num_responses:,} responses of at most "
        f"{settings.max_new_tokens} tokens, temperature {settings.temperature:g}, "
        f"{settings.num_speculative_tokens} draft tokens per verification"
    )
    parts = [title, _aligned(_figures(overall))]
    if len(report.sets) > 1:
        parts += [_aligned(_by_set(report, name)) for name in overall.drafters]
    return "\n\n".join(parts)


def _figures(measured: "Measurement") -> list[list[str]]:
    """One column per drafter, and the baseline."""
    results = list(measured.drafters.values())
    acceptance = [result.acceptance for result in results]
    by_position = zip_longest(*(a.acceptance_rate_by_position for a in acceptance))
    rows = [
        ["", *measured.drafters, "baseline"],
        ["acceptance length tau", *(_number(a.acceptance_length) for a in acceptance)],
        ["mean accepted l", *(_number(a.mean_accepted) for a in acceptance)],
        ["acceptance rate", *(_percent(a.acceptance_rate) for a in acceptance)],
        *(
            [f"  at position {position}", *map(_percent, rates)]
            for position, rates in enumerate(by_position, start=1)
        ),
        ["drafts", *(f"{a.num_drafts:,}" for a in acceptance)],
        ["proposed tokens", *(f"{a.num_proposed:,}" for a in acceptance)],
        ["accepted tokens", *(f"{a.num_accepted:,}" for a in acceptance)],
    ]
    speeds = [*(result.speed for result in results), measured.baseline]
    rows += [
        ["emitted tokens", *(f"{speed.num_tokens:,}" for speed in speeds)],
        ["seconds", *(f"{speed.seconds:.1f}" for speed in speeds)],
        ["tokens/s", *(f"{speed.tokens_per_second:.1f}" for speed in speeds)],
        ["speedup", *(f"{measured.speedup(name):.2f}x" for name in measured.drafters), "1.00x"],
    ]
    lossless = [_lossless(measured, name) for name in measured.drafters]
    return [*rows, ["lossless prompts", *lossless]] if any(lossless) else rows


def _by_set(report: "EvalReport", name: str) -> list[list[str]]:
    """One row per prompt set, for one drafter."""
    header = [name, "prompts", "tau", "l", "rate", "tokens/s", "baseline", "speedup", "lossless"]
    rows = [header]
    for title, measured in report.sets.items():
        result = measured.drafters[name]
        row = [
            title,
            f"{measured.num_prompts:,}",
            _number(result.acceptance.acceptance_length),
            _number(result.acceptance.mean_accepted),
            _percent(result.acceptance.acceptance_rate),
            f"{result.speed.tokens_per_second:.1f}",
            f"{measured.baseline.tokens_per_second:.1f}",
            f"{measured.speedup(name):.2f}x",
            _lossless(measured, name) or "-",
        ]
        rows.append(row)
    return rows


def _lossless(measured: "Measurement", name: str) -> str:
    """Prompts answered exactly as by the baseline; "" at temperature > 0."""
    identical = measured.drafters[name].num_identical
    return "" if identical is None else f"{identical}/{measured.num_prompts}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    lines = (
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=False))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
