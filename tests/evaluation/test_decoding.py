"""The decode loop on real models: lossless, and counted exactly."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sfdd.drafters.drafter import Drafter
from sfdd.drafters.layer import token_embeddings
from sfdd.drafters.loading import METHODS, new_drafter
from sfdd.evaluation.decoding import (
    Decoding,
    Limits,
    autoregressive_decode,
    speculative_decode,
    stop_token_ids,
)
from sfdd.evaluation.prompts import read_prompts
from sfdd.evaluation.proposing import EagleProposer
from sfdd.evaluation.verification import Draft, Sampling
from sfdd.targets.transformers_target import TransformersTarget

EVAL_PROMPTS = Path(__file__).parents[2] / "data/eval_prompts.jsonl"
GREEDY = Sampling()


def encode(target: TransformersTarget, text: str) -> Tensor:  # [P]
    rendered = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
    )
    return torch.tensor(rendered["input_ids"])


def generate(target: TransformersTarget, prompt_ids: Tensor, count: int) -> list[int]:
    """The target's own greedy output, by transformers."""
    output = target.model.generate(prompt_ids[None], do_sample=False, max_new_tokens=count)
    return output[0, len(prompt_ids) :].tolist()


def untrained(target: TransformersTarget, method: str = "eagle") -> EagleProposer:
    """EAGLE-3 can draft two of three tokens."""
    every = torch.arange(target.vocab_size)
    chosen = every[every % 3 > 0] if method == "eagle3" else None
    return EagleProposer(new_drafter(method, target, draft_to_target=chosen).eval(), target)


@dataclass
class Scripted:
    """Knows the greedy response and proposes it, wrong from the position that the script says."""

    response: list[int]
    vocab_size: int
    script: list[int]
    calls: list[tuple[list[int], tuple[int, ...], int]] = field(default_factory=list)
    aux_layers: tuple[int, ...] = ()

    def begin(self, sampling: Sampling) -> None:
        self.position = 0
        self.calls.clear()

    def propose(self, tokens: Tensor, states: Tensor, count: int) -> Draft:
        # All but the last of the first call's tokens are the prompt's.
        self.position += len(tokens) if self.calls else 1
        right = self.script[len(self.calls)]
        self.calls.append((tokens.tolist(), tuple(states.shape), count))
        chain = torch.tensor(self.response[self.position : self.position + count])
        chain[right:] = (chain[right:] + 1) % self.vocab_size
        return Draft(chain)


@pytest.fixture(scope="module")
def prompt_ids(tiny_target: TransformersTarget) -> Tensor:
    return encode(tiny_target, "Name three colours.")


@pytest.fixture(scope="module")
def response(tiny_target: TransformersTarget, prompt_ids: Tensor) -> list[int]:
    """40 tokens of the target, whatever they are."""
    return list(autoregressive_decode(tiny_target, prompt_ids, Limits(40), GREEDY).tokens)


def scripted_decode(
    target: TransformersTarget,
    prompt_ids: Tensor,
    response: list[int],
    script: list[int],
    limits: Limits,
    count: int = 5,
) -> tuple[Decoding, Scripted]:
    proposer = Scripted(response, target.vocab_size, script)
    return speculative_decode(target, proposer, prompt_ids, limits, GREEDY, count), proposer


def test_a_scripted_pattern_gives_exact_counts(
    tiny_target: TransformersTarget, prompt_ids: Tensor, response: list[int]
) -> None:
    """One token of the prompt's, then 3 + 1, 0 + 1, 2 + 1."""
    decoding, proposer = scripted_decode(
        tiny_target, prompt_ids, response, [3, 0, 2, 0], Limits(10), count=4
    )
    assert decoding == Decoding(tuple(response[:10]), proposed=(4, 4, 3), accepted=(3, 0, 2))
    assert decoding.acceptance.mean_accepted == 5 / 3
    assert decoding.acceptance.acceptance_length == 8 / 3

    hidden_size = tiny_target.hidden_size
    assert proposer.calls == [
        ([*prompt_ids[1:].tolist(), response[0]], (len(prompt_ids), hidden_size), 4),
        (response[1:5], (4, hidden_size), 4),
        (response[5:6], (1, hidden_size), 3),
    ]


def states_of(
    target: TransformersTarget, proposer: Scripted | EagleProposer, sequence: Tensor
) -> Tensor:  # [T, H or A * H]
    """What a proposer is to be given for a sequence [T], in one forward pass."""
    hidden, aux = target.hidden_and_aux_states(sequence[None], aux_layers=proposer.aux_layers)
    return hidden[0] if aux is None else aux[0]


@pytest.mark.parametrize("aux_layers", [(), (1,), (1, 2)])
def test_the_proposer_is_given_the_targets_true_hidden_states(
    tiny_target: TransformersTarget,
    prompt_ids: Tensor,
    response: list[int],
    aux_layers: tuple[int, ...],
) -> None:
    seen: list[Tensor] = []

    class Keeping(Scripted):
        def propose(self, tokens: Tensor, states: Tensor, count: int) -> Draft:
            seen.append(states)
            return super().propose(tokens, states, count)

    script = [3, 0, 2, 1, 0, 4, 0, 0]
    proposer = Keeping(response, tiny_target.vocab_size, script, aux_layers=aux_layers)
    speculative_decode(tiny_target, proposer, prompt_ids, Limits(20), GREEDY)
    kept = torch.cat(seen)
    assert kept.shape[-1] == max(1, len(aux_layers)) * tiny_target.hidden_size
    sequence = torch.cat([prompt_ids, torch.tensor(response)])[: len(kept)]
    expected = states_of(tiny_target, proposer, sequence)
    torch.testing.assert_close(kept, expected, rtol=1e-4, atol=1e-4)


def test_an_accepted_stop_token_ends_the_response(
    tiny_target: TransformersTarget, prompt_ids: Tensor, response: list[int]
) -> None:
    """Stop at the first token not seen before position 3: drafted behind it, accepted, not counted."""
    stop = next(i for i in range(3, 40) if response[i] not in response[:i])
    limits = Limits(40, frozenset([response[stop], 999]))
    decoding, _ = scripted_decode(
        tiny_target, prompt_ids, response, [stop + 3], limits, count=stop + 3
    )
    assert decoding == Decoding(tuple(response[: stop + 1]), proposed=(stop + 3,), accepted=(stop,))


def test_a_stop_token_of_the_targets_own_ends_the_response(
    tiny_target: TransformersTarget, prompt_ids: Tensor, response: list[int]
) -> None:
    stop = next(i for i in range(3, 40) if response[i] not in response[:i])
    limits = Limits(40, frozenset([response[stop]]))
    decoding, _ = scripted_decode(tiny_target, prompt_ids, response, [stop - 1], limits, count=stop)
    assert decoding == Decoding(tuple(response[: stop + 1]), proposed=(stop,), accepted=(stop - 1,))

    first = Limits(40, frozenset([response[0]]))
    assert scripted_decode(tiny_target, prompt_ids, response, [], first)[0].tokens == (response[0],)


@pytest.mark.parametrize(
    ("max_new_tokens", "proposed", "accepted"),
    [
        (1, (), ()),
        (2, (), ()),
        (3, (1,), (1,)),
        (7, (5,), (5,)),
        (8, (5,), (5,)),
        (9, (5, 1), (5, 1)),
    ],
)
def test_a_draft_never_exceeds_what_may_still_be_emitted(
    tiny_target: TransformersTarget,
    prompt_ids: Tensor,
    response: list[int],
    max_new_tokens: int,
    proposed: tuple[int, ...],
    accepted: tuple[int, ...],
) -> None:
    decoding, _ = scripted_decode(tiny_target, prompt_ids, response, [5, 5], Limits(max_new_tokens))
    assert decoding == Decoding(tuple(response[:max_new_tokens]), proposed, accepted)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("text", ["Hi", "Why is the sky blue?", "Viết một bài thơ."])
def test_greedy_decoding_equals_generate_on_a_tiny_target(
    tiny_target: TransformersTarget, text: str, count: int, method: str
) -> None:
    prompt_ids = encode(tiny_target, text)
    limits = Limits(24, stop_token_ids(tiny_target))
    expected = generate(tiny_target, prompt_ids, 24)
    baseline = autoregressive_decode(tiny_target, prompt_ids, limits, GREEDY)
    drafted = speculative_decode(
        tiny_target, untrained(tiny_target, method), prompt_ids, limits, GREEDY, count
    )
    assert list(baseline.tokens) == expected
    assert list(drafted.tokens) == expected
    assert drafted.acceptance.num_drafts > 5


@pytest.mark.parametrize("method", METHODS)
def test_greedy_decoding_equals_generate_on_smollm2(
    smollm2: TransformersTarget, method: str
) -> None:
    """Real prompts; the proposer drafts with an untrained drafter, so nearly all is rejected."""
    proposer = untrained(smollm2, method)
    for prompt in read_prompts([EVAL_PROMPTS], limit=3):
        prompt_ids = encode(smollm2, prompt.turns[0])
        limits = Limits(16, stop_token_ids(smollm2))
        drafted = speculative_decode(smollm2, proposer, prompt_ids, limits, GREEDY, 3)
        assert list(drafted.tokens) == generate(smollm2, prompt_ids, 16)


def test_accepted_chains_change_nothing_on_smollm2(smollm2: TransformersTarget) -> None:
    """Real prompts; drafts of which all, none or some are right."""
    script = [4, 0, 2, 4, 1, 3] * 9
    for prompt in read_prompts([EVAL_PROMPTS], limit=3):
        prompt_ids = encode(smollm2, prompt.turns[0])
        limits = Limits(24, stop_token_ids(smollm2))
        response = generate(smollm2, prompt_ids, 24)
        proposer = Scripted(response, smollm2.vocab_size, script)
        drafted = speculative_decode(smollm2, proposer, prompt_ids, limits, GREEDY, 4)
        assert list(drafted.tokens) == response
        assert drafted.acceptance.num_accepted > 0


@pytest.mark.parametrize("method", METHODS)
def test_cached_chains_equal_recomputation(
    tiny_target: TransformersTarget, prompt_ids: Tensor, response: list[int], method: str
) -> None:
    """Whatever was drafted before, a chain depends only on the certain tokens and hidden states."""
    chosen = torch.arange(0, 260, 2) if method == "eagle3" else None
    drafter = new_drafter(method, tiny_target, draft_to_target=chosen).eval()
    proposer = EagleProposer(drafter, tiny_target)
    sequence = torch.cat([prompt_ids, torch.tensor(response)])
    certain = sequence[1:]
    with torch.inference_mode():
        states = states_of(tiny_target, proposer, sequence)
        for _ in range(2):  # the second conversation starts afresh
            proposer.begin(Sampling.seeded(1.0, 0, tiny_target.device))
            start = 0
            for end, count in (
                (len(prompt_ids), 4),
                (len(prompt_ids) + 3, 1),
                (len(sequence) - 9, 5),
            ):
                draft = proposer.propose(certain[start:end], states[start:end], count)
                expected = _recompute(drafter, tiny_target, certain[:end], states[:end], draft)
                torch.testing.assert_close(draft.probabilities, expected)
                start = end


def _recompute(
    drafter: Drafter, target: TransformersTarget, tokens: Tensor, states: Tensor, draft: Draft
) -> Tensor:  # [k, V]
    """The drafts' distributions without a cache: everything is computed anew for each token."""
    rows = torch.full((len(draft.tokens), target.vocab_size), -torch.inf)
    drafted = slice(None) if drafter.draft_to_target is None else drafter.draft_to_target
    states = drafter.fuse(states[None])
    for row, token in zip(rows, draft.tokens, strict=True):
        last = drafter(token_embeddings(target.embedding, tokens)[None], states)[:, -1:]
        row[drafted] = drafter.head(target)(drafter.normed(last[0]))[0]
        assert row[token] > -torch.inf
        tokens, states = torch.cat([tokens, token[None]]), torch.cat([states, last], dim=1)
    return rows.softmax(-1)


def test_what_eagle_has_learnt_is_accepted(
    tiny_target: TransformersTarget, prompt_ids: Tensor, response: list[int]
) -> None:
    """Trained on one response by EAGLE's alignment, written out here: (x[t+1], h[t]) -> h[t+1]."""
    sequence = torch.cat([prompt_ids, torch.tensor(response)])
    hidden = tiny_target.hidden_states(sequence[None])  # [1, T, H]
    embeddings = tiny_target.embedding(sequence[None])  # [1, T, H]
    drafter = new_drafter("eagle", tiny_target)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    for _ in range(300):
        predicted = drafter(embeddings[:, 1:-1], hidden[:, :-2])[0]  # [T - 2, H]
        regression = (predicted - hidden[0, 1:-1]).square().mean()
        loss = regression + cross_entropy(tiny_target.logits(predicted), sequence[2:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    proposer = EagleProposer(drafter.eval(), tiny_target)
    decoding = speculative_decode(tiny_target, proposer, prompt_ids, Limits(38), GREEDY, 3)
    assert list(decoding.tokens) == response[:38]
    acceptance = decoding.acceptance
    assert acceptance.acceptance_rate_by_position[0] > 0.9
    assert acceptance.num_accepted > 1.5 * acceptance.num_drafts


def test_what_eagle3_has_learnt_is_accepted(
    tiny_target: TransformersTarget, prompt_ids: Tensor, response: list[int]
) -> None:
    """Trained on one response by its alignment, written out here: (x[t+1], aux[t]) -> x[t+2], then from
    its own state of that step: (x[t+2], state[t]) -> x[t+3]."""
    sequence = torch.cat([prompt_ids, torch.tensor(response)])
    chosen = sequence.unique()
    drafter = new_drafter("eagle3", tiny_target, draft_to_target=chosen)
    proposer = EagleProposer(drafter, tiny_target)
    read = states_of(tiny_target, proposer, sequence)[None, :-2]
    embeddings = tiny_target.embedding(sequence[None, 1:-1])  # [1, T - 2, H]
    drafts = torch.searchsorted(chosen, sequence)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    for _ in range(200):
        first, own = drafter.draft_step(embeddings, drafter.fuse(read), [])
        second, _ = drafter.draft_step(embeddings[:, 1:], first[:, :-1], [own])
        loss = sum(
            cross_entropy(drafter.head(tiny_target)(drafter.normed(states[0])), wanted)
            for states, wanted in ((first, drafts[2:]), (second, drafts[3:]))
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    decoding = speculative_decode(tiny_target, proposer, prompt_ids, Limits(38), GREEDY, 2)
    assert list(decoding.tokens) == response[:38]
    assert decoding.acceptance.mean_accepted > 1.8


@pytest.mark.parametrize("method", METHODS)
def test_sampled_tokens_are_distributed_as_the_targets_own(
    target_of_8_tokens: TransformersTarget,
    p_value: Callable[[Tensor, Tensor], float],
    method: str,
) -> None:
    """Temperature 1, chains of two: the second and third token of many responses, jointly."""
    target, draws = target_of_8_tokens, 800
    prompt_ids = torch.tensor([1, 5, 2])
    proposer, sampling = untrained(target, method), Sampling.seeded(1.0, 0, target.device)
    counts, accepted = torch.zeros(8, 8), 0
    for _ in range(draws):
        decoding = speculative_decode(target, proposer, prompt_ids, Limits(4), sampling, 2)
        counts[decoding.tokens[1], decoding.tokens[2]] += 1
        accepted += decoding.acceptance.num_accepted
    assert draws / 5 < accepted < 2 * draws - draws / 5  # both branches of the rule have been used
    expected = draws * _second_and_third(target, prompt_ids)
    frequent = expected > 5
    observed = torch.cat([counts[frequent], counts[~frequent].sum()[None]])
    wanted = torch.cat([expected[frequent], expected[~frequent].sum()[None]])
    assert p_value(observed, wanted) > 0.01


def _second_and_third(target: TransformersTarget, prompt_ids: Tensor) -> Tensor:  # [V, V]
    """P(second = a, third = b), summed over the first token."""
    first, second = torch.cartesian_prod(torch.arange(8), torch.arange(8)).T  # [V * V] each
    sequences = torch.cat([prompt_ids.expand(64, -1), first[:, None], second[:, None]], dim=1)
    states = target.hidden_states(sequences)[:, len(prompt_ids) - 1 :]  # [V * V, 3, H]
    p = target.logits(states.flatten(0, 1)).softmax(-1).view(64, 3, 8)
    row = torch.arange(64)
    pair = p[row, 0, first] * p[row, 1, second]  # P(first, second)
    return (pair[:, None] * p[:, 2]).view(8, 8, 8).sum(0)


def test_equal_seeds_give_equal_samples(
    tiny_target: TransformersTarget, prompt_ids: Tensor
) -> None:
    proposer = untrained(tiny_target)
    decodings = [
        speculative_decode(
            tiny_target,
            proposer,
            prompt_ids,
            Limits(12),
            Sampling.seeded(0.7, seed, tiny_target.device),
        )
        for seed in (1, 1, 2)
    ]
    assert decodings[0] == decodings[1] != decodings[2]


def test_stop_tokens_are_the_generation_configs_else_the_tokenizers(
    tiny_directory: Path,
) -> None:
    target = TransformersTarget.load(str(tiny_directory))
    assert stop_token_ids(target) == {2}
    target.model.generation_config.eos_token_id = [2, 7]
    assert stop_token_ids(target) == {2, 7}
    target.model.generation_config.eos_token_id = None
    assert stop_token_ids(target) == {target.tokenizer.eos_token_id}
    target.tokenizer.eos_token = None
    assert stop_token_ids(target) == frozenset()
