"""Checkpoints of a run, whole or not there at all, and what else a drafter directory holds.

    drafter/config.json, model.safetensors, provenance.json   the finished drafter, provenance last
    drafter/training_log.jsonl
    drafter/checkpoints/step-N/                               the newest ones, and the best one measured

A checkpoint is a drafter directory itself, so it can be evaluated, exported and served as it is, plus the
optimizer's moments and the log so far. Nothing else has a state: see `schedule`.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.optim import Optimizer

from sfdd.artifacts import Provenance, atomic_path, write_text
from sfdd.drafters.drafter import Drafter, read_provenance
from sfdd.drafters.loading import load_drafter
from sfdd.errors import ArtifactError, DrafterError
from sfdd.targets.transformers_target import TransformersTarget
from sfdd.training.distributed import part_like, whole
from sfdd.training.log import TrainingLog

LOG = "training_log.jsonl"
_CHECKPOINTS = "checkpoints"
_MOMENTS = (
    "optimizer/moments.safetensors"  # engines load every safetensors file beside the drafter's
)
_DRAFTER = ("provenance.json", "config.json", "model.safetensors")


@dataclass(frozen=True)
class Restored:
    """What a checkpoint holds besides the drafter: the optimizer's moments and the log's lines."""

    moments: Mapping[str, Tensor]
    lines: list[dict[str, object]]


class Checkpoints:
    """The checkpoints of one drafter directory."""

    def __init__(self, drafter: Path, keep: int = 2) -> None:
        self.root, self._keep = drafter / _CHECKPOINTS, keep

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, in order."""
        names = (path.name.removeprefix("step-") for path in self.root.glob("step-*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def path(self, step: int) -> Path:
        return self.root / f"step-{step}"

    def save(
        self,
        step: int,
        drafter: Drafter,
        moments: Mapping[str, Tensor],
        log: TrainingLog,
        provenance: Provenance,
    ) -> None:
        """Write the checkpoint of `step`, if it is not there.

        Args:
            moments: of the optimizer, see `moments_of`.

        Raises:
            ArtifactError: it cannot be written.
            DrafterError: the weights are not finite.
        """
        if step in self.steps():
            return
        self._remove_unfinished()
        staging = self.root / f".step-{step}"
        drafter.save(staging, provenance)
        with atomic_path(staging / _MOMENTS) as temporary:
            temporary.write_bytes(save(dict(moments)))
        write_text(staging / LOG, log.to_text())
        try:
            staging.rename(self.path(step))
        except OSError as error:
            raise ArtifactError(f"Cannot write {self.path(step)}: {error.strerror}.") from error

    def note(self, step: int, log: TrainingLog) -> None:
        """Bring what was measured after `step` into its checkpoint, if there is one."""
        if step in self.steps():
            write_text(self.path(step) / LOG, log.to_text())

    def prune(self, best: int | None) -> None:
        """Remove all but the newest, and the best one."""
        for step in self.steps()[: -self._keep]:
            if step != best:
                shutil.rmtree(self.path(step))

    def restore(self, step: int, drafter: Drafter, target: TransformersTarget) -> Restored:
        """Fill `drafter` from the checkpoint of `step`; gives the rest.

        Raises:
            ArtifactError: the checkpoint is damaged.
        """
        path = self.path(step)
        try:
            saved = load_drafter(path, target)
            moments = load_file(path / _MOMENTS)
            if wanting := set(_moment_names(drafter)) - set(moments):
                raise ValueError(f"{_MOMENTS} lacks {min(wanting)}")
            lines = TrainingLog.parse((path / LOG).read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, SafetensorError, DrafterError) as error:
            raise ArtifactError(
                f"Checkpoint {path} is damaged ({error}). "
                "Delete it to go on from an earlier one, or start again with --overwrite."
            ) from error
        drafter.load_state_dict(saved.state_dict())
        return Restored(moments, lines)

    def remove(self, but: int | None = None) -> None:
        """Remove all checkpoints, except one if it is to stay, and nothing that is not one."""
        self._remove_unfinished()
        for step in self.steps():
            if step != but:
                shutil.rmtree(self.path(step))
        if self.root.is_dir() and not any(self.root.iterdir()):
            self.root.rmdir()

    def _remove_unfinished(self) -> None:
        for path in self.root.glob(".step-*"):
            shutil.rmtree(path)


_MOMENTS_OF_EACH = ("step", "exp_avg", "exp_avg_sq")


def _moment_names(module: nn.Module) -> list[str]:
    return [f"{name}.{key}" for name, _ in module.named_parameters() for key in _MOMENTS_OF_EACH]


def moments_of(module: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The state of an AdamW, on the CPU; every process that has a shard of it must ask for it."""
    return {
        f"{name}.{key}": whole(value).detach().cpu().contiguous()
        for name, parameter in module.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def set_moments(module: nn.Module, optimizer: Optimizer, moments: Mapping[str, Tensor]) -> None:
    """Inverse of `moments_of`."""
    for name, parameter in module.named_parameters():
        optimizer.state[parameter] = {
            "step": moments[f"{name}.step"],  # AdamW keeps it on the CPU
            "exp_avg": part_like(parameter, moments[f"{name}.exp_avg"]),
            "exp_avg_sq": part_like(parameter, moments[f"{name}.exp_avg_sq"]),
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
