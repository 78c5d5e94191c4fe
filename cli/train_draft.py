"""`sfdd train-draft`"""

from typing import TYPE_CHECKING, Annotated

import typer

from sfdd.artifacts import DEFAULT_RUN
from sfdd.training.config import TrainConfig

from . import display, options

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
    epochs: Annotated[int, typer.Option(help="Times the data are read.")] = _DEFAULT.epochs,
    max_steps: Annotated[
        int | None, typer.Option(help="Stop after so many steps, even within an epoch.")
    ] = _DEFAULT.max_steps,
    learning_rate: Annotated[
        float, typer.Option(help="Highest learning rate, at the end of the warm-up.")
    ] = _DEFAULT.learning_rate,
    warmup: Annotated[
        float, typer.Option(help="Fraction of the steps to reach it; then it falls linearly.")
    ] = _DEFAULT.warmup,
    batch_tokens: Annotated[
        int, typer.Option(help="Padded tokens per step.")
    ] = _DEFAULT.batch_tokens,
    max_length: Annotated[
        int, typer.Option(help="Tokens kept of a conversation; longer ones are cut.")
    ] = _DEFAULT.max_length,
    hidden_loss_weight: Annotated[
        float, typer.Option(help="Weight of SmoothL1 on the hidden states.")
    ] = _DEFAULT.hidden_loss_weight,
    token_loss_weight: Annotated[
        float, typer.Option(help="Weight of the cross-entropy against the target.")
    ] = _DEFAULT.token_loss_weight,
    noise: Annotated[
        float, typer.Option(help="Width of the uniform noise on the input hidden states.")
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
    checkpoint_every: Annotated[
        int, typer.Option(help="Steps between checkpoints.")
    ] = _DEFAULT.checkpoint_every,
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
    """Train an EAGLE drafter for the target, by default on the run's distilled data.

    Writes RUN/drafter. Run again to continue an interrupted training.
    """
    settings = TrainConfig(
        target=target,
        data=tuple(data or ()),
        run=run,
        format=format,
        reasoning=reasoning,
        rewritten=rewritten,
        last_turn_only=last_turn_only,
        epochs=epochs,
        learning_rate=learning_rate,
        warmup=warmup,
        batch_tokens=batch_tokens,
        max_length=max_length,
        hidden_loss_weight=hidden_loss_weight,
        token_loss_weight=token_loss_weight,
        noise=noise,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        held_out=held_out,
        checkpoint_every=checkpoint_every,
        max_steps=max_steps,
        seed=seed,
        dtype=dtype,
        device=device,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        overwrite=overwrite,
    )
    from sfdd.training.run import train

    with display.progress() as on_progress:
        report = train(settings, on_progress)

    if report.already_finished:
        typer.echo("Nothing to do: this training is finished already.", err=True)
    if json:
        display.print_json(report)
        return
    display.print_table(f"Trained {report.drafter}", _rows(report))
    display.hint("sfdd eval", run)


def _rows(report: "TrainReport") -> dict[str, str]:
    rows = {
        "conversations": f"{report.conversations:,}",
        "held out": f"{report.held_out_conversations:,}",
        "skipped": display.counted(sum(report.skipped.values()), report.skipped),
        "truncated": f"{report.truncated:,}",
        "steps": f"{report.steps:,} in {report.epochs} epochs",
        "tokens": f"{report.tokens:,}, {report.supervised_tokens:,} supervised",
        "training loss": f"{report.first_loss:.4f} -> {report.last_loss:.4f}",
    }
    before, after = report.held_out_before, report.held_out_after
    if before and after:
        rows["held-out loss"] = f"{before.loss:.4f} -> {after.loss:.4f}"
        rows["held-out top-1 agreement"] = (
            f"{before.top1_agreement:.1%} -> {after.top1_agreement:.1%}"
        )
    rows["time"] = f"{report.seconds:,.1f} s, {report.tokens_per_second:,.0f} tokens/s"
    return rows
