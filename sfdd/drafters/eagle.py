"""The EAGLE draft model (Li et al., arXiv 2401.15077): one decoder layer that predicts hidden states.

At position t it reads the embedding of token t+1 and the target's last hidden state h_t, and predicts
h_{t+1}; the target's own head turns that into the distribution of token t+2. Embeddings and head are
the target's, frozen and shared, so a drafter holds only `fc` and one layer of the target's own kind.
"""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from sfdd.artifacts import Provenance, atomic_path, write_text
from sfdd.errors import DrafterError, TargetError
from sfdd.targets.body import run_body

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedConfig

    from sfdd.targets.transformers_target import TransformersTarget

_WEIGHTS = "model.safetensors"
_PROVENANCE = "provenance.json"


class EagleDrafter(nn.Module):
    """`fc` and one decoder layer, without input norm and final norm, as the engines load it.

    The layer is transformers' own for the target's architecture, run by transformers' own body, so
    attention heads, RoPE scaling, masks and KV cache are right for every Llama-like family.
    """

    def __init__(self, config: "PreTrainedConfig") -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        # Embeddings are the target's: build the body with a vocabulary of one and drop it.
        body_config = copy.deepcopy(config)
        body_config.update({"vocab_size": 1, "pad_token_id": None})
        self.body = AutoModel.from_config(body_config, dtype=torch.float32)
        layers = getattr(self.body, "layers", [None])
        llama_like = all(hasattr(self.body, name) for name in ("embed_tokens", "norm"))
        if not (llama_like and hasattr(layers[0], "input_layernorm")):
            raise TargetError(
                f"An EAGLE drafter needs a Llama-like target; {config.model_type} is not built of "
                "embed_tokens, layers with an input_layernorm, and norm."
            )
        self.body.embed_tokens, self.body.norm = nn.Identity(), nn.Identity()
        layers[0].input_layernorm = nn.Identity()

    @classmethod
    def for_target(cls, target: "TransformersTarget", seed: int = 0) -> "EagleDrafter":
        """A new, untrained drafter of the target's shape, on its device; `seed` fixes its weights."""
        config = copy.deepcopy(target.config)
        config.update({"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]})
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[-1:]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(config).to(target.device)

    def forward(
        self,
        embeddings: Tensor,  # [B, T, H] of the tokens one position later
        hidden_states: Tensor,  # [B, T, H]
        attention_mask: Tensor | None = None,  # [B, T], 1 = token
        cache: "Cache | None" = None,
    ) -> Tensor:  # [B, T, H]
        """Predicted next hidden states; with a `cache`, the input continues what it holds."""
        joined = torch.cat([embeddings, hidden_states], dim=-1).to(self.fc.weight.dtype)
        return run_body(
            self.body, inputs_embeds=self.fc(joined), attention_mask=attention_mask, cache=cache
        )

    def save(self, directory: Path, provenance: Provenance) -> None:
        """Write config.json, model.safetensors and provenance.json, each atomically.

        Raises:
            DrafterError: the weights are not finite.
        """
        if not all(bool(parameter.isfinite().all()) for parameter in self.parameters()):
            raise DrafterError(
                "The drafter's weights are not finite, so it was not saved. Train it again with a "
                "lower --learning-rate and --overwrite."
            )
        # The body's prefix is ours alone: engines expect `fc.weight` and `layers.0.…`.
        weights = {
            name.removeprefix("body."): tensor.detach().cpu().contiguous()
            for name, tensor in self.state_dict().items()
        }
        with atomic_path(directory / _WEIGHTS) as temporary:
            temporary.write_bytes(save(weights, metadata={"format": "pt"}))
        write_text(directory / "config.json", json.dumps(self.config.to_dict(), indent=2))
        write_text(directory / _PROVENANCE, provenance.to_json())

    @classmethod
    def load(cls, directory: Path, target: "TransformersTarget") -> "EagleDrafter":
        """Read a drafter for `target`.

        Raises:
            DrafterError: it is missing or damaged, or its vocabulary or hidden size is not the target's.
        """
        _ensure_present(directory)
        try:
            config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
            weights = load_file(directory / _WEIGHTS)
            if not all(bool(tensor.isfinite().all()) for tensor in weights.values()):
                raise ValueError("some of its weights are not finite")
        except (OSError, ValueError, SafetensorError) as error:
            raise DrafterError(
                f"The drafter in {directory} is damaged: {error}. Train it again with "
                "'sfdd train-draft --overwrite'."
            ) from error
        for what, ours, theirs in (
            ("vocabulary", config.vocab_size, target.vocab_size),
            ("hidden size", config.hidden_size, target.hidden_size),
        ):
            if ours != theirs:
                raise DrafterError(
                    f"The drafter in {directory} has a {what} of {ours}, but target "
                    f"{target.source.name} one of {theirs}. Use the target it was trained for."
                )
        drafter = cls(config)
        prefixed = {n if n.startswith("fc.") else f"body.{n}": t for n, t in weights.items()}
        try:
            drafter.load_state_dict(prefixed)
        except RuntimeError as error:
            raise DrafterError(
                f"The drafter in {directory} does not fit its own config.json: {error}"
            ) from error
        return drafter.to(target.device)


def _ensure_present(directory: Path) -> None:
    if not (directory / "config.json").is_file():
        raise DrafterError(f"No drafter in {directory}. Train one with 'sfdd train-draft'.")


def read_provenance(directory: Path) -> Provenance:
    """The provenance of a saved drafter; raises DrafterError where it is missing or damaged."""
    _ensure_present(directory)
    try:
        return Provenance.from_json((directory / _PROVENANCE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DrafterError(
            f"The drafter in {directory} has no readable {_PROVENANCE}. "
            "Train it again with 'sfdd train-draft --overwrite'."
        ) from error


def target_mismatch(provenance: Provenance, identity: Mapping[str, Any]) -> list[str]:
    """In what a drafter's target differs from the one at hand; dtype may differ."""
    wanted = {k: v for k, v in provenance.identity.items() if k in identity and k != "dtype"}
    return Provenance(wanted).differences(Provenance({k: identity[k] for k in wanted}))
