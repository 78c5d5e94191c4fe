"""Which draft tokens the target accepts, and the token it adds: what makes drafting lossless.

At temperature 0 a draft token is accepted where the target would have chosen it. Above, the
rejection rule of Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318) makes every
emitted token a draw from the target's distribution p, whatever distribution q the drafter drew from.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: the likeliest at temperature 0, else drawn from softmax(logits / T).

    Attributes:
        generator: on the logits' device; the only source of randomness, unused at temperature 0.
    """

    temperature: float = 0.0
    generator: torch.Generator | None = None

    @classmethod
    def seeded(cls, temperature: float, seed: int, device: torch.device) -> "Sampling":
        return cls(temperature, torch.Generator(device).manual_seed(seed) if temperature else None)

    def probabilities(self, logits: Tensor) -> Tensor | None:  # [N, V] -> [N, V]
        """What tokens are drawn from; None at temperature 0."""
        return torch.softmax(logits / self.temperature, dim=-1) if self.temperature else None

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:  # [N, V] -> [N], [N, V]
        """One token per row, and the distributions they were drawn from."""
        probabilities = self.probabilities(logits)
        if probabilities is None:
            return logits.argmax(-1), None
        return torch.multinomial(probabilities, 1, generator=self.generator)[:, 0], probabilities


@dataclass(frozen=True)
class Draft:
    """A chain of proposed tokens, and the distributions they were drawn from (None: greedily)."""

    tokens: Tensor  # [k]
    probabilities: Tensor | None = None  # [k, V]


def verify(draft: Draft, logits: Tensor, sampling: Sampling) -> Tensor:
    """The tokens that a verification emits: the accepted draft tokens and one of the target's own.

    Args:
        draft: k tokens, proposed under the same `sampling`.
        logits: of the target, [k + 1, V]; row i predicts draft token i, the last row what follows.

    Returns:
        [a + 1]: the first a draft tokens, then the target's correction of the next one or, where
        all k were accepted, its bonus token.
    """
    target = sampling.probabilities(logits)
    if target is None:
        return verify_greedily(draft.tokens, logits)
    if draft.probabilities is None:
        raise ValueError("at temperature > 0 a draft needs the distributions it was drawn from")
    return verify_by_rejection(draft.tokens, draft.probabilities, target, sampling.generator)


def verify_greedily(draft: Tensor, logits: Tensor) -> Tensor:  # [k], [k + 1, V] -> [a + 1]
    """Accept up to the first draft token that is not the target's own choice."""
    choices = logits.argmax(-1)  # [k + 1]
    accepted = _leading(choices[:-1] == draft)
    return choices[: accepted + 1]


def verify_by_rejection(
    draft: Tensor,  # [k]
    drafter: Tensor,  # [k, V]: q, what each draft token was drawn from
    target: Tensor,  # [k + 1, V]: p, what it should have been drawn from
    generator: torch.Generator | None = None,
) -> Tensor:  # [a + 1]
    """Accept token d with probability min(1, p(d) / q(d)); else draw from norm(max(p - q, 0)).

    The two ways to emit x add up to p(x): min(p, q)(x) + (p - min(p, q))(x). When all are accepted
    the bonus token is drawn from the last row of p.
    """
    p, q = (rows[: len(draft)].gather(1, draft[:, None])[:, 0] for rows in (target, drafter))  # [k]
    uniform = torch.rand(len(draft), generator=generator, device=draft.device)
    accepted = _leading(uniform * q < p)
    distribution = target[accepted]  # [V]
    if accepted < len(draft):
        residual = (distribution - drafter[accepted]).clamp(min=0)
        # Where p = q but for rounding nothing is left over; then p itself is the limit.
        distribution = torch.where(residual.sum() > 0, residual, distribution)
    following = torch.multinomial(distribution, 1, generator=generator)  # [1]
    return torch.cat([draft[:accepted], following])


def _leading(passed: Tensor) -> int:  # [k], bool
    """How many are True before the first False."""
    return int(passed.cumprod(0).sum())
