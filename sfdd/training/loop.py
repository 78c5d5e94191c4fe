"""The training loop: step by step, and where it may stop and go on."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from sfdd.artifacts import Provenance, RunDirectory
from sfdd.conversations.conversation import TokenizedConversation
from sfdd.drafters.eagle import EagleDrafter
from sfdd.errors import DrafterError
from sfdd.progress import Progress, ProgressCallback
from sfdd.targets.transformers_target import TransformersTarget
from sfdd.training.batches import DraftBatch, draft_batch, pad
from sfdd.training.checkpoints import LOG, Checkpoints
from sfdd.training.config import TrainConfig
from sfdd.training.data import Split
from sfdd.training.log import TrainingLog
from sfdd.training.losses import DraftLosses, draft_losses
from sfdd.training.report import HeldOutScores, TrainReport, loss_at_ends
from sfdd.training.schedule import BatchPlan, cut, learning_rate_factor, uniform_noise

_BETAS = (0.9, 0.95)  # of AdamW, as in EAGLE
_REMEDY = (
    "Lower --learning-rate, use --dtype float32, or remove the conversations, and start again with "
    "--overwrite."
)
_IDS_NAMED = 8  # conversations named in a message


@dataclass(frozen=True)
class _Means:
    """Sums over batches of what is averaged over supervised tokens."""

    hidden: float = 0.0
    token: float = 0.0
    top1: float = 0.0
    count: int = 0

    def plus(self, losses: DraftLosses, count: int) -> "_Means":
        return _Means(
            self.hidden + losses.hidden.item() * count,
            self.token + losses.token.item() * count,
            self.top1 + losses.top1_agreement.item() * count,
            self.count + count,
        )


class Trainer:
    """A training run in progress: a drafter, its optimizer, the number of steps done, and the log."""

    def __init__(
        self,
        config: TrainConfig,
        target: TransformersTarget,
        data: Split,
        provenance: Provenance,
    ) -> None:
        self.config, self.target, self.data, self.provenance = config, target, data, provenance
        directory = RunDirectory(config.run).drafter
        self.checkpoints = Checkpoints(directory)
        # Evaluation mode: dropout would draw random numbers that a checkpoint does not hold.
        self.drafter = EagleDrafter.for_target(target, config.seed).eval()
        self.optimizer = torch.optim.AdamW(
            self.drafter.parameters(),
            lr=config.learning_rate,
            betas=_BETAS,
            weight_decay=config.weight_decay,
        )
        self.plan = BatchPlan(
            [len(c) for c in data.training],
            batch_tokens=config.batch_tokens,
            epochs=config.epochs,
            seed=config.seed,
            max_steps=config.max_steps,
        )
        steps = self.checkpoints.steps()
        self.step = self.resumed = steps[-1] if steps else 0
        lines = (
            self.checkpoints.restore(self.step, self.drafter, self.optimizer, target)
            if steps
            else ()
        )
        self.log = TrainingLog(directory / LOG, lines)
        self._tokens = 0  # in this process
        self._between_steps = True

    def run(self, on_progress: ProgressCallback) -> None:
        """Train to the end, measuring before, after every epoch and at the end."""
        total = self.plan.total_steps
        to_measure = {0, *self.plan.epoch_ends, total} if self.data.held_out else set()
        to_measure -= set(self.log.held_out)
        try:
            while True:
                if self.step in to_measure:
                    self._measure_held_out(on_progress)
                if self.step == total:
                    return
                self._train_step(on_progress)
                if self.step % self.config.checkpoint_every == 0 or self.step == total:
                    self._save_checkpoint()
        except KeyboardInterrupt:
            # Within an update the weights are neither those of this step nor of the next.
            if self._between_steps and self.step:
                self._save_checkpoint()
            raise

    def report(self) -> TrainReport:
        steps = self.log.steps
        first_loss, last_loss = loss_at_ends(steps)
        tokens = sum(line["tokens"] for line in steps)
        return TrainReport(
            drafter=self.log.path.parent,
            steps=self.step,
            epochs=self.plan.epoch_of(self.step - 1) + 1,
            conversations=len({c.origin for c in self.data.training}),
            held_out_conversations=len({c.origin for c in self.data.held_out}),
            tokens=tokens,
            supervised_tokens=sum(line["supervised_tokens"] for line in steps),
            first_loss=first_loss,
            last_loss=last_loss,
            held_out_before=self.log.held_out.get(0),
            held_out_after=self.log.held_out.get(self.step),
            seconds=self.log.seconds,
            tokens_per_second=tokens / self.log.seconds,
        )

    def _train_step(self, on_progress: ProgressCallback) -> None:
        started = time.perf_counter()
        conversations = [self.data.training[i] for i in self.plan.batch(self.step)]
        batch = self._draft_batch(conversations)
        losses = self._losses(batch.with_noise(self._noise(batch, conversations)))
        loss = self._total(losses)
        norm = self._backward(loss)
        _require_finite(loss, norm, self.step, conversations)
        learning_rate = self._set_learning_rate()

        self._between_steps = False
        self.optimizer.step()
        self.step += 1
        self.log.add_step(
            self.step,
            epoch=self.plan.epoch_of(self.step - 1) + 1,
            loss=loss.item(),
            hidden_loss=losses.hidden.item(),
            token_loss=losses.token.item(),
            top1_agreement=losses.top1_agreement.item(),
            learning_rate=learning_rate,
            gradient_norm=norm.item(),
            tokens=sum(map(len, conversations)),
            supervised_tokens=int(batch.mask.sum()),
            seconds=time.perf_counter() - started,
        )
        self._between_steps = True
        self._tokens += sum(map(len, conversations))
        on_progress(self._progress(loss, losses))

    def _noise(
        self, batch: DraftBatch, conversations: Sequence[TokenizedConversation]
    ) -> Tensor:  # [B, T-2, H]
        lengths = torch.tensor([len(c) for c in conversations])
        width, seed = self.config.noise, self.config.seed
        return uniform_noise(batch.hidden_states, lengths, width=width, seed=seed, step=self.step)

    def _backward(self, loss: Tensor) -> Tensor:
        """Gradients of the drafter, clipped; gives their norm before that."""
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        return clip_grad_norm_(self.drafter.parameters(), self.config.max_grad_norm)

    def _set_learning_rate(self) -> float:
        factor = learning_rate_factor(self.step, self.plan.total_steps, self.config.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * factor
        return self.config.learning_rate * factor

    def _draft_batch(self, conversations: Sequence[TokenizedConversation]) -> DraftBatch:
        """The target's view of some conversations, in float32."""
        tokens = pad(conversations, self.target.device)
        # Not inference_mode: autograd keeps these tensors for the backward pass.
        with torch.no_grad():
            hidden = self.target.hidden_states(tokens.input_ids).float()  # [B, T, H]
            return draft_batch(tokens.input_ids, tokens.loss_mask, hidden, self.target.embedding)

    def _losses(self, batch: DraftBatch) -> DraftLosses:
        predicted = self.drafter(batch.embeddings, batch.hidden_states)  # [B, T-2, H]
        return draft_losses(
            predicted[batch.mask],
            batch.target_states[batch.mask],
            self.target.logits,
            self.target.rows_per_chunk,
        )

    def _total(self, losses: DraftLosses) -> Tensor:
        return losses.total(self.config.hidden_loss_weight, self.config.token_loss_weight)

    def _measure_held_out(self, on_progress: ProgressCallback) -> None:
        held_out, started = self.data.held_out, time.perf_counter()
        lengths = [len(c) for c in held_out]
        order = sorted(range(len(held_out)), key=lengths.__getitem__)
        means, done, tokens = _Means(), 0, 0
        for rows in cut(order, lengths, self.config.batch_tokens):
            with torch.no_grad():
                batch = self._draft_batch([held_out[i] for i in rows])
                means = means.plus(self._losses(batch), int(batch.mask.sum()))
            done, tokens = done + len(rows), tokens + sum(lengths[i] for i in rows)
            on_progress(Progress("held-out", "conversations", done, len(held_out), tokens))
        hidden, token = means.hidden / means.count, means.token / means.count
        config = self.config
        scores = HeldOutScores(
            loss=config.hidden_loss_weight * hidden + config.token_loss_weight * token,
            hidden_loss=hidden,
            token_loss=token,
            top1_agreement=means.top1 / means.count,
        )
        if not isfinite(scores.loss):
            raise DrafterError(
                f"Training stopped: the held-out loss after step {self.step} is {scores.loss}. {_REMEDY}"
            )
        self.log.add_held_out(self.step, scores, time.perf_counter() - started)

    def _save_checkpoint(self) -> None:
        self.checkpoints.save(self.step, self.drafter, self.optimizer, self.log, self.provenance)

    def _progress(self, loss: Tensor, losses: DraftLosses) -> Progress:
        return Progress(
            stage="training",
            unit="steps",
            done=self.step,
            total=self.plan.total_steps,
            tokens=self._tokens,
            figures={
                "loss": f"{loss.item():.4g}",
                "agreement": f"{losses.top1_agreement.item():.1%}",
            },
            resumed=self.resumed,
        )


def _require_finite(
    loss: Tensor, norm: Tensor, step: int, conversations: Sequence[TokenizedConversation]
) -> None:
    for name, value in (("loss", loss), ("gradient", norm)):
        if not torch.isfinite(value):
            few = ", ".join(c.id for c in conversations[:_IDS_NAMED])
            more = len(conversations) - _IDS_NAMED
            ids = f"{few} and {more} more" if more > 0 else few
            raise DrafterError(
                f"Training stopped: the {name} of step {step + 1} is {value.item()}, "
                f"in the conversations {ids}. {_REMEDY}"
            )
