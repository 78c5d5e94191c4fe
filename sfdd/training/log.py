"""The course of a training run: one JSON line per step and per held-out measurement."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sfdd.artifacts import write_text
from sfdd.errors import ArtifactError
from sfdd.training.report import HeldOutScores

_STEP, _HELD_OUT = "step", "held_out"


class TrainingLog:
    """`training_log.jsonl`, written line by line.

    Checkpoints keep a copy, and a run that continues restores it: a step stands there once.

    Attributes:
        held_out: the measurements, by the number of steps done before them.
    """

    def __init__(
        self, path: Path, lines: Iterable[dict[str, Any]] = (), writes: bool = True
    ) -> None:
        """Start with some lines.

        Args:
            writes: False to keep the lines in memory alone: of several processes one writes.
        """
        self.path, self._writes = path, writes
        self.lines = list(lines)
        self.held_out = {
            line["step"]: HeldOutScores.from_json(line)
            for line in self.lines
            if line["kind"] == _HELD_OUT
        }
        if writes:
            write_text(path, self.to_text())

    @classmethod
    def parse(cls, text: str) -> list[dict[str, Any]]:
        """The lines of a log; raises ValueError where one is not JSON."""
        return [json.loads(line) for line in text.splitlines()]

    def to_text(self) -> str:
        return "".join(json.dumps(line) + "\n" for line in self.lines)

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == _STEP]

    @property
    def best(self) -> int | None:
        """The step after which the estimated acceptance length was highest, the later of equal ones."""
        trained = {step: scores for step, scores in self.held_out.items() if step}
        return max(trained, key=lambda step: (trained[step].acceptance_length, step), default=None)

    @property
    def loss_scale(self) -> float:
        """Of float16 after the last step; see `precision`."""
        return float(self.steps[-1].get("loss_scale", 1.0))

    @property
    def seconds(self) -> float:
        return float(sum(line["seconds"] for line in self.lines))

    def add_step(self, step: int, **values: Any) -> None:
        """Log the step that was the `step`-th, counted from 1."""
        self._append({"kind": _STEP, "step": step, **values})

    def add_held_out(self, step: int, scores: HeldOutScores, seconds: float) -> None:
        """Log a measurement made after `step` steps."""
        self.held_out[step] = scores
        self._append({"kind": _HELD_OUT, "step": step, **scores.to_json(), "seconds": seconds})

    def _append(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        if not self._writes:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise ArtifactError(
                f"Cannot write {self.path}: {error.strerror or error}. "
                "Free the disk and run the same command again; the last checkpoint is kept."
            ) from error
