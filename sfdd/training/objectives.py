"""What a drafter is trained and measured on: its drafts from every position, held against the target.

The one module that knows the shifts. At base position i, draft step j reads the embedding of token
i+1+j and, at step 0, what the target knows at position i, later the drafter's own state of the step
before. It predicts token i+2+j, whose distribution is the target's at position i+1+j. So token t is
predicted at step j from base t-2-j, and the first two tokens of a conversation are never learnt.

Conversations are padded on the right and attention is causal, so padding reaches nothing. What is read
is always the data's own tokens (teacher forcing); the states are the drafter's own (training-time test,
EAGLE-3, arXiv 2503.01840, section 3.2).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sfdd.drafters.attention import KeysAndValues
from sfdd.drafters.drafter import Drafter, TargetHead
from sfdd.drafters.layer import token_embeddings
from sfdd.training.losses import LOSSES, Supervision, token_losses

if TYPE_CHECKING:
    from sfdd.training.batches import Batch

SHIFT = 2  # from a base position to the first token predicted from it


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What is minimised.

    Attributes:
        loss: name of a loss of `LOSSES`.
        ttt_steps: draft steps that are trained.
        step_decay: step j counts step_decay ** j times; above 0.
        hidden_weight, token_weight: of EAGLE's SmoothL1 between hidden states, a mean over H, and of
            `loss`; EAGLE-3 has `loss` alone.
        gradient_checkpointing: compute each draft step a second time rather than keep what is in it.
    """

    ttt_steps: int
    loss: str = "kl"
    step_decay: float = 0.8
    hidden_weight: float = 1.0
    token_weight: float = 0.1
    gradient_checkpointing: bool = False


@dataclass(frozen=True)
class LossSums:
    """Sums over the supervised tokens of a micro-batch, so that those of several can be added.

    Attributes:
        total: what is minimised, with gradient, before division by the weights of all supervised
            tokens (of index >= 2) of the global batch.
        parts: detached, each token times its weight. EAGLE: `hidden` and `token`, their steps decayed.
            EAGLE-3: `step_0` …, not decayed.
        agreeing: int64 [S]; base positions whose drafts of steps 0 to k are all the target's choice.
        counted: int64 [S]; base positions of which steps 0 to k all predict supervised tokens.
    """

    total: Tensor
    parts: Mapping[str, Tensor]
    agreeing: Tensor
    counted: Tensor


def loss_sums(
    drafter: Drafter,
    batch: "Batch",
    target: TargetHead,
    config: LossConfig,
    noise: Tensor | None = None,
) -> LossSums:
    """Loss of a micro-batch, over `config.ttt_steps` draft steps.

    Args:
        noise: added to the target's states that the drafter reads, of their shape: [B, T, H] for EAGLE,
            [B, T, A * H] for EAGLE-3.
    """
    return _sums(drafter, batch, target, config, config.ttt_steps, noise)


@torch.no_grad()
def measure(
    drafter: Drafter, batch: "Batch", target: TargetHead, steps: int, config: LossConfig
) -> LossSums:
    """Loss as `loss_sums` has it, and agreement over `steps` draft steps, at least `config.ttt_steps`."""
    return _sums(drafter, batch, target, config, max(steps, config.ttt_steps), None)


def estimated_acceptance_length(agreeing: Tensor, counted: Tensor) -> float:  # [S], [S]
    """tau = 1 + sum_k P(the drafts of steps 0 to k are all accepted), of greedy drafts of S tokens."""
    rates = agreeing.double() / counted.clamp(min=1)
    return 1 + float(rates.sum())


def _sums(
    drafter: Drafter,
    batch: "Batch",
    target: TargetHead,
    config: LossConfig,
    steps: int,
    noise: Tensor | None,
) -> LossSums:
    supervised = batch.loss_mask[:, SHIFT:]  # [B, P], of the P = T - 2 tokens that can be predicted
    rolled = _roll(drafter, batch, target, min(steps, supervised.shape[1]), noise, config)
    rows, columns = supervised.nonzero(as_tuple=True)  # of the N supervised tokens
    states = _by_token(rolled, rows, columns)  # [S, N, H]
    weights = _weights(batch.weights[:, SHIFT:], config, len(rolled))[:, rows, columns]  # [S, N]
    true_states = batch.hidden_states[:, 1:-1][rows, columns]  # [N, H], which predict those tokens
    supervision = Supervision(
        true_states, target.logits, drafter.draft_to_target, target.rows_per_chunk
    )
    token, by_step, agreeing = token_losses(
        drafter.normed(states), weights, drafter.head(target), supervision, LOSSES[config.loss]
    )
    if drafter.aux_layers:
        total, parts = token, _undecayed(by_step, config)
    else:
        distance = F.smooth_l1_loss(
            states, true_states.expand_as(states).to(states.dtype), reduction="none"
        )
        hidden = (distance.mean(-1) * weights).sum()
        total = config.hidden_weight * hidden + config.token_weight * token
        parts = {"hidden": hidden.detach(), "token": token.detach()}
    agreeing, counted = _runs(agreeing, supervised)
    missing = (0, steps - len(rolled))  # conversations shorter than a draft
    return LossSums(total, parts, F.pad(agreeing, missing), F.pad(counted, missing))


def _roll(
    drafter: Drafter,
    batch: "Batch",
    target: TargetHead,
    steps: int,
    noise: Tensor | None,
    config: LossConfig,
) -> list[Tensor]:
    """The drafter's states of each step j, [B, P - j, H]: row i is that of base position i."""
    read = batch.aux_states if drafter.aux_layers else batch.hidden_states
    assert read is not None
    read = read.to(drafter.dtype)
    states = drafter.fuse((read if noise is None else read + noise)[:, :-SHIFT])  # [B, P, H]
    embeddings = token_embeddings(target.embedding, batch.input_ids[:, 1:-1])  # [B, P, H]
    rolled: list[Tensor] = []
    earlier: list[KeysAndValues] = []
    for step in range(steps):
        inputs = (embeddings[:, step:], states, tuple(earlier))
        if config.gradient_checkpointing:
            states, own = checkpoint(
                drafter.draft_step, *inputs, use_reentrant=False, preserve_rng_state=False
            )
        else:
            states, own = drafter.draft_step(*inputs)
        earlier.append(own)
        rolled.append(states)
        states = states[:, :-1]  # the last base position has no token left to read
    return rolled


def _by_token(rolled: list[Tensor], rows: Tensor, columns: Tensor) -> Tensor:
    """States by base position, [B, P - j, H] of step j -> by predicted token: [S, N, H].

    Token t of step j comes from base t - 2 - j; the first j tokens of a conversation have none.
    """
    return torch.stack(
        [F.pad(states, (0, 0, step, 0))[rows, columns] for step, states in enumerate(rolled)]
    )


def _weights(weights: Tensor, config: LossConfig, steps: int) -> Tensor:  # [B, P] -> [S, B, P]
    """Of each token at each step: decayed, and 0 where there is no base or the step is not trained."""
    step = torch.arange(steps, device=weights.device)  # [S]
    token = torch.arange(weights.shape[1], device=weights.device)  # [P]
    decay = torch.where(step < config.ttt_steps, config.step_decay**step, 0.0)  # [S]
    return weights * (token >= step[:, None])[:, None] * decay[:, None, None].to(weights.dtype)


def _undecayed(by_step: Tensor, config: LossConfig) -> dict[str, Tensor]:
    sums = F.pad(by_step, (0, max(0, config.ttt_steps - len(by_step))))
    return {
        f"step_{step}": sums[step] / config.step_decay**step for step in range(config.ttt_steps)
    }


def _runs(agreeing: Tensor, supervised: Tensor) -> tuple[Tensor, Tensor]:
    """[S, N] and [B, P] -> [S] and [S]: unbroken runs of agreement, and of supervision, from a base."""
    by_token = supervised.new_zeros((len(agreeing), *supervised.shape))
    by_token[:, supervised] = agreeing  # [S, B, P]
    agreed = counted = torch.ones_like(supervised)  # by base position
    sums = []
    for step, right in enumerate(by_token):
        width = supervised.shape[1] - step
        agreed = agreed[:, :width] & right[:, step:]
        counted = counted[:, :width] & supervised[:, step:]
        sums.append(torch.stack([agreed.sum(), counted.sum()]))
    both = torch.stack(sums)  # [S, 2]
    return both[:, 0], both[:, 1]
