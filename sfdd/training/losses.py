"""How far a drafter's distribution q is from the target's p, as sums over supervised tokens.

    kl  - sum_v p_v log q_v, the soft cross-entropy: the gradient of KL(p || q)
    tv  1/2 sum_v |p_v - q_v|, the total variation; 1 - tv = sum_v min(p_v, q_v) is the probability that
        a token drawn from q is accepted (Leviathan et al., arXiv 2211.17192, corollary 3.6)
    lk  w KL(p || q) + (1 - w) tv, w = exp(-3 (1 - tv)) without gradient: KL while little is accepted, tv
        when much is (Samarin et al., LK losses, arXiv 2602.23881, the hybrid with eta = 3). w is each
        token's own, so that a sum does not depend on what it is summed with.

p is the target's softmax over the tokens that the drafter can draft, which sums to 1 over those: with a
draft vocabulary `tv` is of that p, not of the whole one. Where the target's first choice is not one of
them, a token contributes nothing, as in EAGLE-3 (arXiv 2503.01840).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sfdd.drafters.drafter import Head

_ETA = 3.0

# p [n, D] and log q [s, n, D] -> the losses [s, n], and their gradients by the logits of q [s, n, D]
TokenLoss: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def soft_cross_entropy(p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """`kl`: d/dz_v = q_v - p_v."""
    return -(p * log_q).sum(-1), log_q.exp().sub_(p)


def total_variation(p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """`tv`: d/dq_v = 1/2 sign(q_v - p_v) =: s_v, and so d/dz_v = q_v (s_v - sum_u q_u s_u)."""
    q = log_q.exp()
    difference = q - p
    value = difference.abs().sum(-1) / 2
    half_sign = difference.sign_().div_(2)
    return value, (half_sign - (q * half_sign).sum(-1, keepdim=True)).mul_(q)


def adaptive_hybrid(p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """`lk`: KL and total variation, weighed by how much of q is accepted."""
    cross_entropy, kl_slope = soft_cross_entropy(p, log_q)
    kl = cross_entropy + torch.special.xlogy(p, p).sum(-1)
    tv, tv_slope = total_variation(p, log_q)
    weight = torch.exp(-_ETA * (1 - tv))  # [s, n]
    value = weight * kl + (1 - weight) * tv
    return value, torch.lerp(tv_slope, kl_slope, weight[..., None])


LOSSES: Mapping[str, TokenLoss] = {
    "kl": soft_cross_entropy,
    "tv": total_variation,
    "lk": adaptive_hybrid,
}


@dataclass(frozen=True)
class Supervision:
    """What the drafts of N tokens are held against.

    Attributes:
        hidden_states: [N, H], from which the target predicts each token.
        target: its head: hidden states [n, H] -> logits [n, V].
        draft_to_target: int64 [D], ascending: the tokens that can be drafted; None: all of them.
        rows_per_chunk: how many tokens go through the target's head at once, and as many logits
            through the drafter's; changes nothing but memory.
    """

    hidden_states: Tensor
    target: Callable[[Tensor], Tensor]
    draft_to_target: Tensor | None
    rows_per_chunk: int


def token_losses(
    states: Tensor, weights: Tensor, head: Head, supervision: Supervision, loss: TokenLoss
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses of the drafts of N tokens, each of them drafted at S steps.

    Args:
        states: [S, N, H], what the drafter's head reads.
        weights: [S, N], of each draft in the sum; 0 for none.
        head: the drafter's; gradients flow to `states` and to its parameters.

    Returns:
        The sum of weight times loss, with gradient; the sums of each step [S], without; and bool
        [S, N], whether the draft is the target's own choice.
    """
    return cast(
        tuple[Tensor, Tensor, Tensor],
        _TokenLosses.apply(  # type: ignore[no-untyped-call]
            states, weights, head.logits, supervision, loss, *head.parameters
        ),
    )


class _TokenLosses(torch.autograd.Function):
    """A sum of losses whose gradient is made while their logits are at hand.

    Each token's p is computed once for all steps. Logits and probabilities of a chunk are dropped as
    soon as they have given the gradient by the states and by the head's parameters, so [S, N, H] is
    kept and never [N, V].
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,  # [S, N, H]
        weights: Tensor,  # [S, N]
        head: Callable[..., Tensor],
        supervision: Supervision,
        loss: TokenLoss,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_steps, num_tokens = states.shape[:2]
        wanted = any(ctx.needs_input_grad)
        gradients = [torch.zeros_like(x) for x in (states, *parameters) if wanted]
        parameters = tuple(x.detach().requires_grad_(wanted) for x in parameters)
        sums = weights.new_zeros(num_steps)
        agreeing = torch.zeros(num_steps, num_tokens, dtype=torch.bool, device=states.device)
        for start in range(0, num_tokens, supervision.rows_per_chunk):
            rows = slice(start, start + supervision.rows_per_chunk)
            with torch.autocast(states.device.type, enabled=False):  # the drafter's precision alone
                logits = supervision.target(supervision.hidden_states[rows])  # [n, V]
            p, choice, possible = _judged(logits, supervision.draft_to_target)
            steps_at_once = logits.shape[-1] // p.shape[-1]  # as many logits as the target's
            del logits
            for first in range(0, num_steps, steps_at_once):
                part = (slice(first, first + steps_at_once), rows)
                with torch.set_grad_enabled(wanted):
                    read = states[part].detach().requires_grad_(wanted)  # [s, n, H]
                    logits = head(read.flatten(0, 1), *parameters).view(*read.shape[:2], -1)
                agreeing[part] = possible & (logits.argmax(-1) == choice)
                values, slope = loss(p, logits.detach().log_softmax(-1))  # [s, n], [s, n, D]
                weight = weights[part] * possible  # [s, n]
                sums[part[0]] += (values * weight).sum(-1)
                if wanted:
                    # Not yet divided by the number of tokens: small gradients would vanish in a
                    # float16 head.
                    slope = slope.mul_(weight[..., None])
                    found = torch.autograd.grad(logits, (read, *parameters), slope)
                    gradients[0][part] = found[0]
                    for gradient, addend in zip(gradients[1:], found[1:], strict=True):
                        gradient += addend
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(sums, agreeing)
        return sums.sum(), sums, agreeing

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        by_states, *by_parameters = (upstream * gradient for gradient in ctx.saved_tensors)
        return (by_states, None, None, None, None, *by_parameters)


def _judged(logits: Tensor, draft_to_target: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Of the target's logits [n, V]: p [n, D], its choice as a draft id [n], whether it is one [n]."""
    choice = logits.argmax(-1)  # [n]
    if draft_to_target is None:
        return logits.softmax(-1), choice, torch.ones_like(choice, dtype=torch.bool)
    place = torch.searchsorted(draft_to_target, choice).clamp(max=len(draft_to_target) - 1)
    return logits[:, draft_to_target].softmax(-1), place, draft_to_target[place] == choice
