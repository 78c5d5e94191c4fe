"""What `sfdd filter` can be told, and what it does when told nothing."""

from dataclasses import dataclass
from pathlib import Path

from sfdd.artifacts import DEFAULT_RUN
from sfdd.errors import UsageError


@dataclass(frozen=True)
class Metric:
    """A value of a conversation by which to rank: its column, and which end to keep.

    `column` is None where the value is drawn at random.
    """

    column: str | None
    keep_high: bool = True


# Directions as in the paper's comparison: every metric keeps what the target is least sure of.
METRICS = {
    "flatness": Metric("flatness"),
    "entropy": Metric("entropy"),
    "top1": Metric("top1", keep_high=False),
    "margin": Metric("margin", keep_high=False),
    "energy": Metric("energy"),
    "ppl": Metric("nll"),  # exp is monotonic: the order of perplexities is that of the mean nll
    "random": Metric(None),
}


@dataclass(frozen=True)
class FilterConfig:
    """Settings of one selection.

    Attributes:
        keep: fraction of the scored conversations to keep, in (0, 1].
        metric: one of `METRICS`.
        seed: of the metric `random`.
        scores: score table; None is the run's.
        data: where the scored data sets are now, in order; empty is where they were scored.
    """

    keep: float = 0.5
    metric: str = "flatness"
    seed: int = 0
    run: Path = DEFAULT_RUN
    scores: Path | None = None
    data: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise UsageError(
                f"--keep is {self.keep}; it is the fraction to keep, above 0 and at most 1."
            )
        if self.seed < 0:
            raise UsageError(f"--seed is {self.seed}; it must be 0 or above.")
        if self.metric not in METRICS:
            raise UsageError(f"--metric is {self.metric!r}; choose one of {', '.join(METRICS)}.")
