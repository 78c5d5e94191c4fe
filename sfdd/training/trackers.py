"""The course of a training where people watch it: TensorBoard files, or Weights & Biases.

training_log.jsonl holds all of it, and more; a tracker is told the same and never read.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from sfdd.artifacts import write_text
from sfdd.errors import ArtifactError, UsageError

_EVENTS = "events.out.tfevents.*"


class Tracker(Protocol):
    """Something that draws curves."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """The values after so many steps, each under a name such as `train/loss`."""

    def flush(self) -> None:
        """Bring everything to where it will be seen, since what is saved will not be told again."""

    def close(self) -> None:
        """No more will come."""


class NoTracker:
    """Tells nobody."""

    def add(self, step: int, values: Mapping[str, float]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Event files in RUN/tensorboard."""

    def __init__(self, run: Path, resumed: int) -> None:
        from tensorboardX import SummaryWriter

        folder = run / "tensorboard"
        if not resumed:  # curves of an earlier attempt
            for events in folder.glob(_EVENTS):
                events.unlink(missing_ok=True)
        try:
            self._writer = SummaryWriter(
                str(folder),
                purge_step=resumed + 1,
                flush_secs=10,
                filename_suffix=f".after-{resumed}",  # two may start in the same second
            )
        except OSError as error:
            raise ArtifactError(f"Cannot write to {folder}: {error.strerror}.") from error

    def add(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A run of Weights & Biases; a training that is continued continues it."""

    def __init__(self, run: Path, resumed: int, settings: Mapping[str, Any]) -> None:
        wandb = _import_wandb()
        id_file = run / "wandb" / "sfdd-run-id"
        if not (resumed and id_file.is_file()):
            write_text(id_file, uuid4().hex)
        self._run = wandb.init(
            project="sfdd",
            name=run.name,
            id=id_file.read_text(encoding="utf-8"),
            resume="allow",
            dir=str(run),
            config=dict(settings),
        )

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def flush(self) -> None: ...  # wandb sends by itself

    def close(self) -> None:
        self._run.finish()


def require_tracker(name: str) -> None:
    """Raise UsageError, before hours of work, where a tracker is not installed."""
    if name == "wandb":
        _import_wandb()


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise UsageError(
            "--tracker wandb needs the package wandb, which is not installed. Install it with "
            "'pip install wandb', or use --tracker tensorboard."
        ) from error
    return wandb


def start_tracker(name: str, run: Path, resumed: int, settings: Mapping[str, Any]) -> Tracker:
    """The tracker of a training, of which `resumed` steps are done already."""
    if name == "tensorboard":
        return TensorBoardTracker(run, resumed)
    if name == "wandb":
        return WandbTracker(run, resumed, settings)
    return NoTracker()
