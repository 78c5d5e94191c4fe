"""Half precision where it is asked for: which operations, and how small gradients survive float16."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FIRST_SCALE = 2.0**16
_GROWS_EVERY = 2000  # steps


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Within it, torch's autocast chooses which operations are done in half precision."""
    if precision not in _DTYPES:
        return nullcontext()
    return torch.autocast(device.type, _DTYPES[precision])


class LossScale:
    """What a float16 loss is multiplied by, so that its small gradients do not vanish.

    A step whose gradients overflow is done again with half of it, so none is lost; every so many steps it
    doubles. It is a function of the step and of the value at the step before, which the log holds.
    """

    def __init__(self, precision: str) -> None:
        self.is_used = precision == "fp16"
        self.value = _FIRST_SCALE if self.is_used else 1.0

    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divide the gradients by it."""
        if self.is_used:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(self.value)

    def lower(self) -> bool:
        """Halve it; False where that cannot help."""
        if not self.is_used or self.value <= 1:
            return False
        self.value /= 2
        return True

    def after_step(self, step: int) -> None:
        """Grow now and then, as the numbers may have become smaller."""
        if self.is_used and step % _GROWS_EVERY == 0:
            self.value *= 2

    def figures(self) -> dict[str, float]:
        """What to log of it."""
        return {"loss_scale": self.value} if self.is_used else {}
