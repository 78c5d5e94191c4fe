"""The processes that train one drafter: how they share a step, and how their sums come together.

`torchrun` or `accelerate launch` starts them; accelerate's PartialState finds out which is which and
lets them meet. The drafter is copied to each (DDP) or sharded over them (FSDP2, `fully_shard`); both are
torch's own, since accelerate knows no FSDP on CPUs, where it is tested. Every process reads and tokenizes
the data by itself and knows all of every step, so nothing but gradients and a few sums is ever sent.
"""

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from sfdd.errors import UsageError

if TYPE_CHECKING:
    from sfdd.training.config import TrainConfig

# How long a process waits for the others. The first one may fill a cache or measure for hours; one that
# died is noticed by whoever started them.
_PATIENCE = timedelta(days=7)
_OTHER_ENGINES = {
    "DeepSpeed": "ACCELERATE_USE_DEEPSPEED",
    "Megatron-LM": "ACCELERATE_USE_MEGATRON_LM",
}


class Ranks:
    """This process among those that train together; by default there is no other.

    Attributes:
        index, count: which of how many it is.
        device: its own; None where the setting of the target decides.
        shards: whether weights and optimizer are sharded over the processes.
    """

    def __init__(
        self,
        index: int = 0,
        count: int = 1,
        device: torch.device | None = None,
        shards: bool = False,
    ) -> None:
        self.index, self.count, self.device, self.shards = index, count, device, shards

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes, saves and prints."""
        return self.index == 0

    def wait(self) -> None:
        """Until all are here."""
        self.total(torch.zeros(1))

    def total(self, values: Tensor) -> Tensor:
        """The sum of every process's values, float64."""
        values = values.to(torch.float64)
        if self.count > 1:
            values = values.to(self.device)
            torch.distributed.all_reduce(values)
        return values.cpu()

    def highest(self, number: int) -> int:
        """The highest of every process's numbers."""
        if self.count == 1:
            return number
        value = torch.tensor([number], device=self.device)
        torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX)
        return int(value)

    def spread(self, module: nn.Module) -> nn.Module:
        """The module as each process trains it; its gradients are means over the processes."""
        if self.count == 1:
            return module
        if self.shards:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            assert self.device is not None
            fully_shard(module, mesh=init_device_mesh(self.device.type, (self.count,)))
            return module
        on_gpu = self.device is not None and self.device.type != "cpu"
        # Buffers are the same everywhere, and nothing may be sent in a forward pass that only measures.
        return nn.parallel.DistributedDataParallel(
            module, device_ids=[self.device] if on_gpu else None, broadcast_buffers=False
        )

    @contextmanager
    def accumulating(self, module: nn.Module, last: bool) -> Iterator[None]:
        """Within it, gradients of a `spread` module stay here, except those of the step's last part."""
        if self.count == 1 or last:
            yield
        elif self.shards:
            module.set_requires_gradient_sync(False)  # type: ignore[operator]
            yield
            module.set_requires_gradient_sync(True)  # type: ignore[operator]
        else:
            with module.no_sync():  # type: ignore[operator]
                yield


ALONE = Ranks()


@contextmanager
def together(config: "TrainConfig", environment: Mapping[str, str] = os.environ) -> Iterator[Ranks]:
    """The processes that were started for this training.

    Raises:
        UsageError: settings that contradict how they were started.
    """
    sharded = config.fsdp or environment.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    _require_what_the_launcher_was_told(config.precision, environment)
    on_cpu = config.device == "cpu" or not torch.cuda.is_available()
    state = _state(on_cpu)
    if state.num_processes == 1:
        if config.fsdp:
            raise UsageError(
                "--fsdp shards the drafter over several processes, and this is one. Start sfdd with "
                "'torchrun --nproc-per-node N', or leave --fsdp out."
            )
        yield ALONE
        return
    try:
        if config.device not in ("auto", "cpu", "cuda"):
            raise UsageError(
                f"--device is {config.device}, but each of several processes has one of its own. "
                "Leave --device out."
            )
        device = torch.device("cpu") if on_cpu else state.device
        yield Ranks(state.process_index, state.num_processes, device, sharded)
    finally:
        # Whatever still refers to the group keeps its threads, which may not outlive the interpreter.
        gc.collect()
        torch.distributed.destroy_process_group()


def _state(on_cpu: bool) -> Any:
    from accelerate import PartialState

    return PartialState(cpu=on_cpu, timeout=_PATIENCE)


def _require_what_the_launcher_was_told(precision: str, environment: Mapping[str, str]) -> None:
    said = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if said not in ("no", precision):
        raise UsageError(
            f"'accelerate launch' was told to use {said}, and --precision is {precision}. Say the same "
            "to both."
        )
    for engine, name in _OTHER_ENGINES.items():
        if environment.get(name, "").lower() == "true":
            raise UsageError(
                f"'accelerate launch' was told to use {engine}, and sfdd trains with DDP or FSDP. Choose "
                "one of these, or start sfdd with 'torchrun'."
            )


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, of which this process may hold a shard; every process must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Of a whole tensor, what this process holds of the parameter that it belongs to."""
    tensor = tensor.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
