"""The hidden states that EAGLE-3 reads: the residual stream after some of the target's layers."""

import pytest
import torch
from drafters.targets import TARGETS, make_target

from sfdd.errors import TargetError
from sfdd.targets.body import new_cache


@pytest.mark.parametrize("name", TARGETS)
@torch.no_grad()
def test_layer_i_is_the_stream_after_i_layers(name: str) -> None:
    """As transformers numbers them, 0 being the embeddings; but the last before the final norm."""
    target = make_target(name)
    ids = torch.randint(3, 260, (2, 20))
    output = target.model(ids, output_hidden_states=True)
    last, aux = target.hidden_and_aux_states(ids, aux_layers=(1, 2, 4))
    assert aux.shape == (2, 20, 3 * 32)
    first, second, fourth = aux.split(32, dim=-1)
    torch.testing.assert_close(first, output.hidden_states[1])
    torch.testing.assert_close(second, output.hidden_states[2])
    assert torch.equal(last, target.hidden_states(ids))
    body = getattr(target.model, target.model.base_model_prefix)
    norm = body.final_layer_norm if name == "gpt_neox" else body.norm
    torch.testing.assert_close(norm(fourth), last)
    assert not torch.allclose(fourth, last)


@torch.no_grad()
def test_in_the_order_asked_for_and_with_a_cache() -> None:
    target = make_target("llama")
    ids = torch.randint(3, 260, (1, 20))
    last, whole = target.hidden_and_aux_states(ids, aux_layers=(1, 3))
    _, turned = target.hidden_and_aux_states(ids, aux_layers=(3, 1))
    assert torch.equal(turned, torch.cat(whole.split(32, dim=-1)[::-1], dim=-1))
    cache = new_cache()
    pieces = [
        target.hidden_and_aux_states(ids[:, part], cache=cache, aux_layers=(1, 3))
        for part in (slice(0, 11), slice(11, 20))
    ]
    torch.testing.assert_close(torch.cat([p[0] for p in pieces], dim=1), last, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(
        torch.cat([p[1] for p in pieces], dim=1), whole, rtol=1e-3, atol=1e-4
    )


@torch.no_grad()
def test_left_padding() -> None:
    target = make_target("llama")
    ids = torch.randint(3, 260, (1, 12))
    _, expected = target.hidden_and_aux_states(ids, aux_layers=(2,))
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), ids], dim=1)
    mask = (torch.arange(15) >= 3).long()[None]
    _, aux = target.hidden_and_aux_states(padded, mask, aux_layers=(2,))
    torch.testing.assert_close(aux[:, 3:], expected)


def test_no_layers_and_nothing_left_behind() -> None:
    target = make_target("llama")
    ids = torch.randint(3, 260, (1, 5))
    assert target.hidden_and_aux_states(ids)[1] is None
    hooks = [len(layer._forward_hooks) for layer in target.model.model.layers]
    target.hidden_and_aux_states(ids, aux_layers=(1, 2))
    assert [len(layer._forward_hooks) for layer in target.model.model.layers] == hooks


@pytest.mark.parametrize("layers", [(0,), (1, 5), (-1,)])
def test_layers_that_are_not_there(layers: tuple[int, ...]) -> None:
    target = make_target("llama")
    with pytest.raises(TargetError, match="were asked for, but LlamaModel has 4 layers"):
        target.hidden_and_aux_states(torch.ones(1, 3, dtype=torch.int64), aux_layers=layers)


def test_several_streams_are_refused() -> None:
    target = make_target("llama")
    layer = target.model.model.layers[1]
    layer.register_forward_hook(lambda module, args, output: output[None])
    with pytest.raises(TargetError, match="more than one stream"):
        target.hidden_and_aux_states(torch.ones(1, 3, dtype=torch.int64), aux_layers=(2,))
    assert len(layer._forward_hooks) == 1
