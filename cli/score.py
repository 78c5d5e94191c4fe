"""`sfdd score`"""

from typing import Annotated

import typer

from sfdd.artifacts import DEFAULT_RUN
from sfdd.conversations.config import MaskConfig
from sfdd.scoring.config import ScoreConfig
from sfdd.targets.config import BATCH_TOKENS, parse_engine_args

from . import display, options

_DEFAULT = ScoreConfig(data=("",), target="")


def score(
    data: Annotated[
        list[str],
        typer.Argument(
            help="JSONL, JSON or Parquet files (or a pattern of them), saved data sets or hub ids."
        ),
    ],
    target: options.Target,
    run: options.Run = DEFAULT_RUN,
    format: options.Format = None,
    reasoning: options.Reasoning = _DEFAULT.mask.reasoning,
    rewritten: options.Rewritten = _DEFAULT.mask.rewritten,
    last_turn_only: options.LastTurnOnly = False,
    max_length: Annotated[
        int, typer.Option(help="Tokens kept of a conversation; longer ones are cut and flagged.")
    ] = _DEFAULT.max_length,
    batch_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens per forward pass, padding included.",
            show_default=f"{BATCH_TOKENS}; with vLLM its own",
        ),
    ] = _DEFAULT.batch_tokens,
    logits_memory: Annotated[
        int, typer.Option(help="MiB that logits and what is computed from them may take.")
    ] = _DEFAULT.logits_memory,
    token_scores: Annotated[
        bool, typer.Option("--token-scores", help="Also store every token's flatness.")
    ] = _DEFAULT.token_scores,
    backend: Annotated[
        str,
        typer.Option(help="auto (vLLM where it is installed and has a GPU), transformers, vllm."),
    ] = _DEFAULT.backend,
    dtype: options.Dtype = _DEFAULT.dtype,
    device: options.Device = _DEFAULT.device,
    attn_implementation: options.AttnImplementation = None,
    trust_remote_code: options.TrustRemoteCode = False,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(help="vLLM: GPUs that share the target.", show_default="1")
    ] = _DEFAULT.tensor_parallel_size,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(
            help="vLLM: fraction of each GPU's memory to take.", show_default="vLLM's own"
        ),
    ] = _DEFAULT.gpu_memory_utilization,
    quantization: Annotated[
        str | None,
        typer.Option(help="vLLM: quantize the weights: fp8 …", show_default="as they are stored"),
    ] = _DEFAULT.quantization,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(help="vLLM: KEY=VALUE for its engine, once or more: max_num_seqs=64 …"),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Count, and estimate the time; write nothing. Reads all of the data."
        ),
    ] = False,
    shard_index: Annotated[
        int | None,
        typer.Option(
            help="Score only this part of the records, from 0; default: what torchrun says."
        ),
    ] = None,
    num_shards: Annotated[
        int | None, typer.Option(help="Parts that as many processes score, in one --run.")
    ] = None,
    log_json: options.LogJson = False,
    overwrite: options.Overwrite = False,
    json: options.Json = False,
    config: options.Config = None,
) -> None:
    """Score every conversation by how flat the target's next-token distributions are.

    Writes RUN/scores.parquet. Run again to continue an interrupted run, or after appending data.
    """
    settings = ScoreConfig(
        data=tuple(data),
        target=target,
        run=run,
        mask=MaskConfig(format, reasoning, rewritten, last_turn_only),
        max_length=max_length,
        batch_tokens=batch_tokens,
        backend=backend,
        dtype=dtype,
        device=device,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        tensor_parallel_size=tensor_parallel_size,
        gpu_memory_utilization=gpu_memory_utilization,
        quantization=quantization,
        engine_args=parse_engine_args(engine_arg or ()),
        logits_memory=logits_memory,
        shard_index=shard_index,
        num_shards=num_shards,
        token_scores=token_scores,
        overwrite=overwrite,
    )
    if dry_run:
        _show_plan(settings, json)
        return
    from sfdd.scoring.run import score as run_score

    with display.progress(log_json) as on_progress:
        report = run_score(settings, on_progress)

    if log_json:
        display.log_json("finished", report)
    if json:
        display.print_json(report)
        return
    speed = {
        "tokens/s": f"{report.tokens_per_second:,.0f}",
        "padding": f"{report.padding:.1%} of the computed tokens",
        "batch tokens": f"{report.batch_tokens:,}",
        "engine": report.engine,
    }
    if not report.complete:
        done = {"records": f"{report.read:,}", "finished earlier": f"{report.resumed:,}"}
        display.print_table("Scored its part; the last worker to finish merges all", done | speed)
        return
    display.print_table(
        f"Scored into {report.scores}",
        {
            "read": f"{report.read:,}",
            "scored": f"{report.scored:,}",
            "skipped": display.counted(report.skipped, report.reasons),
            "finished earlier": f"{report.resumed:,}",
            "truncated": f"{report.truncated:,}",
            "rewritten": f"{report.rewritten:,}",
            "exact duplicates": f"{report.duplicates:,}",
            "tokens": f"{report.num_tokens:,}",
            "supervised tokens": f"{report.num_supervised_tokens:,}",
            "mean flatness": "-" if report.mean_flatness is None else f"{report.mean_flatness:.4f}",
        }
        | speed,
    )
    display.hint("sfdd filter --keep 0.5", run)


def _show_plan(settings: ScoreConfig, json: bool) -> None:
    from sfdd.scoring.plan import plan

    with display.progress() as on_progress:
        report = plan(settings, on_progress)
    if json:
        display.print_json(report)
        return
    display.print_table(
        "Would score (nothing was written)",
        {
            "read": display.counted(report.read, report.formats),
            "scored": f"{report.scored:,}",
            "skipped": display.counted(report.skipped, report.reasons),
            "truncated": f"{report.truncated:,}",
            "rewritten": f"{report.rewritten:,}, {report.samples:,} samples in all",
            "exact duplicates": f"{report.duplicates:,}",
            "tokens": f"{report.num_tokens:,}",
            "supervised tokens": f"{report.num_supervised_tokens:,}",
            "roles": "\n".join(f"{n:,} x {roles}" for roles, n in report.roles.items()) or "-",
            "tokens/s": f"{report.tokens_per_second:,.0f} (of {report.warmup_tokens:,} tokens tried)",
            "estimated time": display.duration(report.seconds),
        },
    )
