"""Which token is predicted from what, and how it is summed: against plain loops over real tiny models."""

from collections.abc import Sequence

import pytest
import torch
from drafters.targets import make_target
from torch import Tensor
from torch.nn import functional as F

from sfdd.drafters.drafter import Drafter
from sfdd.drafters.loading import METHODS, new_drafter
from sfdd.targets.body import new_cache
from sfdd.targets.transformers_target import TransformersTarget
from sfdd.training.batches import Batch
from sfdd.training.objectives import (
    LossConfig,
    LossSums,
    estimated_acceptance_length,
    loss_sums,
    measure,
)

CHOSEN = torch.arange(0, 260, 3)  # tokens that EAGLE-3 can draft
ALL = slice(None)


@pytest.fixture(scope="module")
def target() -> TransformersTarget:
    return make_target("llama")


def make_drafter(method: str, target: TransformersTarget, chosen: Tensor | None = None) -> Drafter:
    drafter = new_drafter(method, target, seed=1, draft_to_target=chosen)
    torch.manual_seed(2)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return drafter


def make_batch(
    target: TransformersTarget,
    drafter: Drafter,
    conversations: Sequence[tuple[list[int], list[bool], list[float]]],
    width: int = 0,
) -> Batch:
    """Ids, masks and weights -> right-padded tensors and the target's states for them."""
    width = max(width, *(len(ids) for ids, _, _ in conversations))
    ids = torch.zeros(len(conversations), width, dtype=torch.int64)
    mask = torch.zeros(len(conversations), width, dtype=torch.bool)
    weights = torch.ones(len(conversations), width)
    for row, (tokens, supervised, token_weights) in enumerate(conversations):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = torch.tensor(supervised)
        weights[row, : len(tokens)] = torch.tensor(token_weights)
    with torch.no_grad():
        hidden, aux = target.hidden_and_aux_states(ids, aux_layers=drafter.aux_layers)
    return Batch(
        input_ids=ids, loss_mask=mask, weights=weights, hidden_states=hidden, aux_states=aux
    )


def conversation(
    length: int, supervised: Sequence[int], seed: int
) -> tuple[list[int], list[bool], list[float]]:
    torch.manual_seed(seed)
    ids = torch.randint(3, 260, (length,)).tolist()
    return ids, [i in supervised for i in range(length)], (0.5 + torch.rand(length)).tolist()


CONVERSATIONS = [
    conversation(12, range(5, 10), 0),
    conversation(7, [0, 1, 3, 4, 6], 1),
    conversation(3, [2], 2),
    conversation(9, [], 3),
]


def drafted(
    drafter: Drafter, target: TransformersTarget, ids: list[int], base: int, steps: int
) -> list[Tensor]:
    """Draft states [H] from one base position, token by token with a KV cache: nothing shared with
    the code under test but the drafter itself."""
    tokens = torch.tensor(ids)
    hidden, aux = target.hidden_and_aux_states(tokens[None], aux_layers=drafter.aux_layers)
    states = drafter.fuse(hidden if aux is None else aux)[:, : base + 1]
    embeddings = target.embedding.weight[tokens][None]  # [1, T, H]
    cache, found = new_cache(), []
    read = embeddings[:, 1 : base + 2]
    for step in range(steps):
        states = drafter(read, states, cache=cache)[:, -1:]
        found.append(states[0, 0])
        read = embeddings[:, base + 2 + step : base + 3 + step]
    return found


def by_loops(
    drafter: Drafter,
    target: TransformersTarget,
    conversations: Sequence[tuple[list[int], list[bool], list[float]]],
    steps: int,
    trained: int,
    decay: float,
) -> dict[str, list[float]]:
    """Sums over tokens t and steps j of the loss of the draft made from base t - 2 - j."""
    sums = {name: [0.0] * steps for name in ("token", "hidden", "agreeing", "counted")}
    chosen = drafter.draft_to_target
    for ids, supervised, weights in conversations:
        hidden = target.hidden_states(torch.tensor([ids]))[0]
        logits = target.model(torch.tensor([ids])).logits[0]  # [T, V]
        for base in range(len(ids) - 2):
            unbroken = agreed = True
            count = min(steps, len(ids) - 2 - base)
            for step, state in enumerate(drafted(drafter, target, ids, base, count)):
                token = base + 2 + step
                unbroken = unbroken and supervised[token]
                p, choice = logits[token - 1], int(logits[token - 1].argmax())
                z = drafter.head(target)(drafter.normed(state[None]))[0]
                draft = int(z.argmax()) if chosen is None else int(chosen[z.argmax()])
                agreed = agreed and draft == choice
                sums["counted"][step] += unbroken
                sums["agreeing"][step] += unbroken and agreed
                if not supervised[token] or step >= trained:
                    continue
                weight = weights[token] * decay**step
                difference = F.smooth_l1_loss(state, hidden[token - 1])
                sums["hidden"][step] += weight * float(difference)
                if chosen is None or choice in chosen.tolist():
                    p = (p if chosen is None else p[chosen]).softmax(-1)
                    sums["token"][step] += weight * -float((p * z.log_softmax(-1)).sum())
    return sums


@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("trained", [1, 4])
@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_every_token_is_predicted_from_its_own_base_position(
    target: TransformersTarget, method: str, trained: int, restricted: bool
) -> None:
    if restricted and method == "eagle":
        return  # drafts with the target's head
    drafter = make_drafter(method, target, CHOSEN if restricted else None)
    config = LossConfig(ttt_steps=trained, hidden_weight=0.7, token_weight=0.3)
    batch = make_batch(target, drafter, CONVERSATIONS)
    expected = by_loops(drafter, target, CONVERSATIONS, 5, trained, decay=0.8)
    sums = measure(drafter, batch, target, 5, config)
    if method == "eagle":
        hidden, token = sum(expected["hidden"]), sum(expected["token"])
        assert sums.parts.keys() == {"hidden", "token"}
        assert sums.parts["hidden"].item() == pytest.approx(hidden, rel=1e-4)
        assert sums.parts["token"].item() == pytest.approx(token, rel=1e-4)
        assert sums.total.item() == pytest.approx(0.7 * hidden + 0.3 * token, rel=1e-4)
    else:
        assert list(sums.parts) == [f"step_{step}" for step in range(trained)]
        for step in range(trained):
            undecayed = expected["token"][step] / 0.8**step
            assert sums.parts[f"step_{step}"].item() == pytest.approx(undecayed, rel=1e-4)
        assert sums.total.item() == pytest.approx(sum(expected["token"]), rel=1e-4)
    assert sums.counted.tolist() == expected["counted"]
    assert sums.agreeing.tolist() == expected["agreeing"]
    # Runs of 5 supervised tokens, and of 2, 1 and 1 once the first two tokens are left out.
    assert sums.counted.tolist() == [5 + 4, 4 + 1, 3, 2, 1]


def close(one: LossSums, other: LossSums) -> None:
    torch.testing.assert_close(one.total, other.total, rtol=1e-5, atol=1e-5)
    assert one.parts.keys() == other.parts.keys()
    for name in one.parts:
        torch.testing.assert_close(one.parts[name], other.parts[name], rtol=1e-5, atol=1e-5)
    assert one.agreeing.tolist() == other.agreeing.tolist()
    assert one.counted.tolist() == other.counted.tolist()


def gradients(drafter: Drafter, sums: LossSums) -> dict[str, Tensor]:
    drafter.zero_grad()
    sums.total.backward()
    return {name: p.grad.clone() for name, p in drafter.named_parameters()}


@pytest.mark.parametrize("method", METHODS)
def test_padding_and_batch_composition_change_neither_sums_nor_gradients(
    target: TransformersTarget, method: str
) -> None:
    drafter = make_drafter(method, target, CHOSEN if method == "eagle3" else None)
    config = LossConfig(ttt_steps=4, loss="lk")
    together = loss_sums(drafter, make_batch(target, drafter, CONVERSATIONS), target, config)
    expected = gradients(drafter, together)
    padded = loss_sums(
        drafter, make_batch(target, drafter, CONVERSATIONS, width=31), target, config
    )
    close(padded, together)
    found = gradients(drafter, padded)

    alone = [
        loss_sums(drafter, make_batch(target, drafter, [one]), target, config)
        for one in CONVERSATIONS
    ]
    added = LossSums(
        sum(sums.total for sums in alone),
        {name: sum(sums.parts[name] for sums in alone) for name in together.parts},
        sum(sums.agreeing for sums in alone),
        sum(sums.counted for sums in alone),
    )
    close(added, together)
    found_alone = gradients(drafter, added)
    for name, gradient in expected.items():
        assert gradient.abs().sum() > 0, name
        for other in (found, found_alone):
            torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_weights_scale_each_token_at_every_step(target: TransformersTarget, method: str) -> None:
    """Doubling the weight of token 6 adds the loss of token 6 alone; agreement has no weights."""
    drafter = make_drafter(method, target)
    config = LossConfig(ttt_steps=3)
    ids, mask, _ = CONVERSATIONS[0]

    def sums(mask: list[bool], weights: list[float]) -> LossSums:
        return loss_sums(
            drafter, make_batch(target, drafter, [(ids, mask, weights)]), target, config
        )

    ones = [1.0] * 12
    doubled = [2.0 if i == 6 else 1.0 for i in range(12)]
    alone = sums([i == 6 for i in range(12)], ones)
    plain, weighted = sums(mask, ones), sums(mask, doubled)
    torch.testing.assert_close(weighted.total, plain.total + alone.total)
    assert alone.total > 0
    assert weighted.agreeing.tolist() == plain.agreeing.tolist()
    assert weighted.counted.tolist() == plain.counted.tolist() == [5, 4, 3]


def test_what_cannot_be_drafted_costs_nothing_and_counts_as_missed(
    target: TransformersTarget,
) -> None:
    drafter = make_drafter("eagle3", target, CHOSEN)
    batch = make_batch(target, drafter, CONVERSATIONS[:1])
    choices = target.logits(batch.hidden_states[0]).argmax(-1).tolist()
    outside = torch.tensor(sorted(set(range(260)) - set(choices)))
    drafter = make_drafter("eagle3", target, outside)
    sums = loss_sums(drafter, batch, target, LossConfig(ttt_steps=3))
    assert sums.total.item() == 0
    assert sums.counted.tolist() == [5, 4, 3]
    assert sums.agreeing.tolist() == [0, 0, 0]
    assert all(g.abs().sum() == 0 for g in gradients(drafter, sums).values())


@pytest.mark.parametrize("method", METHODS)
def test_measuring_is_the_loss_without_gradient(target: TransformersTarget, method: str) -> None:
    drafter = make_drafter(method, target)
    batch = make_batch(target, drafter, CONVERSATIONS)
    config = LossConfig(ttt_steps=2)
    trained = loss_sums(drafter, batch, target, config)
    measured = measure(drafter, batch, target, 5, config)
    assert not measured.total.requires_grad
    torch.testing.assert_close(measured.total, trained.total.detach())
    assert measured.parts.keys() == trained.parts.keys()
    assert len(measured.agreeing) == len(measured.counted) == 5
    assert measured.counted[:2].tolist() == trained.counted.tolist()
    assert len(measure(drafter, batch, target, 1, config).counted) == 2  # what is trained, at least


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_that_is_always_right(method: str) -> None:
    """Of a target that always chooses token 0; EAGLE drafts with its head, EAGLE-3 nothing else."""
    target = make_target("llama")
    target.model.lm_head.weight.data.zero_()
    only = torch.tensor([0]) if method == "eagle3" else None
    drafter = make_drafter(method, target, only)
    batch = make_batch(target, drafter, CONVERSATIONS)
    sums = measure(drafter, batch, target, 4, LossConfig(ttt_steps=1))
    assert sums.agreeing.tolist() == sums.counted.tolist() == [9, 5, 3, 2]
    assert estimated_acceptance_length(sums.agreeing, sums.counted) == 5.0


def test_estimated_acceptance_length_by_hand() -> None:
    """1 + 8/10 + 4/8 + 1/4; what was never counted adds nothing."""
    agreeing, counted = torch.tensor([8, 4, 1, 0]), torch.tensor([10, 8, 4, 0])
    assert estimated_acceptance_length(agreeing, counted) == pytest.approx(2.55)
    assert estimated_acceptance_length(torch.zeros(3), torch.zeros(3)) == 1.0


@pytest.mark.parametrize("method", METHODS)
def test_gradient_checkpointing_changes_nothing(target: TransformersTarget, method: str) -> None:
    drafter = make_drafter(method, target)
    batch = make_batch(target, drafter, CONVERSATIONS)
    plain, recomputed = (
        gradients(
            drafter,
            loss_sums(
                drafter, batch, target, LossConfig(ttt_steps=4, gradient_checkpointing=choice)
            ),
        )
        for choice in (False, True)
    )
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient)


@pytest.mark.parametrize("method", METHODS)
def test_noise_is_on_what_is_read_alone(target: TransformersTarget, method: str) -> None:
    """Noise on the last two positions reaches nothing; elsewhere the first draft step changes."""
    drafter = make_drafter(method, target)
    batch = make_batch(target, drafter, CONVERSATIONS[:1])
    config = LossConfig(ttt_steps=2)
    read = batch.aux_states if method == "eagle3" else batch.hidden_states
    plain = loss_sums(drafter, batch, target, config).total
    noise = torch.zeros_like(read)
    noise[:, -2:] = 1
    assert loss_sums(drafter, batch, target, config, noise).total == plain
    noise[:, 2] = 1
    assert loss_sums(drafter, batch, target, config, noise).total != plain


@pytest.mark.parametrize("method", METHODS)
def test_conversations_shorter_than_a_draft(target: TransformersTarget, method: str) -> None:
    drafter = make_drafter(method, target)
    batch = make_batch(target, drafter, CONVERSATIONS[2:3])  # 3 tokens, the last supervised
    sums = loss_sums(drafter, batch, target, LossConfig(ttt_steps=7))
    assert sums.counted.tolist() == [1, 0, 0, 0, 0, 0, 0]
    assert len(sums.agreeing) == 7
    if method == "eagle3":
        assert list(sums.parts) == [f"step_{step}" for step in range(7)]
        assert [part.item() > 0 for part in sums.parts.values()] == [True] + [False] * 6


@pytest.mark.parametrize("method", METHODS)
def test_nothing_supervised_gives_zero_and_still_reaches_every_weight(
    target: TransformersTarget, method: str
) -> None:
    """A rank without a supervised token must still take part in the gradient's reduction."""
    drafter = make_drafter(method, target)
    sums = loss_sums(
        drafter, make_batch(target, drafter, CONVERSATIONS[3:]), target, LossConfig(ttt_steps=2)
    )
    assert sums.total.item() == 0
    assert sums.counted.tolist() == [0, 0]
    assert all(gradient.abs().sum() == 0 for gradient in gradients(drafter, sums).values())


def test_states_in_half_precision(target: TransformersTarget) -> None:
    """Cached states are bfloat16; the drafter computes in its own type."""
    drafter = make_drafter("eagle3", target)
    batch = make_batch(target, drafter, CONVERSATIONS)
    half = Batch(
        input_ids=batch.input_ids,
        loss_mask=batch.loss_mask,
        weights=batch.weights,
        hidden_states=batch.hidden_states.bfloat16(),
        aux_states=batch.aux_states.bfloat16(),
    )
    config = LossConfig(ttt_steps=3)
    total = loss_sums(drafter, half, target, config).total
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(
        loss_sums(drafter, batch, target, config).total.item(), rel=0.03
    )
