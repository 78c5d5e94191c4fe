"""From logits to the numbers of each token: flatness and the five baseline metrics.

The one place where sfdd computes them, whatever engine made the logits. Everything follows from four
sums over the vocabulary, so no probability vector is kept. With z the logits, m their maximum and
e = exp(z - m):

    log flatness = log sum(e) - 1/2 log sum(e^2) - 1/2 log V      cos(p, U), arXiv 2601.18902, Eq. 6
    entropy      = log sum(e) - sum(e (z - m)) / sum(e)           nats
    top-1        = 1 / sum(e)
    margin       = (1 - e_second) / sum(e)
    energy       = -(m + log sum(e))
    nll          = m + log sum(e) - z[next token]                 nats
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

FloatArray: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float32]]


@dataclass(frozen=True)
class TokenStats:
    """One float32 value per supervised token, in order; arrays of shape [N].

    Each describes the distribution that *predicts* the token. Flatness lies in [1/sqrt(V), 1] and is
    high when the distribution is flat; V flatness^2 is the effective number of tokens it spreads over.
    """

    flatness: FloatArray
    entropy: FloatArray
    top1: FloatArray
    margin: FloatArray
    energy: FloatArray
    nll: FloatArray

    def __len__(self) -> int:
        return len(self.flatness)

    @classmethod
    def join(cls, parts: Sequence["TokenStats"]) -> "TokenStats":
        """One after another."""
        return cls(*(np.concatenate([getattr(p, name) for p in parts]) for name in STATISTICS))

    def all_finite(self) -> bool:
        """False where the target's logits were infinite or not a number."""
        return all(bool(np.isfinite(getattr(self, name)).all()) for name in STATISTICS)

    def means(self) -> dict[str, float]:
        """Conversation-level value of every metric: the mean over its supervised tokens (Eq. 8)."""
        return {name: float(getattr(self, name).mean(dtype=np.float64)) for name in STATISTICS}


STATISTICS = tuple(field.name for field in fields(TokenStats))

# Logits of one chunk. Small enough to stay in a CPU's last-level cache between the head and the
# statistics; a GPU is given more rows, since it wants few large kernels.
_CHUNK_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}
# How many [rows, V] buffers of four bytes a chunk has at its peak: what the head returns, what soft
# caps and scales make of it, its float32 copy, and the weights.
_BUFFERS = 4


def rows_per_chunk(device_type: str, vocab_size: int, logits_memory: int) -> int:
    """How many rows of logits are computed at once, within `logits_memory` MiB."""
    budget = logits_memory * 2**20 // _BUFFERS
    chunk = min(_CHUNK_BYTES.get(device_type, 2**26), budget)
    return max(1, chunk // (4 * vocab_size))


# exp() of anything lower is 0 in float32; keeps 0 * -inf out of the entropy of masked vocabulary.
_LOWEST_SHIFTED_LOGIT = -200.0


def logits_statistics(logits: Tensor, next_ids: Tensor) -> Tensor:
    """The statistics of some rows of logits; **overwrites `logits`**, which spares a copy.

    Args:
        logits: float32 [N, V], after the model's own post-processing, at temperature 1.
        next_ids: int64 [N], the token that actually follows each row.

    Returns:
        float32 [6, N] in the order of `STATISTICS`; NaN in columns whose logits are not finite.
    """
    half_log_vocabulary = 0.5 * float(np.log(logits.shape[-1]))
    next_logit = logits.gather(-1, next_ids[:, None]).squeeze(-1)  # [N]
    top_two = logits.topk(2, dim=-1).values  # [N, 2]
    highest = top_two[:, 0]

    shifted = logits.sub_(highest[:, None]).clamp_(min=_LOWEST_SHIFTED_LOGIT)  # [N, V], <= 0
    weights = shifted.exp()  # [N, V], p up to a factor
    total = weights.sum(-1)
    expected_shifted = shifted.mul_(weights).sum(-1) / total
    # sum() adds pairwise; vector_norm() does not, and loses a digit over a large vocabulary.
    total_square = weights.square_().sum(-1)

    log_total = total.log()
    return torch.stack(
        [
            (log_total - 0.5 * total_square.log() - half_log_vocabulary).exp(),
            log_total - expected_shifted,
            1 / total,
            (1 - (top_two[:, 1] - highest).exp()) / total,
            -(highest + log_total),
            highest + log_total - next_logit,
        ]
    )


def as_token_stats(values: Tensor) -> TokenStats:
    """float32 [6, N] in the order of `STATISTICS`, on any device -> `TokenStats`."""
    return TokenStats(*values.cpu().numpy())
