"""A drafter and its optimizer, in one process or spread over several, and what a step does to them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from math import isfinite
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from sfdd.drafters.drafter import Drafter, TargetHead
from sfdd.training.batches import Batch
from sfdd.training.checkpoints import moments_of, set_moments
from sfdd.training.config import TrainConfig
from sfdd.training.distributed import Ranks, whole
from sfdd.training.module import Objective, Sums, add_up
from sfdd.training.objectives import LossConfig
from sfdd.training.precision import LossScale
from sfdd.training.steps import Step

_BETAS = (0.9, 0.95)  # of AdamW, as in EAGLE

# A step and the places of a micro-batch in it -> what the drafter reads, and noise on its states if any.
Inputs: TypeAlias = Callable[[Step, Sequence[int]], tuple[Batch, Tensor | None]]


class Learner:
    """A drafter that learns.

    Attributes:
        objective: the drafter's loss; called in every process or in none.
    """

    def __init__(
        self, drafter: Drafter, target: TargetHead, config: TrainConfig, ranks: Ranks
    ) -> None:
        """Take over an untrained drafter; `restore` continues."""
        losses = LossConfig(
            ttt_steps=config.trained_steps,
            loss=config.loss,
            hidden_weight=config.hidden_loss_weight,
            token_weight=config.token_loss_weight,
            gradient_checkpointing=config.gradient_checkpointing,
        )
        self._ranks, self._max_grad_norm = ranks, config.max_grad_norm
        # What is saved of a drafter whose weights are shards.
        self._copy = deepcopy(drafter).cpu() if ranks.shards else drafter
        # Evaluation mode: dropout would draw random numbers that a checkpoint does not hold.
        self.drafter = drafter.eval()
        self.objective = ranks.spread(Objective(drafter, target, losses, config.precision))
        self.optimizer = torch.optim.AdamW(
            drafter.parameters(),
            betas=_BETAS,
            weight_decay=config.weight_decay,
        )
        self.scale = LossScale(config.precision)

    def gradients(self, step: Step, inputs: Inputs) -> tuple[Sums, float]:
        """Those of the mean loss of a step, clipped, in every process the same.

        Returns:
            What the step's micro-batches gave, and the norm of the gradient before it was clipped. They
            may not be finite; then the drafter is as it was.
        """
        while True:
            self.optimizer.zero_grad()
            sums = add_up(list(self._forward_and_backward(step, inputs)), self._ranks)
            self.scale.unscale(self.drafter.parameters())
            norm = whole(clip_grad_norm_(self.drafter.parameters(), self._max_grad_norm)).item()
            if isfinite(norm) or not isfinite(sums.loss) or not self.scale.lower():
                return sums, norm

    def _forward_and_backward(self, step: Step, inputs: Inputs) -> Iterator[Mapping[str, Any]]:
        # Gradients come together as means over the processes, and are to be sums.
        factor = self.scale.value * self._ranks.count / step.weight
        mine = step.dealt[self._ranks.index]
        for number, places in enumerate(mine, start=1):
            batch, noise = inputs(step, places)
            with self._ranks.accumulating(self.objective, last=number == len(mine)):
                sums = self.objective(batch, noise)
                (sums["total"] * factor).backward()
            yield sums | {"total": sums["total"].detach()}

    def update(self, learning_rate: float) -> None:
        """Change the weights by the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()

    def whole_drafter(self) -> Drafter:
        """The drafter to save; every process must ask for it."""
        if self._ranks.shards:
            state = {name: whole(tensor) for name, tensor in self.drafter.state_dict().items()}
            self._copy.load_state_dict(state)
        return self._copy

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's state to save; every process must ask for it."""
        return moments_of(self.drafter, self.optimizer)

    def restore(self, moments: Mapping[str, Tensor], loss_scale: float) -> None:
        """Continue with the optimizer's state of a checkpoint; the drafter has its weights already."""
        set_moments(self.drafter, self.optimizer, moments)
        self.scale.value = loss_scale
