"""The EAGLE draft model (Li et al., arXiv 2401.15077): one decoder layer that predicts hidden states.

At position t it reads the embedding of token t+1 and the target's last hidden state h_t, and predicts
h_{t+1}; the target's own head turns that into the distribution of token t+2. Embeddings and head are
the target's, frozen and shared, so a drafter holds only `fc` and one layer.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sfdd.drafters.drafter import Drafter, Head, TargetHead, cpu, renamed
from sfdd.drafters.layer import drafter_config

if TYPE_CHECKING:
    from transformers import LlamaConfig

    from sfdd.targets.transformers_target import TransformersTarget


class EagleDrafter(Drafter):
    """`fc` and one decoder layer, without input norm and final norm, as the engines load it."""

    method = "eagle"
    architecture = "LlamaForCausalLM"

    def __init__(self, config: "LlamaConfig") -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.body.layers[0].input_layernorm = nn.Identity()

    @classmethod
    def for_target(cls, target: "TransformersTarget", seed: int = 0) -> "EagleDrafter":
        """A new, untrained drafter of the target's sizes, on its device; `seed` fixes its weights."""
        config = drafter_config(target, cls.architecture)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(config).to(target.device)

    def fuse(self, target_states: Tensor) -> Tensor:  # [B, T, H]
        return target_states

    def layer_input(self, embeddings: Tensor, states: Tensor) -> Tensor:  # [B, T, H]
        joined = torch.cat([embeddings.to(self.dtype), states.to(self.dtype)], dim=-1)
        return self.fc(joined)

    def normed(self, states: Tensor) -> Tensor:
        return states  # of the target, after its final norm

    def head(self, target: TargetHead) -> Head:
        return Head(target.logits)

    def weights(self) -> dict[str, Tensor]:
        return cpu(renamed(self.state_dict(), "body.", ""))

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self.load_state_dict(renamed(weights, "layers.", "body.layers."))
