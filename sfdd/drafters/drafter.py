"""What the kinds of drafters share: how they are read, rolled forward, and written for engines.

A drafter turns what the target knows of a position into a state of its own (`fuse`), that state and the
embedding of the following token into the next state (`forward`), and a state into logits over the
tokens it can draft (`head`). Drafting repeats the second with its own states.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch
from safetensors.torch import save
from torch import Tensor, nn

from sfdd.artifacts import Provenance, atomic_path, write_text
from sfdd.drafters.attention import KeysAndValues
from sfdd.drafters.layer import drafter_body
from sfdd.errors import DrafterError
from sfdd.targets.body import run_body

if TYPE_CHECKING:
    from transformers import Cache, LlamaConfig

CONFIG, WEIGHTS, PROVENANCE = "config.json", "model.safetensors", "provenance.json"


class TargetHead(Protocol):
    """What a drafter shares with its target; a `TransformersTarget` is one."""

    @property
    def embedding(self) -> nn.Embedding: ...

    @property
    def rows_per_chunk(self) -> int: ...

    def logits(self, hidden_states: Tensor) -> Tensor: ...  # [N, H] -> [N, V]


@dataclass(frozen=True)
class Head:
    """From states to logits over the D draft tokens, and the trained weights that do it."""

    logits: Callable[..., Tensor]  # (states [N, H], *parameters) -> [N, D]
    parameters: tuple[Tensor, ...] = ()

    def __call__(self, states: Tensor) -> Tensor:
        return self.logits(states, *self.parameters)


class Drafter(nn.Module):
    """A draft model of one Llama layer.

    Attributes:
        method: as in `--method`, and as engines call it.
        config: what its config.json says.
        aux_layers: ids of the target's layers whose hidden states it reads; none: it reads the last
            hidden states, after the target's final norm.
        draft_to_target: int64 [D], ascending: the target's ids of the tokens it can draft; None: all.
    """

    method: ClassVar[str]
    architecture: ClassVar[str]

    def __init__(self, config: "LlamaConfig") -> None:
        super().__init__()
        self.config = config
        self.body = drafter_body(config)
        self.aux_layers: tuple[int, ...] = ()
        self.draft_to_target: Tensor | None = None

    def fuse(self, target_states: Tensor) -> Tensor:  # [B, T, H or A * H] -> [B, T, H]
        """The states that the first draft step reads."""
        raise NotImplementedError

    def layer_input(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """What the layer is given for embeddings and states [B, T, H]."""
        raise NotImplementedError

    def normed(self, states: Tensor) -> Tensor:  # [..., H] -> [..., H]
        """What the head reads of the states."""
        raise NotImplementedError

    def head(self, target: TargetHead) -> Head:
        """The head for `normed` states."""
        raise NotImplementedError

    def weights(self) -> dict[str, Tensor]:
        """Tensors under the names by which engines load them, on the CPU."""
        raise NotImplementedError

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Inverse of `weights`; raises ValueError or RuntimeError where they are not this drafter's."""
        raise NotImplementedError

    def forward(
        self,
        embeddings: Tensor,  # [B, T, H] of the tokens one position later
        states: Tensor,  # [B, T, H], fused, or the drafter's own
        attention_mask: Tensor | None = None,  # [B, T], 1 = token
        cache: "Cache | None" = None,
    ) -> Tensor:  # [B, T, H]
        """The drafter's own next states; with a `cache`, the input continues what it holds."""
        return run_body(
            self.body,
            inputs_embeds=self.layer_input(embeddings, states),
            attention_mask=attention_mask,
            cache=cache,
        )

    def draft_step(
        self,
        embeddings: Tensor,  # [B, T, H] of the tokens that this step reads, by base position
        states: Tensor,  # [B, T, H], of the step before
        earlier: Sequence[KeysAndValues],
    ) -> tuple[Tensor, KeysAndValues]:  # [B, T, H]
        """One draft step at base positions 0 to T - 1 at once; see `attention`.

        Step j is the one with j `earlier` steps; its states are those that drafting from each base
        position by itself, with a KV cache, would give. Also gives the keys and values of this step.
        """
        steps = list(earlier)
        positions = torch.arange(states.shape[1], device=states.device) + len(steps)
        states = run_body(
            self.body,
            inputs_embeds=self.layer_input(embeddings, states),
            position_ids=positions[None],
            steps=steps,
        )
        return states, steps[-1]

    def save(self, directory: Path, provenance: Provenance) -> None:
        """Write config.json, model.safetensors and provenance.json, each atomically.

        Raises:
            DrafterError: the weights are not finite.
        """
        weights = self.weights()
        if not all(bool(tensor.isfinite().all()) for tensor in weights.values()):
            raise DrafterError(
                "The drafter's weights are not finite, so it was not saved. Train it again with a "
                "lower --learning-rate and --overwrite."
            )
        with atomic_path(directory / WEIGHTS) as temporary:
            temporary.write_bytes(save(weights, metadata={"format": "pt"}))
        config = self.config.to_dict() | {"dtype": str(self.dtype).removeprefix("torch.")}
        write_text(directory / CONFIG, json.dumps(config, indent=2))
        write_text(directory / PROVENANCE, provenance.to_json())

    def as_served(self, dtype: torch.dtype) -> Self:
        """This drafter, to draft with: its weights in the target's dtype, as engines run it.

        Rotary frequencies, which are buffers, stay float32.
        """
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        return self.eval()

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        return next(self.parameters()).dtype


def cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Detached, contiguous, on the CPU: as safetensors takes them."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def renamed(tensors: Mapping[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    """With the prefix `old` of names replaced."""
    return {
        new + name.removeprefix(old) if name.startswith(old) else name: tensor
        for name, tensor in tensors.items()
    }


def ensure_present(directory: Path) -> None:
    """Raise DrafterError where the directory holds no drafter."""
    if not (directory / CONFIG).is_file():
        raise DrafterError(f"No drafter in {directory}. Train one with 'sfdd train-draft'.")


def read_provenance(directory: Path) -> Provenance:
    """The provenance of a saved drafter; raises DrafterError where it is missing or damaged."""
    ensure_present(directory)
    try:
        return Provenance.from_json((directory / PROVENANCE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DrafterError(
            f"The drafter in {directory} has no readable {PROVENANCE}. "
            "Train it again with 'sfdd train-draft --overwrite'."
        ) from error


def target_mismatch(provenance: Provenance, identity: Mapping[str, Any]) -> list[str]:
    """In what a drafter's target differs from the one at hand; dtype may differ."""
    wanted = {k: v for k, v in provenance.identity.items() if k in identity and k != "dtype"}
    return Provenance(wanted).differences(Provenance({k: identity[k] for k in wanted}))
