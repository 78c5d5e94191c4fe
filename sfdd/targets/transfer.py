"""Tensors to a GPU and back from it, without waiting where nobody has to."""

from collections.abc import Callable

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; to a GPU from pinned memory, so that nobody waits for it."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def fetching(values: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor to the CPU; the call returned waits until it is there."""
    if values.device.type != "cuda":
        return values.cpu
    fetched = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    fetched.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()

    def fetch() -> Tensor:
        arrived.synchronize()
        return fetched

    return fetch
