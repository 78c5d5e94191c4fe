"""Held-out conversations: how far a drafter is from the target, and how long its drafts would last."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from sfdd.conversations.conversation import TokenizedConversation
from sfdd.progress import Progress, ProgressCallback
from sfdd.training.batches import Batch
from sfdd.training.distributed import Ranks
from sfdd.training.module import Sums, add_up
from sfdd.training.objectives import estimated_acceptance_length
from sfdd.training.report import HeldOutScores
from sfdd.training.steps import Step

# As many draft tokens as `sfdd eval` proposes by default, whatever a drafter was trained with.
DRAFT_STEPS = 5


def measure_held_out(
    objective: nn.Module,
    held_out: Step,
    make_batch: Callable[[Sequence[TokenizedConversation]], Batch],
    ranks: Ranks,
    before_each: Callable[[], None],
    on_progress: ProgressCallback,
) -> Sums:
    """Roll drafts of `DRAFT_STEPS` tokens from every position of the held-out conversations.

    Args:
        make_batch: see `batches.make_batch`.
        before_each: called before each micro-batch, in every process; may raise.
    """
    mine = held_out.micro_batches(ranks.index)
    of_each, done, tokens = [], 0, 0
    for number, conversations in enumerate(mine):
        before_each()
        # Not in the module alone: DDP must know that no backward pass will follow.
        with torch.no_grad():
            of_each.append(objective(make_batch(conversations), measured_steps=DRAFT_STEPS))
        everywhere = [c for of_rank in held_out.dealt for c in held_out.at(of_rank[number])]
        done, tokens = done + len(everywhere), tokens + sum(map(len, everywhere))
        total = len(held_out.conversations)
        on_progress(Progress("held-out", "conversations", done, total, tokens))
    return add_up(of_each, ranks)


def held_out_scores(sums: Sums, weight: float) -> HeldOutScores:
    """What some sums say; `weight` is that of all held-out tokens."""
    agreeing, counted = sums.agreeing[:DRAFT_STEPS], sums.counted[:DRAFT_STEPS]
    return HeldOutScores(
        loss=sums.loss / weight,
        losses={f"{name}_loss": value / weight for name, value in sums.parts.items()},
        agreement=sums.agreement[:DRAFT_STEPS],
        acceptance_length=estimated_acceptance_length(agreeing, counted),
    )
