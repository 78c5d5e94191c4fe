"""`sfdd train-draft`"""

import json as json_format
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sfdd.artifacts import DEFAULT_RUN
from sfdd.errors import OutOfTimeError, UsageError
from sfdd.training.config import TrainConfig

from . import display, options, ranks

if TYPE_CHECKING:
    from sfdd.training.report import TrainReport

_DEFAULT = TrainConfig()


def train_draft(
    data: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files, saved data sets or hub ids; default: the distilled data of the run.",
            show_default=False,
        ),
    ] = None,
    target: options.OptionalTarget = _DEFAULT.target,
    run: options.Run = DEFAULT_RUN,
    format: options.Format = None,
    reasoning: options.ReasoningAsScored = None,
    rewritten: options.RewrittenAsScored = None,
    last_turn_only: options.LastTurnOnlyAsScored = None,
    method: Annotated[
        str, typer.Option(help="eagle (EAGLE-1 and -2) or eagle3.")
    ] = _DEFAULT.method,
    aux_layers: Annotated[
        str | None,
        typer.Option(
            help="The target's layers that eagle3 reads, such as 2,15,27: states after so many layers.",
            show_default="2, n/2, n-3 of n",
        ),
    ] = None,
    draft_vocab_size: Annotated[
        int, typer.Option(help="Tokens eagle3 can draft: the most frequent supervised ones.")
    ] = _DEFAULT.draft_vocab_size,
    ttt_steps: Annotated[
        int | None,
        typer.Option(
            help="Draft steps trained at every position (training-time test).",
            show_default="eagle3: 7, eagle: 1",
        ),
    ] = _DEFAULT.ttt_steps,
    loss: Annotated[
        str,
        typer.Option(
            help="Distance from the target's distribution: kl, tv (total variation) or lk (both)."
        ),
    ] = _DEFAULT.loss,
    token_weight: Annotated[
        str,
        typer.Option(
            help="Weight of a token's loss: none, or flatness, as 'sfdd score --token-scores' stored it."
        ),
    ] = _DEFAULT.token_weight,
    epochs: Annotated[int, typer.Option(help="Times the data are read.")] = _DEFAULT.epochs,
    max_steps: Annotated[
        int | None, typer.Option(help="Stop after so many steps, even within an epoch.")
    ] = _DEFAULT.max_steps,
    max_hours: Annotated[
        float | None,
        typer.Option(help="Leave a checkpoint and stop after so many hours, with exit code 124."),
    ] = _DEFAULT.max_hours,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="Highest learning rate, at the end of the warm-up.",
            show_default="1e-3, or 0.576 / hidden size where that is less",
        ),
    ] = _DEFAULT.learning_rate,
    warmup: Annotated[
        float, typer.Option(help="Fraction of the steps to reach it; then it falls linearly.")
    ] = _DEFAULT.warmup,
    batch_tokens: Annotated[
        int, typer.Option(help="Padded tokens per step, over all processes.")
    ] = _DEFAULT.batch_tokens,
    micro_batch_tokens: Annotated[
        int | None,
        typer.Option(help="Padded tokens computed at once.", show_default="all of a step"),
    ] = _DEFAULT.micro_batch_tokens,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens kept of a conversation; longer ones are cut.", show_default="as scored"
        ),
    ] = _DEFAULT.max_length,
    hidden_loss_weight: Annotated[
        float, typer.Option(help="eagle: weight of SmoothL1 on the hidden states.")
    ] = _DEFAULT.hidden_loss_weight,
    token_loss_weight: Annotated[
        float, typer.Option(help="eagle: weight of --loss.")
    ] = _DEFAULT.token_loss_weight,
    noise: Annotated[
        float | None,
        typer.Option(
            help="Width of the uniform noise on the input hidden states.",
            show_default="eagle: 0.2, eagle3: 0",
        ),
    ] = _DEFAULT.noise,
    weight_decay: Annotated[
        float, typer.Option(help="Weight decay of AdamW.")
    ] = _DEFAULT.weight_decay,
    max_grad_norm: Annotated[
        float, typer.Option(help="Longer gradients are clipped to this norm.")
    ] = _DEFAULT.max_grad_norm,
    held_out: Annotated[
        float, typer.Option(help="Fraction of the conversations measured, not trained on.")
    ] = _DEFAULT.held_out,
    measure_every: Annotated[
        int | None,
        typer.Option(
            help="Steps between measurements on what is held out.", show_default="an epoch"
        ),
    ] = _DEFAULT.measure_every,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Directory for the target's hidden states, made once.",
            show_default="computed in the loop",
        ),
    ] = _DEFAULT.cache,
    states_dtype: Annotated[
        str,
        typer.Option(
            help="Hidden states are rounded to bfloat16, float16 or float32; auto: the target's own "
            "if it has 16 bits, else float16."
        ),
    ] = _DEFAULT.states_dtype,
    precision: Annotated[
        str,
        typer.Option(help="Of the drafter's computations: fp32, bf16 or fp16; weights are fp32."),
    ] = _DEFAULT.precision,
    gradient_checkpointing: Annotated[
        bool,
        typer.Option("--gradient-checkpointing", help="Less memory for more computing."),
    ] = _DEFAULT.gradient_checkpointing,
    fsdp: Annotated[
        bool,
        typer.Option("--fsdp", help="Shard the drafter over the processes that torchrun starts."),
    ] = _DEFAULT.fsdp,
    checkpoint_every: Annotated[
        int, typer.Option(help="Steps between checkpoints.")
    ] = _DEFAULT.checkpoint_every,
    keep_checkpoints: Annotated[
        int, typer.Option(help="Newest checkpoints kept; the best one measured stays besides.")
    ] = _DEFAULT.keep_checkpoints,
    tracker: Annotated[
        str, typer.Option(help="tensorboard (files in RUN/tensorboard), wandb or none.")
    ] = _DEFAULT.tracker,
    seed: Annotated[
        int, typer.Option(help="Fixes first weights, order, noise and held-out conversations.")
    ] = _DEFAULT.seed,
    dtype: options.Dtype = _DEFAULT.dtype,
    device: options.Device = _DEFAULT.device,
    attn_implementation: options.AttnImplementation = None,
    trust_remote_code: options.TrustRemoteCode = False,
    overwrite: options.Overwrite = False,
    json: options.Json = False,
    config: options.Config = None,
) -> None:
    """Train a drafter for the target, by default on the run's distilled data.

    Writes RUN/drafter. Run again to continue an interrupted training. Several processes train
    together: SFDD_RUN=RUN torchrun --nproc-per-node N --no-python sfdd train-draft …
    """
    settings = TrainConfig(
        target=target,
        data=tuple(data or ()),
        run=run,
        format=format,
        reasoning=reasoning,
        rewritten=rewritten,
        last_turn_only=last_turn_only,
        method=method,
        aux_layers=_layer_ids(aux_layers),
        draft_vocab_size=draft_vocab_size,
        ttt_steps=ttt_steps,
        loss=loss,
        token_weight=token_weight,
        epochs=epochs,
        learning_rate=learning_rate,
        warmup=warmup,
        batch_tokens=batch_tokens,
        micro_batch_tokens=micro_batch_tokens,
        max_length=max_length,
        hidden_loss_weight=hidden_loss_weight,
        token_loss_weight=token_loss_weight,
        noise=noise,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        held_out=held_out,
        cache=cache,
        states_dtype=states_dtype,
        precision=precision,
        gradient_checkpointing=gradient_checkpointing,
        fsdp=fsdp,
        measure_every=measure_every,
        checkpoint_every=checkpoint_every,
        keep_checkpoints=keep_checkpoints,
        max_steps=max_steps,
        max_hours=max_hours,
        tracker=tracker,
        seed=seed,
        dtype=dtype,
        device=device,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        overwrite=overwrite,
    )
    is_first = ranks.is_first()
    with display.progress() if is_first else ranks.in_the_background() as on_progress:
        from sfdd.training.run import train

        report = train(settings, on_progress)
    if not is_first:
        return
    if report.already_finished:
        typer.echo("Nothing to do: this training is finished already.", err=True)
    if json:
        print(json_format.dumps(report.to_json()))
    else:
        done = "Trained" if report.is_finished else "Not finished:"
        display.print_table(f"{done} {report.drafter}", _rows(report))
    if not report.is_finished:
        typer.echo(
            f"Stopped after --max-hours {max_hours:g}, at step {report.steps:,} of "
            f"{report.total_steps:,}: run the same command again to continue.",
            err=True,
        )
        raise typer.Exit(OutOfTimeError.exit_code)
    if report.best_step:
        typer.echo(
            f"The estimated acceptance length was higher after step {report.best_step:,}: its "
            f"checkpoint is kept in {report.drafter}/checkpoints.",
            err=True,
        )
    display.hint("sfdd eval", run)


def _layer_ids(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", text.replace(" ", "")):
        raise UsageError(
            f"--aux-layers is {text!r}; write numbers of layers with commas between, such as 2,15,27."
        )
    return tuple(map(int, text.split(",")))


def _rows(report: "TrainReport") -> dict[str, str]:
    rows = {
        "method": report.method,
        "conversations": f"{report.conversations:,}",
        "held out": f"{report.held_out_conversations:,}",
        "skipped": display.counted(sum(report.skipped.values()), report.skipped),
        "truncated": f"{report.truncated:,}",
        "steps": f"{report.steps:,} in {report.epochs} epochs",
        "tokens": f"{report.tokens:,}, {report.supervised_tokens:,} supervised",
        "training loss": f"{report.first_loss:.4f} -> {report.last_loss:.4f}",
    }
    if report.draft_vocab_size:
        rows["draft vocabulary"] = f"{report.draft_vocab_size:,} tokens"
    before, after = report.held_out_before, report.held_out_after
    if before and after:
        rows["held-out loss"] = f"{before.loss:.4f} -> {after.loss:.4f}"
        rows["held-out top-1 agreement"] = (
            f"{before.top1_agreement:.1%} -> {after.top1_agreement:.1%}"
        )
        rows["held-out tau, estimated"] = (
            f"{before.acceptance_length:.2f} -> {after.acceptance_length:.2f} "
            f"of {len(after.agreement)} draft tokens"
        )
    rows["time"] = f"{report.seconds:,.1f} s, {report.tokens_per_second:,.0f} tokens/s"
    return rows
