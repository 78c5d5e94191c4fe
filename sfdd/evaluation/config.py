"""What `sfdd eval` can be told, and what it does when told nothing."""

import math
from dataclasses import dataclass
from pathlib import Path

from sfdd.artifacts import DEFAULT_RUN
from sfdd.errors import UsageError

# Below it, logits divided by the temperature overflow; 0 is what is meant.
_LOWEST_TEMPERATURE = 1e-3

DEFAULT_PROMPTS = Path("data/eval_prompts.jsonl")


@dataclass(frozen=True)
class EvalConfig:
    """Settings of one evaluation.

    Attributes:
        prompts: JSONL files of prompts; see `sfdd.evaluation.prompts`.
        target: local directory, GGUF file, hub id, or `smollm2`; None: the one the drafter records.
        drafter: drafter directory; None: the one of the run.
        num_speculative_tokens: draft tokens proposed per verification.
        temperature: 0 decodes greedily; above, tokens are drawn from softmax(logits / temperature).
        max_new_tokens: per response.
        seed: of the sampling at temperature > 0 and of the untrained drafter's weights.
        limit: prompts read from each file; None reads all.
        untrained: also measure a freshly initialised drafter of the same kind, the floor of any
            training; without a drafter in the run one of EAGLE is measured alone.
    """

    prompts: tuple[Path, ...]
    target: str | None = None
    drafter: Path | None = None
    run: Path = DEFAULT_RUN
    num_speculative_tokens: int = 5
    temperature: float = 0.0
    max_new_tokens: int = 128
    seed: int = 0
    limit: int | None = None
    untrained: bool = False
    dtype: str = "auto"
    device: str = "auto"
    attn_implementation: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if not self.prompts:
            raise UsageError(
                f"No prompts given, and there is no {DEFAULT_PROMPTS} here. "
                "Name at least one JSONL file of prompts."
            )
        for name in ("num_speculative_tokens", "max_new_tokens", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {value}.")
        if not (self.temperature == 0 or _LOWEST_TEMPERATURE <= self.temperature < math.inf):
            raise UsageError(
                f"--temperature must be 0, or at least {_LOWEST_TEMPERATURE:g}, not {self.temperature}."
            )
        if not 0 <= self.seed < 2**62:
            raise UsageError(f"--seed must be at least 0 and below 2**62, not {self.seed}.")
