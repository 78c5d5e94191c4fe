"""The maths of acceptance: by hand, and by the distribution of what comes out."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sfdd.evaluation.verification import Draft, Sampling, verify

VOCABULARY = 5
P = torch.tensor(  # the target's next-token distribution after each token
    [
        [0.50, 0.20, 0.15, 0.10, 0.05],
        [0.05, 0.05, 0.60, 0.20, 0.10],
        [0.25, 0.25, 0.00, 0.25, 0.25],
        [0.10, 0.70, 0.10, 0.05, 0.05],
        [0.20, 0.20, 0.20, 0.20, 0.20],
    ]
)
Q = torch.tensor(  # the drafter's, wrong in its own way
    [
        [0.10, 0.20, 0.30, 0.10, 0.30],
        [0.40, 0.05, 0.15, 0.20, 0.20],
        [0.10, 0.10, 0.60, 0.10, 0.10],
        [0.20, 0.20, 0.20, 0.20, 0.20],
        [0.90, 0.02, 0.02, 0.03, 0.03],
    ]
)


def one_hot_logits(*tokens: int) -> Tensor:
    return 10.0 * torch.nn.functional.one_hot(torch.tensor(tokens), VOCABULARY)


def sampling(seed: int = 0) -> Sampling:
    return Sampling.seeded(1.0, seed, torch.device("cpu"))


@pytest.mark.parametrize(
    ("draft", "emitted"),
    [
        ([1, 2, 3], [1, 2, 3, 4]),  # all accepted: the bonus token follows
        ([1, 2, 0], [1, 2, 3]),
        ([1, 0, 3], [1, 2]),  # what follows a rejected token never counts
        ([0, 2, 3], [1]),
    ],
)
def test_greedy_emits_the_targets_choices_up_to_the_first_difference(
    draft: list[int], emitted: list[int]
) -> None:
    logits = one_hot_logits(1, 2, 3, 4)
    assert verify(Draft(torch.tensor(draft)), logits, Sampling()).tolist() == emitted


def test_equal_distributions_are_always_accepted() -> None:
    for seed in range(200):
        chosen = sampling(seed)
        tokens, q = chosen.draw(P[[0, 1]].log())
        assert q is not None
        logits = P[[0, 1, 3]].log()
        assert verify(Draft(tokens, q), logits, chosen).tolist()[:2] == tokens.tolist()


def test_a_token_the_target_never_gives_is_never_accepted_and_the_residual_replaces_it() -> None:
    """Draft 2 after 2 has p = 0; max(p - q, 0) = [.15, .15, 0, .15, .15]."""
    draft = Draft(torch.tensor([2]), Q[[2]])
    emitted = [verify(draft, P[[2, 0]].log(), sampling(seed)).tolist() for seed in range(400)]
    assert all(len(tokens) == 1 for tokens in emitted)
    counts = Counter(tokens[0] for tokens in emitted)
    assert set(counts) == {0, 1, 3, 4}
    assert min(counts.values()) > 70  # of 100 expected


def test_acceptance_probability_is_p_over_q() -> None:
    """p(1) / q(1) = 0.05 / 0.20 for token 4 after 3 drawn from the uniform Q[3]."""
    draft = Draft(torch.tensor([4]), Q[[3]])
    accepted = sum(len(verify(draft, P[[3, 0]].log(), sampling(seed))) - 1 for seed in range(4000))
    assert accepted / 4000 == pytest.approx(0.25, abs=0.02)


def test_rounding_that_leaves_no_residual_draws_from_p() -> None:
    q = torch.tensor([[0.0, 1.0, 0.0]])
    p = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    draft = Draft(torch.tensor([0]), q)  # q(0) = 0: only rounding could have drawn it
    assert verify(draft, p.log(), sampling()).tolist() == [1]


def test_a_draft_without_distributions_cannot_be_verified_by_rejection() -> None:
    with pytest.raises(ValueError, match="needs the distributions"):
        verify(Draft(torch.tensor([1])), one_hot_logits(1, 2), sampling())


def test_emitted_pairs_are_distributed_as_the_targets_own(
    p_value: Callable[[Tensor, Tensor], float],
) -> None:
    """Chains of two drafted from Q: pairs of emitted tokens have probability P[0, a] P[a, b]."""
    chosen, draws = sampling(), 20_000
    counts = torch.zeros(VOCABULARY, VOCABULARY)
    for _ in range(draws):
        emitted: list[int] = []
        while len(emitted) < 2:
            emitted += _draft_and_verify((emitted or [0])[-1], chosen)
        counts[emitted[0], emitted[1]] += 1
    expected = draws * P[0, :, None] * P
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert p_value(counts[possible], expected[possible]) > 0.01


def _draft_and_verify(last: int, chosen: Sampling) -> list[int]:
    first, q_first = chosen.draw(Q[[last]].log())
    second, q_second = chosen.draw(Q[first].log())
    assert q_first is not None
    assert q_second is not None
    chain = [last, int(first), int(second)]
    draft = Draft(torch.cat([first, second]), torch.cat([q_first, q_second]))
    return verify(draft, P[chain].log(), chosen).tolist()
