"""How a long stage tells the outside what it is doing, without knowing terminals."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True)
class Progress:
    """A moment of a stage: `done` of `total` units, and what to show beside the bar.

    Attributes:
        stage: what is happening, such as "scoring".
        unit: what `done` and `total` count, such as "conversations".
        total: None where it is not known.
        tokens: tokens processed so far in this process, for tokens/s.
        figures: current values, such as {"loss": "0.812"}, already formatted.
        resumed: how many of `done` an earlier process finished; they do not count for speed.
    """

    stage: str
    unit: str
    done: int
    total: int | None = None
    tokens: int = 0
    figures: Mapping[str, str] = field(default_factory=dict)
    resumed: int = 0


ProgressCallback: TypeAlias = Callable[[Progress], None]


def silent(_: Progress) -> None:
    """Report to nobody."""
