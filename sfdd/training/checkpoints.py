"""Checkpoints of a run, whole or not there at all, and what else a drafter directory holds.

    drafter/config.json, model.safetensors, provenance.json   the finished drafter, provenance last
    drafter/training_log.jsonl
    drafter/checkpoints/step-N/                               while it is being trained; the last two

A checkpoint is a drafter directory itself, so it can be evaluated as it is, plus the optimizer's moments
and the log so far. Nothing else has a state: see `schedule`.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from torch.optim import Optimizer

from sfdd.artifacts import Provenance, atomic_path, write_text
from sfdd.drafters.eagle import EagleDrafter, read_provenance
from sfdd.errors import ArtifactError, DrafterError
from sfdd.targets.transformers_target import TransformersTarget
from sfdd.training.log import TrainingLog

LOG = "training_log.jsonl"
_CHECKPOINTS = "checkpoints"
_MOMENTS = "optimizer.safetensors"
_DRAFTER = ("provenance.json", "config.json", "model.safetensors")
_KEEP = 2


class Checkpoints:
    """The checkpoints of one drafter directory."""

    def __init__(self, drafter: Path) -> None:
        self.root = drafter / _CHECKPOINTS

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, in order."""
        names = (path.name.removeprefix("step-") for path in self.root.glob("step-*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def path(self, step: int) -> Path:
        return self.root / f"step-{step}"

    def save(
        self,
        step: int,
        drafter: EagleDrafter,
        optimizer: Optimizer,
        log: TrainingLog,
        provenance: Provenance,
    ) -> None:
        """Write the checkpoint of `step`, then remove all but the last two.

        Raises:
            ArtifactError: it cannot be written.
        """
        if step not in self.steps():
            self._remove_unfinished()
            staging = self.root / f".step-{step}"
            drafter.save(staging, provenance)
            with atomic_path(staging / _MOMENTS) as temporary:
                temporary.write_bytes(save(_moments(drafter, optimizer)))
            write_text(staging / LOG, log.to_text())
            try:
                staging.rename(self.path(step))
            except OSError as error:
                raise ArtifactError(f"Cannot write {self.path(step)}: {error.strerror}.") from error
        for old in self.steps()[:-_KEEP]:
            shutil.rmtree(self.path(old))

    def restore(
        self, step: int, drafter: EagleDrafter, optimizer: Optimizer, target: TransformersTarget
    ) -> list[dict[str, object]]:
        """Fill `drafter` and `optimizer` from the checkpoint of `step`; gives the log's lines.

        Raises:
            ArtifactError: the checkpoint is damaged.
        """
        path = self.path(step)
        try:
            saved = EagleDrafter.load(path, target)
            moments = load_file(path / _MOMENTS)
            _set_moments(drafter, optimizer, moments)
            lines = TrainingLog.parse((path / LOG).read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, SafetensorError, DrafterError) as error:
            raise ArtifactError(
                f"Checkpoint {path} is damaged ({error}). "
                "Delete it to go on from an earlier one, or start again with --overwrite."
            ) from error
        # Not `saved` itself: its config.json does not record how the target computes attention.
        drafter.load_state_dict(saved.state_dict())
        return lines

    def remove(self) -> None:
        """Remove all checkpoints, and nothing that is not one."""
        self._remove_unfinished()
        for step in self.steps():
            shutil.rmtree(self.path(step))
        if self.root.is_dir() and not any(self.root.iterdir()):
            self.root.rmdir()

    def _remove_unfinished(self) -> None:
        for path in self.root.glob(".step-*"):
            shutil.rmtree(path)


def _moments(drafter: EagleDrafter, optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value.detach().cpu().contiguous()
        for name, parameter in drafter.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def _set_moments(
    drafter: EagleDrafter, optimizer: Optimizer, moments: Mapping[str, Tensor]
) -> None:
    for name, parameter in drafter.named_parameters():
        optimizer.state[parameter] = {
            "step": moments[f"{name}.step"],  # AdamW keeps it on the CPU
            "exp_avg": moments[f"{name}.exp_avg"].to(parameter.device),
            "exp_avg_sq": moments[f"{name}.exp_avg_sq"].to(parameter.device),
        }


def is_finished(drafter: Path) -> bool:
    """Whether the directory holds a drafter whose training came to its end."""
    return (drafter / "provenance.json").is_file()


def check_continuable(drafter: Path, provenance: Provenance) -> None:
    """Raise ArtifactError where the directory holds work of other data, settings or target."""
    steps = Checkpoints(drafter).steps()
    if is_finished(drafter):
        found = read_provenance(drafter)
        if "result" not in found.about:
            raise ArtifactError(
                f"{drafter} holds a checkpoint, not the outcome of a training. "
                "Choose another directory with --run, or replace it with --overwrite."
            )
    elif steps:
        found = read_provenance(Checkpoints(drafter).path(steps[-1]))
    elif any((drafter / name).exists() for name in _DRAFTER):
        raise ArtifactError(
            f"{drafter} holds a model that was not trained here. "
            "Choose another directory with --run, or replace it with --overwrite."
        )
    else:
        return
    if differences := found.differences(provenance):
        raise ArtifactError(
            f"{drafter} holds a drafter of another training: {'; '.join(differences)}. "
            "Start again with --overwrite, or train in another directory with --run."
        )


def remove_training(drafter: Path) -> None:
    """Remove what `sfdd train-draft` wrote into the directory, and nothing else."""
    try:
        for name in (*_DRAFTER, LOG):
            (drafter / name).unlink(missing_ok=True)
        Checkpoints(drafter).remove()
    except OSError as error:
        raise ArtifactError(
            f"Cannot remove the old drafter in {drafter}: {error.strerror or error}."
        ) from error
