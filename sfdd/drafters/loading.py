"""A new drafter for a target, or one from a directory, of either kind."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from sfdd.drafters.drafter import CONFIG, WEIGHTS, Drafter, ensure_present
from sfdd.drafters.eagle import EagleDrafter
from sfdd.drafters.eagle3 import Eagle3Drafter
from sfdd.errors import DrafterError, UsageError

if TYPE_CHECKING:
    from sfdd.targets.transformers_target import TransformersTarget

_KINDS: Mapping[str, type[EagleDrafter] | type[Eagle3Drafter]] = {
    kind.architecture: kind for kind in (EagleDrafter, Eagle3Drafter)
}
METHODS = tuple(kind.method for kind in _KINDS.values())
_OF_SGLANG = "LlamaForCausalLMEagle"


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
        DrafterError: it is missing or damaged, in another form than sfdd's own, or its vocabulary, hidden
            size or layers are not the target's.
    """
    ensure_present(directory)
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        weights = load_file(directory / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise _damaged(directory, error) from error
    return drafter_from(directory, config, weights, target)


def drafter_from(
    directory: Path,
    settings: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    target: "TransformersTarget",
) -> Drafter:
    """A drafter from what stands in its config.json and its weights; see `load_drafter` for errors.

    Args:
        directory: by which it is called in errors; nothing is read from it.
    """
    try:
        config = LlamaConfig.from_dict(dict(settings))
        kind = _kind(directory, config)
        if not all(bool(tensor.isfinite().all()) for tensor in weights.values()):
            raise ValueError("some of its weights are not finite")
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise _damaged(directory, error) from error
    _check_sizes(directory, config, target)
    drafter = kind(config)
    try:
        drafter.load_weights(weights)
    except (RuntimeError, ValueError) as error:
        # torch heads a list of all that does not fit; its first line is enough to see what is wrong.
        lines = [line.strip() for line in str(error).splitlines()]
        raise DrafterError(
            f"The drafter in {directory} does not fit its own config.json: "
            f"{lines[min(1, len(lines) - 1)].rstrip('.')}."
        ) from error
    return drafter.to(target.device)


def _damaged(directory: Path, error: Exception) -> DrafterError:
    return DrafterError(
        f"The drafter in {directory} is damaged: {error}. Train it again with "
        "'sfdd train-draft --overwrite'."
    )


def _kind(directory: Path, config: LlamaConfig) -> type[EagleDrafter] | type[Eagle3Drafter]:
    """The class that its config.json names; raises DrafterError where it is in another form."""
    name, missing = (getattr(config, "architectures", None) or ["no architecture"])[0], None
    if name == _OF_SGLANG:
        raise DrafterError(
            f"The drafter in {directory} is in SGLang's form. Give the one that it was exported from, "
            "by default RUN/drafter."
        )
    if name not in _KINDS:
        missing = f"names {name}, not one of {', '.join(_KINDS)}"
    elif _KINDS[name] is Eagle3Drafter:
        keys = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
        missing = next((f"has no {key}" for key in keys if not getattr(config, key, None)), None)
    if missing:
        raise DrafterError(
            f"The drafter in {directory} is not in the form that sfdd trains: its config.json {missing}. "
            "Give one of 'sfdd train-draft', such as RUN/drafter."
        )
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
