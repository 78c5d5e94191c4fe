"""The training loop: step by step, and where it may stop and go on."""

import time
from collections.abc import Mapping, Sequence

from torch import Tensor

from sfdd.artifacts import Provenance, RunDirectory
from sfdd.conversations.conversation import TokenizedConversation
from sfdd.drafters.drafter import Drafter
from sfdd.errors import DrafterError, SfddError, TargetError
from sfdd.progress import Progress, ProgressCallback
from sfdd.targets.transformers_target import TransformersTarget
from sfdd.training.batches import Batch, make_batch
from sfdd.training.checkpoints import LOG, Checkpoints
from sfdd.training.config import TrainConfig
from sfdd.training.distributed import ALONE, Ranks
from sfdd.training.failure import NotFinite
from sfdd.training.learner import Learner
from sfdd.training.log import TrainingLog
from sfdd.training.measuring import held_out_scores, measure_held_out
from sfdd.training.report import TrainReport, loss_at_ends
from sfdd.training.schedule import BatchPlan, learning_rate_factor, uniform_noise
from sfdd.training.states import fault_of_states, states_dtype
from sfdd.training.steps import Step, Steps
from sfdd.training.stopping import Stopping
from sfdd.training.supply import Supply
from sfdd.training.trackers import NoTracker, Tracker


class _OutOfTimeError(Exception):
    """The hours given are over, and a checkpoint is there."""


class Trainer:
    """A training run in progress: the number of steps done, what they left behind, and the log."""

    def __init__(
        self,
        config: TrainConfig,
        target: TransformersTarget,
        drafter: Drafter,
        supply: Supply,
        provenance: Provenance,
        ranks: Ranks = ALONE,
    ) -> None:
        """Start with an untrained drafter, or take up the newest checkpoint.

        Raises:
            ArtifactError: the checkpoint is damaged.
        """
        self.config, self.target, self.supply = config, target, supply
        self.provenance, self.ranks = provenance, ranks
        directory = RunDirectory(config.run).drafter
        self.checkpoints = Checkpoints(directory, config.keep_checkpoints)
        self.plan = BatchPlan(
            [len(c) for c in supply.data.training],
            batch_tokens=config.batch_tokens,
            epochs=config.epochs,
            seed=config.seed,
            max_steps=config.max_steps,
        )
        dealing = (supply.weights, ranks.count, config.tokens_at_once)
        self.steps = Steps(self.plan, supply.data.training, *dealing)
        self._held_out = Step.of(supply.data.held_out, *dealing) if supply.data.held_out else None
        self.step = self.resumed = max(self.checkpoints.steps(), default=0)
        restored = self.checkpoints.restore(self.step, drafter, target) if self.step else None
        self.learner = Learner(drafter, target, config, ranks)
        self._highest_learning_rate = config.highest_learning_rate(target.hidden_size)
        self.log = TrainingLog(directory / LOG, restored.lines if restored else (), ranks.is_first)
        if restored:
            self.learner.restore(restored.moments, self.log.loss_scale)
        dtype = states_dtype(config.states_dtype, target)
        self._kind_of_states = (drafter.aux_layers, dtype)
        self.tracker: Tracker = NoTracker()
        self._tokens = 0  # in this process
        self._stopping = Stopping(ranks, None)

    def run(
        self,
        on_progress: ProgressCallback,
        tracker: Tracker | None = None,
        deadline: float | None = None,
    ) -> None:
        """Train to the end, measuring before, now and then, and at the end; or until time is up.

        Args:
            deadline: by `time.monotonic`.
        """
        every = self.config.measure_every or len(self.steps)
        moments = {*range(0, len(self.steps), every), *self.plan.epoch_ends, len(self.steps)}
        measured_at = moments if self._held_out else set()
        self.tracker = tracker or NoTracker()
        self._stopping = Stopping(self.ranks, deadline)
        with self._stopping:
            try:
                while True:
                    if self.step in measured_at and self.step not in self.log.held_out:
                        self._measure_held_out(on_progress)
                    if self.step == len(self.steps):
                        return
                    self._train_step(on_progress)
                    if self.step % self.config.checkpoint_every == 0 or self.step in moments:
                        self._save_checkpoint()
                    self._stop_if_asked()
            except _OutOfTimeError:
                return

    def report(self) -> TrainReport:
        steps, measured = self.log.steps, self.log.held_out
        first_loss, last_loss = loss_at_ends(steps)
        tokens = sum(line["tokens"] for line in steps)
        vocabulary = self.learner.drafter.draft_to_target
        return TrainReport(
            drafter=self.log.path.parent,
            method=self.config.method,
            steps=self.step,
            total_steps=len(self.steps),
            epochs=self.plan.epoch_of(self.step - 1) + 1,
            conversations=len({c.origin for c in self.supply.data.training}),
            held_out_conversations=len({c.origin for c in self.supply.data.held_out}),
            tokens=tokens,
            supervised_tokens=sum(line["supervised_tokens"] for line in steps),
            first_loss=first_loss,
            last_loss=last_loss,
            held_out_before=measured.get(0),
            held_out_after=measured.get(self.step),
            seconds=self.log.seconds,
            tokens_per_second=tokens / self.log.seconds,
            draft_vocab_size=None if vocabulary is None else len(vocabulary),
            best_step=self._better_than_the_last(),
        )

    def save(self, provenance: Provenance) -> None:
        """Write the drafter as it is now into its directory; every process must ask for it."""
        drafter = self.learner.whole_drafter()
        if self.ranks.is_first:
            drafter.save(self.log.path.parent, provenance)
        self.ranks.wait()

    def _train_step(self, on_progress: ProgressCallback) -> None:
        started = time.perf_counter()
        step = self.steps[self.step]
        sums, norm = self.learner.gradients(step, self._inputs)
        if bad := NotFinite.among(step, sums, norm):
            raise self._stopped_by(bad, f"of step {self.step + 1}")
        factor = learning_rate_factor(self.step, len(self.steps), self.config.warmup)
        learning_rate = self._highest_learning_rate * factor
        self.learner.update(learning_rate)
        self.step += 1
        self.learner.scale.after_step(self.step)
        values = {
            "loss": sums.loss / step.weight,
            **{f"{name}_loss": value / step.weight for name, value in sums.parts.items()},
            "top1_agreement": sums.agreement[0],
            "learning_rate": learning_rate,
            "gradient_norm": norm,
            **self.learner.scale.figures(),
        }
        seconds = time.perf_counter() - started
        self.log.add_step(
            self.step,
            epoch=self.plan.epoch_of(self.step - 1) + 1,
            **values,
            tokens=step.tokens,
            supervised_tokens=step.supervised_tokens,
            seconds=seconds,
        )
        self._track("train", values | {"tokens_per_second": step.tokens / seconds})
        self._tokens += step.tokens
        on_progress(self._progress(values))

    def _inputs(self, step: Step, places: Sequence[int]) -> tuple[Batch, Tensor | None]:
        """What the drafter reads of a micro-batch; what it will read next is fetched meanwhile."""
        batch = self._batch(step.at(places))
        mine = step.dealt[self.ranks.index]
        if places is mine[-1] and self.step + 1 < len(self.steps):
            self.supply.states.expect(self.steps[self.step + 1].micro_batches(self.ranks.index))
        width = self.config.noise_width
        if not width or not places:
            return batch, None
        return batch, uniform_noise(
            batch.hidden_states if batch.aux_states is None else batch.aux_states,
            [len(c) for c in step.at(places)],
            places,
            width=width,
            seed=self.config.seed,
            step=self.step,
        )

    def _batch(self, conversations: Sequence[TokenizedConversation]) -> Batch:
        supply = self.supply
        return make_batch(conversations, supply.weights, supply.states, self.target.device)

    def _measure_held_out(self, on_progress: ProgressCallback) -> None:
        assert self._held_out
        started = time.perf_counter()
        sums = measure_held_out(
            self.learner.objective,
            self._held_out,
            self._batch,
            self.ranks,
            self._stop_if_asked,
            on_progress,
        )
        if bad := NotFinite.among(self._held_out, sums, loss="held-out loss"):
            raise self._stopped_by(bad, f"after step {self.step}")
        scores = held_out_scores(sums, self._held_out.weight)
        self.log.add_held_out(self.step, scores, time.perf_counter() - started)
        agreement = {f"agreement_{k}": rate for k, rate in enumerate(scores.agreement, start=1)}
        self._track(
            "held_out",
            {"loss": scores.loss, **scores.losses, **agreement, "tau": scores.acceptance_length},
        )
        if self.ranks.is_first:
            self.checkpoints.note(self.step, self.log)
            self.checkpoints.prune(self.log.best)

    def _save_checkpoint(self) -> None:
        """Every process must ask for it; one writes."""
        drafter, moments = self.learner.whole_drafter(), self.learner.moments()
        if self.ranks.is_first:
            self.checkpoints.save(self.step, drafter, moments, self.log, self.provenance)
            self.checkpoints.prune(self.log.best)
        self.tracker.flush()

    def _stop_if_asked(self) -> None:
        """Leave with a checkpoint where a signal came or time is up; every process must ask."""
        # At the end too little is left to come back for, and what is not measured cannot be the best.
        reason = self._stopping.reason(progressed=self.resumed < self.step < len(self.steps))
        if not reason:
            return
        if self.step:
            self._save_checkpoint()
        self.ranks.wait()  # one that left earlier might have the others ended before all is saved
        if self._stopping.is_time(reason):
            raise _OutOfTimeError
        self._stopping.give_way(reason)

    def _stopped_by(self, bad: NotFinite, when: str) -> SfddError:
        """Save the state before it happened, and explain."""
        kept = ""
        if self.step:
            try:
                self._save_checkpoint()
                kept = str(self.checkpoints.path(self.step))
            except DrafterError:  # the weights are not finite either
                kept = ""
            self.ranks.wait()
        for conversation in bad.conversations:
            if fault := fault_of_states(self.target, conversation, *self._kind_of_states):
                return TargetError(bad.message(when, kept, fault))
        return DrafterError(bad.message(when, kept))

    def _better_than_the_last(self) -> int | None:
        best, measured = self.log.best, self.log.held_out
        last = measured.get(len(self.steps))
        if best is None or last is None:
            return None
        return best if measured[best].acceptance_length > last.acceptance_length else None

    def _track(self, group: str, values: Mapping[str, float]) -> None:
        self.tracker.add(self.step, {f"{group}/{name}": value for name, value in values.items()})

    def _progress(self, values: Mapping[str, float]) -> Progress:
        figures = {
            "loss": f"{values['loss']:.4g}",
            "agreement": f"{values['top1_agreement']:.1%}",
        }
        if measured := self.log.held_out:
            figures["tau"] = f"{measured[max(measured)].acceptance_length:.2f}"
        return Progress(
            stage="training",
            unit="steps",
            done=self.step,
            total=len(self.steps),
            tokens=self._tokens,
            figures=figures,
            resumed=self.resumed,
        )
