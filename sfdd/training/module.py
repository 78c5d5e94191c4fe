"""The drafter and its objective as one module, and the sums of all that went through it in a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sfdd.drafters.drafter import Drafter, TargetHead
from sfdd.training.batches import Batch
from sfdd.training.distributed import Ranks
from sfdd.training.objectives import LossConfig, loss_sums, measure
from sfdd.training.precision import autocast


class Objective(nn.Module):
    """`loss_sums` or `measure` of a drafter, as DDP and FSDP can wrap it.

    The target's head is shared and is no part of it.
    """

    def __init__(
        self, drafter: Drafter, target: TargetHead, config: LossConfig, precision: str
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self._target, self._config, self._precision = target, config, precision

    def forward(
        self, batch: Batch, noise: Tensor | None = None, measured_steps: int | None = None
    ) -> Mapping[str, Any]:
        """The fields of `LossSums`: where gradients come from is looked for in dictionaries.

        Args:
            noise: see `loss_sums`.
            measured_steps: measure over so many draft steps, without gradient.
        """
        with autocast(self._precision, batch.input_ids.device):
            if measured_steps:
                sums = measure(self.drafter, batch, self._target, measured_steps, self._config)
            else:
                sums = loss_sums(self.drafter, batch, self._target, self._config, noise)
        return vars(sums)


@dataclass(frozen=True)
class Sums:
    """`LossSums` of all micro-batches of all processes.

    Attributes:
        losses: of each micro-batch; the k-th of process r is the (k * processes + r)-th. [n]
        parts, agreeing, counted: see `LossSums`.
    """

    losses: Tensor
    parts: Mapping[str, float]
    agreeing: Tensor  # [S]
    counted: Tensor  # [S]

    @property
    def loss(self) -> float:
        return float(self.losses.sum())

    @property
    def agreement(self) -> tuple[float, ...]:
        """Share of base positions whose drafts of steps 0 to k all are the target's choice. [S]"""
        return tuple((self.agreeing / self.counted.clamp(min=1)).tolist())

    def first_not_finite(self) -> int | None:
        """Which micro-batch has a loss that is not."""
        bad = (~self.losses.isfinite()).nonzero()
        return int(bad[0]) if len(bad) else None


def add_up(of_each: Sequence[Mapping[str, Any]], ranks: Ranks) -> Sums:
    """Bring together what this process's micro-batches gave, and that of the others."""
    losses = torch.zeros(len(of_each) * ranks.count, dtype=torch.float64)
    losses[ranks.index :: ranks.count] = torch.stack(
        [sums["total"].detach() for sums in of_each]
    ).to(losses)
    names = list(of_each[0]["parts"])
    rows = [
        torch.cat(
            [torch.stack([s["parts"][n] for n in names]).double(), s["agreeing"], s["counted"]]
        )
        for s in of_each
    ]
    sums = ranks.total(torch.cat([losses, torch.stack(rows).sum(0).cpu()]))
    sizes = [len(losses), len(names), len(of_each[0]["agreeing"]), len(of_each[0]["counted"])]
    losses, parts, agreeing, counted = torch.split(sums, sizes)
    return Sums(losses, dict(zip(names, parts.tolist(), strict=True)), agreeing, counted)
