"""What sfdd runs inside vLLM: on every step, the hidden states' rows become a few numbers each.

An engine computes a prompt in pieces, several prompts at a time, and starts one again that it had to
put aside. The pooler keeps the numbers of a prompt's pieces until its last token is there.
"""

from collections.abc import Callable, Sequence, Set
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.layers.pooler import PoolingParamsUpdate
from vllm.model_executor.layers.pooler.abstract import Pooler

from sfdd.targets.statistics import STATISTICS, logits_statistics, rows_per_chunk

TASK = "token_classify"
_SUPERVISED = "supervised"  # key of a request's `extra_kwargs`

Runs: TypeAlias = list[list[int]]  # [first, end) of each run of supervised tokens


def request_settings(loss_mask: np.ndarray) -> dict[str, Runs]:
    """What a request tells the pooler: which of its tokens [T] are supervised."""
    edges = np.flatnonzero(np.diff(loss_mask.astype(np.int8), prepend=0, append=0))
    return {_SUPERVISED: edges.reshape(-1, 2).tolist()}


def _predicting(settings: dict[str, Runs] | None, length: int) -> np.ndarray:
    """Positions whose distribution predicts a supervised token; all, where none are named. [N]"""
    if settings is None:  # as when the engine measures its memory
        return np.arange(length)
    return np.concatenate([np.arange(first - 1, end - 1) for first, end in settings[_SUPERVISED]])


class StatisticsPooler(Pooler):
    """Gives float32 [N, 6] for a request of N supervised tokens, in the order of `STATISTICS`."""

    def __init__(
        self,
        compute_logits: Callable[[Tensor], Tensor | None],
        vocab_size: int,
        logits_memory: int,
    ) -> None:
        """Take the model's own way from hidden states [N, H] to logits [N, V].

        Args:
            compute_logits: gathers them from all ranks, cuts padding of the vocabulary, scales and caps;
                None on ranks that are not given the result.
            logits_memory: MiB that logits and what is computed from them may take.
        """
        super().__init__()
        self._compute_logits = compute_logits
        self._vocab_size = vocab_size
        self._logits_memory = logits_memory

    def get_supported_tasks(self) -> Set[Any]:
        return {TASK}

    def get_pooling_updates(self, task: Any) -> PoolingParamsUpdate:
        return PoolingParamsUpdate(requires_token_ids=True)

    def forward(self, hidden_states: Tensor, pooling_metadata: Any) -> list[Tensor | None]:
        """The statistics of each request that is complete with this step; None for the others."""
        cursor = pooling_metadata.get_pooling_cursor()
        scheduled = cursor.num_scheduled_tokens_cpu.tolist()
        ends = cursor.seq_lens_cpu.tolist()
        rows, next_ids = _rows_of_step(
            pooling_metadata.pooling_params,
            pooling_metadata.get_prompt_token_ids_cpu(),
            scheduled,
            ends,
        )
        counts = [len(of_request) for of_request in rows]
        values = self._statistics(hidden_states, torch.cat(rows), torch.cat(next_ids))

        outputs: list[Tensor | None] = []
        for state, piece, computed, end, finished in zip(
            pooling_metadata.pooling_states,
            torch.split(values, counts),
            scheduled,
            ends,
            cursor.get_finished_mask(),
            strict=True,
        ):
            pieces = state.hidden_states_cache
            if end == computed:  # its first step, or its first again after it was put aside
                pieces.clear()
            pieces.append(piece)
            outputs.append(torch.cat(pieces) if finished else None)
            if finished:
                pieces.clear()
        return outputs

    def _statistics(
        self,
        hidden_states: Tensor,  # [T, H]
        rows: Tensor,  # [N]
        next_ids: Tensor,  # [N]
    ) -> Tensor:  # [N, 6]
        """Chunk by chunk; all ranks take the same chunks, since each has a part of every logit row."""
        device = hidden_states.device
        rows, next_ids = (x.to(device, non_blocking=True) for x in (rows, next_ids))
        values = torch.zeros(len(rows), len(STATISTICS), device=device)
        chunk_rows = rows_per_chunk(device.type, self._vocab_size, self._logits_memory)
        for first in range(0, len(rows), chunk_rows):
            chunk = slice(first, first + chunk_rows)
            logits = self._compute_logits(hidden_states[rows[chunk]])
            if logits is not None:
                values[chunk] = logits_statistics(logits.float(), next_ids[chunk]).T
        return values


def _rows_of_step(
    params: Sequence[Any],
    prompts: Sequence[Tensor],
    scheduled: Sequence[int],
    ends: Sequence[int],
) -> tuple[list[Tensor], list[Tensor]]:
    """By request: rows of this step's hidden states that predict a supervised token, and that token.

    Args:
        params: of each request.
        prompts: the ids of each. [T]
        scheduled: how many tokens of each this step computed; their rows follow one another.
        ends: how many of each are computed after this step.
    """
    rows, next_ids, first_row = [], [], 0
    for settings, prompt, computed, end in zip(params, prompts, scheduled, ends, strict=True):
        positions = _predicting(settings.extra_kwargs, len(prompt))
        low, high = np.searchsorted(positions, [end - computed, end])
        mine = torch.from_numpy(positions[low:high])
        rows.append(mine - (end - computed) + first_row)
        next_ids.append(prompt[(mine + 1).clamp(max=len(prompt) - 1)].long())
        first_row += computed
    return rows, next_ids
