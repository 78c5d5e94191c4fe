"""A new drafter for a target, or one from a directory, of either kind."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from sfdd.drafters.drafter import WEIGHTS, Drafter, ensure_present
from sfdd.drafters.eagle import EagleDrafter
from sfdd.drafters.eagle3 import Eagle3Drafter
from sfdd.errors import DrafterError, UsageError

if TYPE_CHECKING:
    from sfdd.targets.transformers_target import TransformersTarget

_KINDS: Mapping[str, type[EagleDrafter] | type[Eagle3Drafter]] = {
    kind.architecture: kind for kind in (EagleDrafter, Eagle3Drafter)
}
METHODS = tuple(kind.method for kind in _KINDS.values())


def new_drafter(
    method: str,
    target: "TransformersTarget",
    *,
    seed: int = 0,
    aux_layers: Sequence[int] | None = None,
    draft_to_target: Tensor | None = None,  # int64 [D], ascending
) -> Drafter:
    """An untrained drafter of the target's sizes, on its device, in float32.

    Args:
        method: one of `METHODS`.
        seed: fixes its weights.
        aux_layers: the target's layers that EAGLE-3 reads; None for a low, a middle and a high one.
        draft_to_target: the tokens that EAGLE-3 can draft; None for all.

    Raises:
        UsageError: there is no such method, the target has no such layers, or EAGLE is given some.
        TargetError: no drafter can be made for such a target.
    """
    if method == Eagle3Drafter.method:
        return Eagle3Drafter.for_target(target, seed, aux_layers, draft_to_target)
    if method != EagleDrafter.method:
        raise UsageError(f"--method is {method!r}; choose one of {', '.join(METHODS)}.")
    if aux_layers is not None or draft_to_target is not None:
        raise UsageError(
            "--method eagle reads the target's last hidden states and drafts with its head; auxiliary "
            "layers and a draft vocabulary are for --method eagle3."
        )
    return EagleDrafter.for_target(target, seed)


def untrained_like(drafter: Drafter, target: "TransformersTarget", seed: int) -> Drafter:
    """An untrained drafter of the same kind, layers and vocabulary."""
    return new_drafter(
        drafter.method,
        target,
        seed=seed,
        aux_layers=drafter.aux_layers or None,
        draft_to_target=drafter.draft_to_target,
    )


def load_drafter(directory: Path, target: "TransformersTarget") -> Drafter:
    """Read a drafter for `target`, of the kind that its config.json names.

    Raises:
        DrafterError: it is missing or damaged, or its vocabulary, hidden size or layers are not the
            target's.
    """
    ensure_present(directory)
    try:
        config = LlamaConfig.from_pretrained(directory)
        kind = _kind(config)
        weights = load_file(directory / WEIGHTS)
        if not all(bool(tensor.isfinite().all()) for tensor in weights.values()):
            raise ValueError("some of its weights are not finite")
    except (OSError, ValueError, SafetensorError, StrictDataclassError) as error:
        raise DrafterError(
            f"The drafter in {directory} is damaged: {error}. Train it again with "
            "'sfdd train-draft --overwrite'."
        ) from error
    _check_sizes(directory, config, target)
    drafter = kind(config)
    try:
        drafter.load_weights(weights)
    except (RuntimeError, ValueError) as error:
        raise DrafterError(
            f"The drafter in {directory} does not fit its own config.json: {error}"
        ) from error
    return drafter.to(target.device)


def _kind(config: LlamaConfig) -> type[EagleDrafter] | type[Eagle3Drafter]:
    name = (getattr(config, "architectures", None) or ["no architecture"])[0]
    if name not in _KINDS:
        raise ValueError(f"its config.json names {name}, not one of {', '.join(_KINDS)}")
    if _KINDS[name] is Eagle3Drafter:
        for key in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids"):
            if not getattr(config, key, None):
                raise ValueError(f"its config.json has no {key}")
    return _KINDS[name]


def _check_sizes(directory: Path, config: LlamaConfig, target: "TransformersTarget") -> None:
    for what, ours, theirs in (
        ("vocabulary", config.vocab_size, target.vocab_size),
        ("hidden size", config.hidden_size, target.hidden_size),
    ):
        if ours != theirs:
            raise DrafterError(
                f"The drafter in {directory} has a {what} of {ours}, but target "
                f"{target.source.name} one of {theirs}. Use the target it was trained for."
            )
    highest = max(getattr(config, "eagle_aux_hidden_state_layer_ids", None) or [0])
    if highest > target.config.num_hidden_layers:
        raise DrafterError(
            f"The drafter in {directory} reads layer {highest}, but target {target.source.name} has "
            f"{target.config.num_hidden_layers}. Use the target it was trained for."
        )
