"""What an evaluation found: counts that add up, and the ratios derived from them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sfdd.artifacts import Provenance
from sfdd.evaluation.acceptance import AcceptanceStats

DRAFTER = "drafter"
UNTRAINED = "untrained"


@dataclass(frozen=True)
class Speed:
    """Tokens emitted and the wall time they took, the reading of the prompts included."""

    num_tokens: int
    seconds: float

    def __add__(self, other: "Speed") -> "Speed":
        return Speed(self.num_tokens + other.num_tokens, self.seconds + other.seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_tokens": self.num_tokens,
            "seconds": round(self.seconds, 4),
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(frozen=True)
class DrafterResult:
    """One drafter on some prompts.

    Attributes:
        num_identical: prompts whose responses are those of the baseline, token for token; None at
            temperature > 0, where they are different draws from the same distribution.
    """

    speed: Speed
    acceptance: AcceptanceStats
    num_identical: int | None

    def __add__(self, other: "DrafterResult") -> "DrafterResult":
        identical = (self.num_identical, other.num_identical)
        return DrafterResult(
            self.speed + other.speed,
            self.acceptance + other.acceptance,
            None if None in identical else sum(n for n in identical if n is not None),
        )


@dataclass(frozen=True)
class Measurement:
    """The autoregressive baseline and the drafters on the same prompts and histories.

    Attributes:
        num_responses: one per turn.
        drafters: by name, `DRAFTER` and `UNTRAINED`.
    """

    num_prompts: int
    num_responses: int
    baseline: Speed
    drafters: Mapping[str, DrafterResult]

    def __add__(self, other: "Measurement") -> "Measurement":
        return Measurement(
            self.num_prompts + other.num_prompts,
            self.num_responses + other.num_responses,
            self.baseline + other.baseline,
            {name: result + other.drafters[name] for name, result in self.drafters.items()},
        )

    def speedup(self, name: str) -> float:
        """Tokens per second with the drafter / without."""
        return self.drafters[name].speed.tokens_per_second / self.baseline.tokens_per_second

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_prompts": self.num_prompts,
            "num_responses": self.num_responses,
            "baseline": self.baseline.to_dict(),
            **{
                name: result.acceptance.to_dict()
                | result.speed.to_dict()
                | {"speedup": self.speedup(name), "num_identical": result.num_identical}
                for name, result in self.drafters.items()
            },
        }


@dataclass(frozen=True)
class EvalReport:
    """The outcome of `sfdd eval`, overall and by prompt set."""

    overall: Measurement
    sets: Mapping[str, Measurement]
    provenance: Provenance

    def to_json(self) -> str:
        """One object: the overall figures, `sets` where there are several, and `provenance`."""
        sets = {name: measurement.to_dict() for name, measurement in self.sets.items()}
        return json.dumps(
            self.overall.to_dict()
            | ({"sets": sets} if len(sets) > 1 else {})
            | {"provenance": json.loads(self.provenance.to_json())},
            indent=2,
            ensure_ascii=False,
        )
