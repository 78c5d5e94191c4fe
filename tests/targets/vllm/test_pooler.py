"""The pooler alone, given what vLLM's model runner gives it: which rows it computes, how many at once."""

import numpy as np
import torch
from torch import Tensor
from vllm import PoolingParams
from vllm.v1.pool.metadata import PoolingMetadata, PoolingStates

from sfdd.targets.statistics import logits_statistics
from sfdd.targets.vllm.pooler import TASK, StatisticsPooler, request_settings

VOCABULARY, HIDDEN = 1000, 8


def step(
    states: list[PoolingStates],
    prompts: list[Tensor],
    masks: list[np.ndarray],
    computed: list[int],
    scheduled: list[int],
) -> PoolingMetadata:
    """What a step of an engine says: `scheduled` tokens of each prompt, after `computed` ones."""
    ids = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    metadata = PoolingMetadata(
        prompt_lens=torch.tensor([len(prompt) for prompt in prompts]),
        prompt_token_ids=None,
        prompt_token_ids_cpu=ids,
        pooling_params=[
            PoolingParams(task=TASK, extra_kwargs=request_settings(mask)) for mask in masks
        ],
        pooling_states=states,
    )
    ends = torch.tensor(computed) + torch.tensor(scheduled)
    metadata.build_pooling_cursor(np.array(scheduled), ends, torch.device("cpu"))
    return metadata


def test_supervised_rows_alone_a_few_at_a_time_over_pieces_and_restarts() -> None:
    torch.manual_seed(0)
    head = torch.randn(VOCABULARY, HIDDEN)
    sizes: list[int] = []

    def compute_logits(hidden_states: Tensor) -> Tensor:
        sizes.append(len(hidden_states))
        return hidden_states @ head.T

    pooler = StatisticsPooler(compute_logits, VOCABULARY, logits_memory=1)
    lengths = [300, 40, 7]
    prompts = [torch.randint(0, VOCABULARY, (n,)) for n in lengths]
    hidden = [torch.randn(n, HIDDEN) for n in lengths]
    masks = [np.arange(n) > 3 for n in lengths]
    masks[1] = np.isin(np.arange(40), [5, 6, 20, 39])
    states = [PoolingStates() for _ in lengths]

    def run(computed: list[int], scheduled: list[int]) -> list[Tensor | None]:
        rows = [h[a : a + n] for h, a, n in zip(hidden, computed, scheduled, strict=True)]
        return pooler(torch.cat(rows), step(states, prompts, masks, computed, scheduled))

    assert run([0, 0, 0], [100, 10, 5]) == [None, None, None]
    assert run([0, 10, 0], [200, 10, 1]) == [None, None, None]  # two were put aside in between
    outputs = run([200, 20, 1], [100, 20, 6])

    for output, prompt, states_of, mask in zip(outputs, prompts, hidden, masks, strict=True):
        positions = torch.from_numpy(mask.nonzero()[0])
        expected = logits_statistics(states_of[positions - 1] @ head.T, prompt[positions]).T
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert all(not state.hidden_states_cache for state in states)
    assert max(sizes) == 65  # 1 MiB, four buffers of 4,000 bytes a row
    once = sum(int(mask.sum()) for mask in masks)
    assert sum(sizes) == once + 97 + 2  # and what was computed before the two were put aside


def test_a_step_without_a_supervised_token_computes_no_logits() -> None:
    def compute_logits(hidden_states: Tensor) -> Tensor:
        raise AssertionError("nothing to compute")

    pooler = StatisticsPooler(compute_logits, VOCABULARY, logits_memory=1)
    mask = np.arange(50) > 40
    metadata = step([PoolingStates()], [torch.arange(50)], [mask], [0], [20])
    assert pooler(torch.randn(20, HIDDEN), metadata) == [None]


def test_a_rank_that_is_given_no_logits_gives_rows_of_the_same_shape() -> None:
    pooler = StatisticsPooler(lambda hidden_states: None, VOCABULARY, logits_memory=1)
    mask = np.arange(50) > 40
    metadata = step([PoolingStates()], [torch.arange(50)], [mask], [0], [50])
    (output,) = pooler(torch.randn(50, HIDDEN), metadata)
    assert output.shape == (9, 6)
