"""The EAGLE-3 draft model (Li et al., arXiv 2503.01840): fused layers of the target, and its own head.

At base position i it reads the hidden states of three of the target's layers, fused by `fc`, and the
embedding of token i+1; its head gives the distribution of token i+2. Drafting goes on from its own
states, which it was trained to do (training-time test). It drafts only the tokens of its vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from sfdd.drafters.drafter import Drafter, Head, TargetHead, cpu, renamed
from sfdd.drafters.layer import drafter_config
from sfdd.errors import UsageError

if TYPE_CHECKING:
    from transformers import LlamaConfig

    from sfdd.targets.transformers_target import TransformersTarget

_NUM_AUX_LAYERS = 3
_BODY, _ENGINE = "body.layers.0.", "midlayer."


class _MidLayer(LlamaDecoderLayer):  # type: ignore[misc]
    """A Llama layer whose attention reads two states side by side: an embedding and a hidden state."""

    def __init__(self, config: "LlamaConfig") -> None:
        super().__init__(config, layer_idx=0)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            width = getattr(self.self_attn, name).out_features
            projection = nn.Linear(2 * config.hidden_size, width, bias=False)
            setattr(self.self_attn, name, projection)

    def forward(
        self, hidden_states: Tensor, **attention: Any
    ) -> Tensor:  # [B, T, 2 H] -> [B, T, H]
        embeddings, states = hidden_states.chunk(2, dim=-1)
        joined = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(states)], dim=-1)
        attended, _ = self.self_attn(hidden_states=joined, **attention)
        states = states + attended
        return states + self.mlp(self.post_attention_layernorm(states))


class Eagle3Drafter(Drafter):
    """`fc`, one decoder layer with norms for both of its inputs, a final norm, and a head."""

    method = "eagle3"
    architecture = "LlamaForCausalLMEagle3"
    draft_to_target: Tensor

    def __init__(self, config: "LlamaConfig") -> None:
        super().__init__(config)
        self.aux_layers = tuple(config.eagle_aux_hidden_state_layer_ids)
        hidden_size, vocabulary = config.hidden_size, config.draft_vocab_size
        self.fc = nn.Linear(len(self.aux_layers) * hidden_size, hidden_size, bias=False)
        self.body.layers[0] = _MidLayer(self.body.config)
        self.norm = LlamaRMSNorm(hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden_size, vocabulary, bias=False)
        del self.draft_to_target
        self.register_buffer("draft_to_target", torch.arange(vocabulary))

    @classmethod
    def for_target(
        cls,
        target: "TransformersTarget",
        seed: int = 0,
        aux_layers: Sequence[int] | None = None,
        draft_to_target: Tensor | None = None,  # int64 [D], ascending; None: every token
    ) -> "Eagle3Drafter":
        """A new, untrained drafter of the target's sizes, on its device; `seed` fixes its weights.

        Its head starts as the rows of the target's own head. Its final norm starts with gains by which
        logits of random states spread by about 1: gains of 1 make a head of large rows sure of what it
        does not know yet, and it learns more slowly than from random rows.

        Raises:
            UsageError: `aux_layers` are not three distinct layers of the target.
        """
        config = drafter_config(target, cls.architecture)
        layers = _checked_aux_layers(aux_layers, target.config.num_hidden_layers)
        if draft_to_target is None:
            draft_to_target = torch.arange(target.vocab_size)
        config.update(_engine_settings(config, layers, len(draft_to_target)))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            drafter = cls(config).to(target.device)
        drafter.draft_to_target.copy_(draft_to_target)
        rows = (
            target.model.get_output_embeddings().weight[drafter.draft_to_target].float()
        )  # [D, H]
        drafter.lm_head.weight.data.copy_(rows)
        drafter.norm.weight.data.fill_(1 / float(rows.norm(dim=-1).mean().clamp(min=1e-3)))
        return drafter

    def fuse(self, target_states: Tensor) -> Tensor:  # [B, T, A * H] -> [B, T, H]
        return self.fc(target_states.to(self.dtype))

    def layer_input(self, embeddings: Tensor, states: Tensor) -> Tensor:  # [B, T, 2 H]
        return torch.cat([embeddings.to(states.dtype), states], dim=-1)

    def normed(self, states: Tensor) -> Tensor:
        return self.norm(states)

    def head(self, target: TargetHead) -> Head:
        return Head(_logits, (self.lm_head.weight,))

    def weights(self) -> dict[str, Tensor]:
        state = self.state_dict()
        chosen = state.pop("draft_to_target").cpu()  # [D]
        weights = cpu(renamed(state, _BODY, _ENGINE))
        if len(chosen) == self.config.vocab_size:
            return weights  # vLLM stops at maps that map nothing
        drafted = torch.zeros(self.config.vocab_size, dtype=torch.bool)
        return weights | {
            "d2t": chosen - torch.arange(len(chosen)),  # offsets
            "t2d": drafted.index_fill(0, chosen, True),
        }

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        tensors = dict(weights)
        chosen = _checked_vocabulary(
            tensors.pop("d2t", None), tensors.pop("t2d", None), self.config
        )
        self.load_state_dict(renamed(tensors, _ENGINE, _BODY) | {"draft_to_target": chosen})


def _logits(states: Tensor, weight: Tensor) -> Tensor:  # [N, H], [D, H] -> [N, D]
    logits = F.linear(states, weight)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer; those that engines take where a drafter names none: 2, n/2, n-3.

    Layer id i is the residual stream after i layers. Of fewer than 7 layers, those are not distinct.
    """
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    if num_layers > _NUM_AUX_LAYERS:
        return (1, num_layers // 2, num_layers - 1)
    return tuple(range(1, num_layers + 1))


def _checked_aux_layers(aux_layers: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    if aux_layers is None:
        return default_aux_layers(num_layers)
    layers = tuple(sorted(set(aux_layers)))
    count = min(_NUM_AUX_LAYERS, num_layers)
    if (
        len(layers) != len(aux_layers)
        or len(layers) != count
        or min(layers) < 1
        or max(layers) > num_layers
    ):
        raise UsageError(
            f"--aux-layers is {','.join(map(str, aux_layers))}; it must be {count} different layers "
            f"of the target, from 1 to {num_layers}."
        )
    return layers


def _engine_settings(
    config: "LlamaConfig", layers: tuple[int, ...], vocabulary: int
) -> dict[str, Any]:
    """What engines look up in config.json, written out since their defaults differ."""
    return {
        "draft_vocab_size": vocabulary,
        "target_hidden_size": config.hidden_size,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "norm_output": False,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(layers),
        },
    }


def _checked_vocabulary(d2t: Tensor | None, t2d: Tensor | None, config: "LlamaConfig") -> Tensor:
    """`draft_to_target` from the maps of a file; raises ValueError where they are not such maps."""
    if d2t is None and t2d is None and config.draft_vocab_size == config.vocab_size:
        return torch.arange(config.vocab_size)
    if d2t is None or d2t.shape != (config.draft_vocab_size,):
        raise ValueError(f"d2t is not a map of {config.draft_vocab_size} tokens")
    chosen = d2t.long() + torch.arange(len(d2t))
    ascending = bool((chosen.diff() > 0).all())
    if not ascending or chosen[0] < 0 or chosen[-1] >= config.vocab_size:
        raise ValueError(
            "d2t does not hold the offsets of ascending ids of the target's vocabulary"
        )
    if t2d is not None and not torch.equal(t2d.nonzero()[:, 0], chosen):
        raise ValueError("d2t and t2d name different tokens")
    return chosen
