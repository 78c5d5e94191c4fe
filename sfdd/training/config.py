"""What `sfdd train-draft` can be told, and what it does when told nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any

from sfdd.artifacts import DEFAULT_RUN
from sfdd.conversations.config import MaskConfig, mask_of
from sfdd.errors import UsageError

EAGLE, EAGLE3 = METHODS = ("eagle", "eagle3")
LOSSES = ("kl", "tv", "lk")
NONE, FLATNESS = TOKEN_WEIGHTS = ("none", "flatness")
STATES_DTYPES = ("auto", "bfloat16", "float16", "float32")
PRECISIONS = ("fp32", "bf16", "fp16")
TRACKERS = ("tensorboard", "wandb", "none")

# Settings that do not change the weights that come out, or no more than the order of a sum does: a run
# may be continued with other values.
_FREE_TO_CHANGE = frozenset(
    {"data", "target", "run", "cache", "measure_every", "checkpoint_every", "keep_checkpoints"}
    | {"max_hours", "micro_batch_tokens", "gradient_checkpointing", "fsdp", "tracker"}
    | {"device", "dtype", "attn_implementation", "trust_remote_code", "overwrite"}
)
_CHOICES = {
    "method": METHODS,
    "loss": LOSSES,
    "token_weight": TOKEN_WEIGHTS,
    "states_dtype": STATES_DTYPES,
    "precision": PRECISIONS,
    "tracker": TRACKERS,
}
# What only one method has: said to the other, it is a mistake.
_ONLY_FOR = {
    EAGLE: ("hidden_loss_weight", "token_loss_weight"),
    EAGLE3: ("aux_layers", "draft_vocab_size"),
}
_TTT_STEPS = {EAGLE: 1, EAGLE3: 7}
_NOISE = {EAGLE: 0.2, EAGLE3: 0.0}


@dataclass(frozen=True)
class TrainConfig:
    """Settings of one training run.

    Loss weights and noise of `eagle` are those of EAGLE, arXiv 2401.15077; steps and vocabulary of
    `eagle3` those of EAGLE-3, arXiv 2503.01840.

    Attributes:
        target: local directory, GGUF file, hub id, or `smollm2`; None for the run's own.
        data: files, saved data sets or hub ids; none for the run's distilled data.
        aux_layers: the target's layers that `eagle3` reads; None for a low, a middle and a high one.
        draft_vocab_size: tokens that `eagle3` can draft: the most frequent supervised ones of the
            training data, and no more than there are distinct ones.
        ttt_steps: draft steps trained at every position (training-time test); None for 7 of `eagle3`
            and 1 of `eagle`.
        loss: distance from the target's distribution: kl, tv (total variation) or lk.
        token_weight: weight of each token's loss: `none` for 1, `flatness` for the scored one.
        learning_rate: the highest; None for 1e-3, and less of targets wider than 576.
        warmup: fraction of the steps over which the learning rate rises to `learning_rate`; it falls
            linearly to zero over the rest.
        batch_tokens: padded tokens of an optimizer step, over all processes; a longer conversation is a
            step of its own.
        micro_batch_tokens: padded tokens computed at once; None for all of a process's share.
        format, reasoning, rewritten, last_turn_only: as in `MaskConfig`; None for what the run was
            scored with.
        max_length: tokens kept of a conversation; a longer one is cut there. None for what the run was
            scored with.
        hidden_loss_weight: weight of SmoothL1(predicted, target hidden state).
        token_loss_weight: weight of `loss`.
        noise: width of the uniform noise on the input hidden states of a 512-token conversation; None
            for 0.2 of `eagle` and 0 of `eagle3`.
        held_out: fraction of the conversations measured and never trained on.
        cache: directory of hidden states, made on first use; None to compute them in the loop.
        states_dtype: what hidden states are rounded to, cached or not; `auto` for the target's dtype if
            that has 16 bits, else float16, which is the finer one. Where float16 overflows, it does so
            from the first tokens on, and says so.
        precision: of the drafter's forward and backward pass; weights and optimizer are float32.
        gradient_checkpointing: compute each draft step a second time rather than keep what is in it.
        fsdp: shard weights and optimizer over the processes.
        measure_every: steps between two measurements on the held-out conversations, besides those before
            training and after every epoch; each leaves a checkpoint.
        checkpoint_every: steps between two checkpoints.
        keep_checkpoints: how many are kept, the newest; the best one measured stays besides.
        max_steps: stop after so many steps even if epochs are left; the learning rate decays to that.
        max_hours: leave a checkpoint and stop after so much time.
        tracker: where the course of the training goes besides training_log.jsonl.
        overwrite: start again instead of continuing or refusing.
    """

    target: str | None = None
    data: tuple[str, ...] = ()
    run: Path = DEFAULT_RUN
    method: str = EAGLE
    aux_layers: tuple[int, ...] | None = None
    draft_vocab_size: int = 32000
    ttt_steps: int | None = None
    loss: str = "kl"
    token_weight: str = NONE
    format: str | None = None
    reasoning: str | None = None
    rewritten: str | None = None
    last_turn_only: bool | None = None
    epochs: int = 3
    learning_rate: float | None = None
    warmup: float = 0.05
    batch_tokens: int = 4096
    micro_batch_tokens: int | None = None
    max_length: int | None = None
    hidden_loss_weight: float = 1.0
    token_loss_weight: float = 0.1
    noise: float | None = None
    weight_decay: float = 0.01
    max_grad_norm: float = 0.5
    held_out: float = 0.05
    cache: Path | None = None
    states_dtype: str = "auto"
    precision: str = "fp32"
    gradient_checkpointing: bool = False
    fsdp: bool = False
    measure_every: int | None = None
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    max_steps: int | None = None
    max_hours: float | None = None
    tracker: str = "tensorboard"
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        _ = self.mask  # checks its own part
        for name, known in _CHOICES.items():
            self._require(name, getattr(self, name) in known, f"one of {', '.join(known)}")
        for name in ("epochs", "checkpoint_every", "keep_checkpoints", "draft_vocab_size"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("max_steps", "ttt_steps", "measure_every"):
            self._require_if_given(name, lambda value: value >= 1, "at least 1")
        self._require("batch_tokens", self.batch_tokens >= 2, "at least 2")
        self._require_if_given(
            "micro_batch_tokens",
            lambda value: 2 <= value <= self.batch_tokens,
            f"at least 2, and no more than the --batch-tokens of a step, {self.batch_tokens}",
        )
        # A drafter reads one token ahead of the first hidden state and predicts the one after it.
        self._require_if_given("max_length", lambda value: value >= 3, "at least 3")
        for name in ("learning_rate", "max_grad_norm", "max_hours"):
            self._require_if_given(name, lambda x: isfinite(x) and x > 0, "a number above 0")
        for name in ("hidden_loss_weight", "token_loss_weight", "noise", "weight_decay"):
            self._require_if_given(name, lambda x: isfinite(x) and x >= 0, "0 or a number above it")
        for name in ("warmup", "held_out"):
            self._require(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        self._require("seed", 0 <= self.seed < 2**63, "0 or above, and below 2**63")
        if self.hidden_loss_weight == self.token_loss_weight == 0:
            raise UsageError(
                "--hidden-loss-weight and --token-loss-weight are both 0, so there is nothing to learn."
            )
        self._refuse_what_the_other_method_has()

    def _refuse_what_the_other_method_has(self) -> None:
        for method, names in _ONLY_FOR.items():
            for name in names:
                default = type(self).__dataclass_fields__[name].default
                if method != self.method and getattr(self, name) != default:
                    raise UsageError(
                        f"{_option(name)} is for --method {method}, and the method is {self.method}. "
                        "Leave one of them out."
                    )

    @property
    def mask(self) -> MaskConfig:
        """What is read of a record, and which tokens are supervised."""
        return mask_of(self)

    def _require(self, name: str, condition: bool, wanted: str) -> None:
        if not condition:
            raise UsageError(f"{_option(name)} is {getattr(self, name)}; it must be {wanted}.")

    def _require_if_given(self, name: str, holds: Any, wanted: str) -> None:
        value = getattr(self, name)
        self._require(name, value is None or holds(value), wanted)

    @property
    def trained_steps(self) -> int:
        """`ttt_steps`, or the method's."""
        return self.ttt_steps or _TTT_STEPS[self.method]

    @property
    def noise_width(self) -> float:
        """`noise`, or the method's."""
        return _NOISE[self.method] if self.noise is None else self.noise

    def highest_learning_rate(self, hidden_size: int) -> float:
        """`learning_rate`, or what suits a target of that hidden size.

        1e-3 was found best for SmolLM2, of 576. A sum over H inputs moves by H steps of Adam, so it
        falls with 1/H (Tensor Programs V, arXiv 2203.03466, table 3): 1.4e-4 for 4096, near the 1e-4
        of SpecForge's examples.
        """
        return self.learning_rate or min(1e-3, 0.576 / hidden_size)

    @property
    def tokens_at_once(self) -> int:
        """`micro_batch_tokens`, or all of a step."""
        return self.micro_batch_tokens or self.batch_tokens

    def identity(self) -> Mapping[str, Any]:
        """The settings that must be equal for a run to be continued."""
        not_its_own = {
            name for method in METHODS if method != self.method for name in _ONLY_FOR[method]
        }
        settings = self.to_json() | {"ttt_steps": self.trained_steps, "noise": self.noise_width}
        return {
            name: value
            for name, value in settings.items()
            if name not in _FREE_TO_CHANGE | not_its_own
        }

    def to_json(self) -> dict[str, Any]:
        """Every setting, as JSON values."""
        return {field.name: _json(getattr(self, field.name)) for field in fields(self)}


def _json(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
