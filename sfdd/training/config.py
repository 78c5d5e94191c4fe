"""What `sfdd train-draft` can be told, and what it does when told nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any

from sfdd.artifacts import DEFAULT_RUN
from sfdd.conversations.config import MaskConfig, mask_of
from sfdd.errors import UsageError

# Settings that do not change the weights that come out: a run may be continued with other values.
_FREE_TO_CHANGE = frozenset(
    {"data", "target", "run", "checkpoint_every", "device", "dtype", "attn_implementation"}
    | {"trust_remote_code", "overwrite"}
)


@dataclass(frozen=True)
class TrainConfig:
    """Settings of one training run. Loss weights and noise are those of EAGLE, arXiv 2401.15077.

    Attributes:
        target: local directory, GGUF file, hub id, or `smollm2`; None for the run's own.
        data: files, saved data sets or hub ids; none for the run's distilled data.
        warmup: fraction of the steps over which the learning rate rises to `learning_rate`; it falls
            linearly to zero over the rest.
        batch_tokens: padded tokens per step; a longer conversation is a batch of its own.
        format, reasoning, rewritten, last_turn_only: as in `MaskConfig`; None for what the run was
            scored with.
        max_length: tokens kept of a conversation; a longer one is cut there.
        hidden_loss_weight: weight of SmoothL1(predicted, target hidden state).
        token_loss_weight: weight of the cross-entropy against the target's distribution.
        noise: width of the uniform noise on the input hidden states of a 512-token conversation.
        held_out: fraction of the conversations measured and never trained on.
        checkpoint_every: steps between two checkpoints.
        max_steps: stop after so many steps even if epochs are left; the learning rate decays to that.
        overwrite: start again instead of continuing or refusing.
    """

    target: str | None = None
    data: tuple[str, ...] = ()
    run: Path = DEFAULT_RUN
    format: str | None = None
    reasoning: str | None = None
    rewritten: str | None = None
    last_turn_only: bool | None = None
    epochs: int = 3
    learning_rate: float = 1e-3
    warmup: float = 0.05
    batch_tokens: int = 4096
    max_length: int = 2048
    hidden_loss_weight: float = 1.0
    token_loss_weight: float = 0.1
    noise: float = 0.2
    weight_decay: float = 0.01
    max_grad_norm: float = 0.5
    held_out: float = 0.05
    checkpoint_every: int = 100
    max_steps: int | None = None
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        _ = self.mask  # checks its own part
        for name in ("epochs", "checkpoint_every"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        self._require("max_steps", self.max_steps is None or self.max_steps >= 1, "at least 1")
        self._require("batch_tokens", self.batch_tokens >= 2, "at least 2")
        # A drafter reads one token ahead of the first hidden state and predicts the one after it.
        self._require("max_length", self.max_length >= 3, "at least 3")
        for name in ("learning_rate", "max_grad_norm"):
            value = getattr(self, name)
            self._require(name, isfinite(value) and value > 0, "a number above 0")
        for name in ("hidden_loss_weight", "token_loss_weight", "noise", "weight_decay"):
            value = getattr(self, name)
            self._require(name, isfinite(value) and value >= 0, "0 or a number above it")
        for name in ("warmup", "held_out"):
            self._require(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        self._require("seed", 0 <= self.seed < 2**63, "0 or above, and below 2**63")
        if self.hidden_loss_weight == self.token_loss_weight == 0:
            raise UsageError(
                "--hidden-loss-weight and --token-loss-weight are both 0, so there is nothing to learn."
            )

    @property
    def mask(self) -> MaskConfig:
        """What is read of a record, and which tokens are supervised."""
        return mask_of(self)

    def _require(self, name: str, condition: bool, wanted: str) -> None:
        if not condition:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} is {getattr(self, name)}; it must be {wanted}.")

    def identity(self) -> Mapping[str, Any]:
        """The settings that must be equal for a run to be continued."""
        names = (f.name for f in fields(self) if f.name not in _FREE_TO_CHANGE)
        return {name: getattr(self, name) for name in names}

    def to_json(self) -> dict[str, Any]:
        """Every setting, as JSON values."""
        return {
            f.name: str(value) if isinstance(value := getattr(self, f.name), Path) else value
            for f in fields(self)
        }
