import math
import subprocess
import sys

import pytest

from sfdd.errors import UsageError
from sfdd.training.config import TrainConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "--epochs is 0; it must be at least 1."),
        ({"max_steps": 0}, "--max-steps is 0; it must be at least 1."),
        ({"checkpoint_every": 0}, "--checkpoint-every is 0; it must be at least 1."),
        ({"batch_tokens": 1}, "--batch-tokens is 1; it must be at least 2."),
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
def test_impossible_settings_are_refused_by_name(settings: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError) as error:
        TrainConfig(**settings)
    assert str(error.value) == message


def test_identity_holds_what_decides_the_weights_and_nothing_else() -> None:
    config = TrainConfig()
    assert set(config.identity()) == {
        "format",
        "reasoning",
        "rewritten",
        "last_turn_only",
        "epochs",
        "learning_rate",
        "warmup",
        "batch_tokens",
        "max_length",
        "hidden_loss_weight",
        "token_loss_weight",
        "noise",
        "weight_decay",
        "max_grad_norm",
        "held_out",
        "max_steps",
        "seed",
    }


def test_settings_load_without_torch() -> None:
    code = (
        "import sys, sfdd.training.config, sfdd.training.report; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
