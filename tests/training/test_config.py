import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sfdd.drafters import loading
from sfdd.errors import UsageError
from sfdd.training import losses
from sfdd.training.config import LOSSES, METHODS, TrainConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "--epochs is 0; it must be at least 1."),
        ({"max_steps": 0}, "--max-steps is 0; it must be at least 1."),
        ({"measure_every": 0}, "--measure-every is 0; it must be at least 1."),
        ({"checkpoint_every": 0}, "--checkpoint-every is 0; it must be at least 1."),
        ({"keep_checkpoints": 0}, "--keep-checkpoints is 0; it must be at least 1."),
        ({"ttt_steps": 0}, "--ttt-steps is 0; it must be at least 1."),
        ({"draft_vocab_size": 0}, "--draft-vocab-size is 0; it must be at least 1."),
        ({"max_hours": 0.0}, "--max-hours is 0.0; it must be a number above 0."),
        ({"batch_tokens": 1}, "--batch-tokens is 1; it must be at least 2."),
        (
            {"micro_batch_tokens": 8192},
            "--micro-batch-tokens is 8192; it must be at least 2, and no more than the --batch-tokens "
            "of a step, 4096.",
        ),
        ({"method": "medusa"}, "--method is medusa; it must be one of eagle, eagle3."),
        ({"loss": "mse"}, "--loss is mse; it must be one of kl, tv, lk."),
        ({"token_weight": "nll"}, "--token-weight is nll; it must be one of none, flatness."),
        (
            {"states_dtype": "int8"},
            "--states-dtype is int8; it must be one of auto, bfloat16, float16, float32.",
        ),
        ({"precision": "fp8"}, "--precision is fp8; it must be one of fp32, bf16, fp16."),
        ({"tracker": "mlflow"}, "--tracker is mlflow; it must be one of tensorboard, wandb, none."),
        (
            {"aux_layers": (2, 4, 6)},
            "--aux-layers is for --method eagle3, and the method is eagle. Leave one of them out.",
        ),
        (
            {"draft_vocab_size": 100},
            "--draft-vocab-size is for --method eagle3, and the method is eagle. "
            "Leave one of them out.",
        ),
        (
            {"method": "eagle3", "token_loss_weight": 1.0},
            "--token-loss-weight is for --method eagle, and the method is eagle3. "
            "Leave one of them out.",
        ),
        ({"max_length": 2}, "--max-length is 2; it must be at least 3."),
        ({"learning_rate": 0.0}, "--learning-rate is 0.0; it must be a number above 0."),
        ({"learning_rate": math.nan}, "--learning-rate is nan; it must be a number above 0."),
        ({"noise": -0.1}, "--noise is -0.1; it must be 0 or a number above it."),
        ({"held_out": 1.0}, "--held-out is 1.0; it must be at least 0 and below 1."),
        ({"warmup": -0.5}, "--warmup is -0.5; it must be at least 0 and below 1."),
        ({"seed": -1}, "--seed is -1; it must be 0 or above, and below 2**63."),
        (
            {"hidden_loss_weight": 0.0, "token_loss_weight": 0.0},
            "--hidden-loss-weight and --token-loss-weight are both 0, so there is nothing to learn.",
        ),
    ],
)
def test_impossible_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        TrainConfig(**settings)
    assert str(error.value) == message


def test_identity_holds_what_decides_the_weights_and_nothing_else() -> None:
    both = {
        "method",
        "ttt_steps",
        "loss",
        "token_weight",
        "format",
        "reasoning",
        "rewritten",
        "last_turn_only",
        "epochs",
        "learning_rate",
        "warmup",
        "batch_tokens",
        "max_length",
        "states_dtype",
        "precision",
        "noise",
        "weight_decay",
        "max_grad_norm",
        "held_out",
        "max_steps",
        "seed",
    }
    eagle, eagle3 = (TrainConfig(method=method).identity() for method in METHODS)
    assert set(eagle) == both | {"hidden_loss_weight", "token_loss_weight"}
    assert set(eagle3) == both | {"aux_layers", "draft_vocab_size"}


def test_what_is_not_given_is_the_methods() -> None:
    eagle, eagle3 = (TrainConfig(method=method).identity() for method in METHODS)
    assert (eagle["ttt_steps"], eagle["noise"]) == (1, 0.2)
    assert (eagle3["ttt_steps"], eagle3["noise"]) == (7, 0.0)
    given = TrainConfig(method="eagle3", ttt_steps=3, noise=0.1).identity()
    assert (given["ttt_steps"], given["noise"]) == (3, 0.1)


def test_identity_is_the_same_when_it_comes_back_from_json() -> None:
    identity = TrainConfig(method="eagle3", aux_layers=(2, 4, 6), cache=Path("cache")).identity()
    assert json.loads(json.dumps(identity)) == identity


def test_choices_are_those_that_exist() -> None:
    assert METHODS == loading.METHODS
    assert set(LOSSES) == set(losses.LOSSES)


def test_settings_load_without_torch() -> None:
    code = (
        "import sys, sfdd.training.config, sfdd.training.report; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_learning_rate_falls_with_the_width_of_the_target() -> None:
    assert TrainConfig().highest_learning_rate(64) == 1e-3
    assert TrainConfig().highest_learning_rate(576) == 1e-3
    assert TrainConfig().highest_learning_rate(4096) == pytest.approx(1.40625e-4)
    assert TrainConfig(learning_rate=0.5).highest_learning_rate(4096) == 0.5
