"""EAGLE's two losses, each a mean over supervised tokens (arXiv 2401.15077, section 4.2).

    hidden = SmoothL1(h', h), averaged over the hidden dimension
    token  = - sum_v softmax(head(h))_v log softmax(head(h'))_v

h is the target's hidden state and h' the drafter's prediction of it; both go through the target's head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Head: TypeAlias = Callable[[Tensor], Tensor]  # [N, H] -> [N, V]


@dataclass(frozen=True)
class DraftLosses:
    """Scalar tensors; only the two losses carry gradients."""

    hidden: Tensor
    token: Tensor
    top1_agreement: Tensor

    def total(self, hidden_weight: float, token_weight: float) -> Tensor:
        return hidden_weight * self.hidden + token_weight * self.token


def draft_losses(predicted: Tensor, target: Tensor, head: Head, rows_per_chunk: int) -> DraftLosses:
    """Losses of the supervised positions.

    Args:
        predicted: float32 [N, H], the drafter's hidden states.
        target: [N, H], the target's.
        head: the target's, frozen: hidden states to logits.
        rows_per_chunk: how many rows go through the head at once; changes nothing but memory.
    """
    target = target.to(predicted.dtype)
    token, agreement = cast(
        tuple[Tensor, Tensor],
        _TokenLoss.apply(predicted, target, head, rows_per_chunk),  # type: ignore[no-untyped-call]
    )
    return DraftLosses(F.smooth_l1_loss(predicted, target), token, agreement)


class _TokenLoss(torch.autograd.Function):
    """Cross-entropy whose gradient is made while its logits are at hand.

    A chunk's logits and probabilities are dropped as soon as they have given the gradient with respect
    to the predicted states, so [N, H] is kept and never [N, V].
    """

    @staticmethod
    def forward(
        ctx: Any, predicted: Tensor, target: Tensor, head: Head, rows_per_chunk: int
    ) -> tuple[Tensor, Tensor]:
        needs_gradient = ctx.needs_input_grad[0]
        gradient = torch.empty_like(predicted) if needs_gradient else None  # [N, H]
        loss, agreeing = predicted.new_zeros(()), predicted.new_zeros(())
        for start in range(0, len(predicted), rows_per_chunk):
            rows = slice(start, start + rows_per_chunk)
            wanted = head(target[rows]).softmax(-1)  # [n, V]
            with torch.set_grad_enabled(needs_gradient):
                states = predicted[rows].detach().requires_grad_(needs_gradient)
                logits = head(states)  # [n, V]
            log_guess = logits.detach().log_softmax(-1)  # [n, V]
            loss -= (wanted * log_guess).sum(-1).sum()
            agreeing += (wanted.argmax(-1) == log_guess.argmax(-1)).sum()
            if gradient is not None:
                # Not yet divided by N: small gradients would vanish in a float16 head.
                slope = log_guess.exp_().sub_(wanted)  # [n, V], d loss / d logits
                gradient[rows] = torch.autograd.grad(logits, states, slope)[0]
        if gradient is not None:
            ctx.save_for_backward(gradient.div_(len(predicted)))
        loss, agreeing = loss / len(predicted), agreeing / len(predicted)
        ctx.mark_non_differentiable(agreeing)
        return loss, agreeing

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return loss_gradient * gradient, None, None, None
