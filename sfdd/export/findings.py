"""What an engine would reject of a drafter's directory, or load as something else: a sentence for each.

Engines check little. A tensor that is missing stays as the memory was, one of another name is skipped or
stops the start, and a map of another kind is taken for the right one. What is served stays right; only
fewer drafts are accepted, so nobody would notice.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sfdd.drafters.serving import why_not_served
from sfdd.export.checkpoint import Checkpoint
from sfdd.export.config import ENGINES
from sfdd.export.eagle3 import aux_layer_findings, vocabulary_findings
from sfdd.export.layer import layer_findings
from sfdd.export.layouts import (
    ALSO,
    ARCHITECTURES,
    EAGLE3,
    NO_SIZES,
    Sizes,
    by_sfdds_names,
    expected_tensors,
    export_again,
    method_of,
    optional_tensors,
    sizes_of,
)

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MAPS = {"d2t": torch.int64, "t2d": torch.bool}


@dataclass(frozen=True)
class TargetFacts:
    """What a drafter has in common with its target.

    Attributes:
        model_type: its family, as transformers calls it.
        drafter: the config.json of a new drafter for it; None where none can be made.
    """

    model_type: str
    vocabulary: int
    hidden: int
    layers: int
    drafter: Mapping[str, Any] | None


def findings(
    checkpoint: Checkpoint, engine: str, target: TargetFacts | None = None
) -> Iterator[str]:
    """Everything about a drafter that an engine would not take for what it is meant to be.

    Args:
        engine: "vllm" or "sglang".
        target: compare with it, too.
    """
    method = method_of(checkpoint)
    yield from _pickles(checkpoint)
    yield from _kind(checkpoint.config, engine, method)
    try:
        sizes = sizes_of(checkpoint.config)
    except NO_SIZES as error:
        yield f"config.json lacks a size that every engine needs, or it is no number ({error})."
        return
    yield from layer_findings(checkpoint.config, engine, method, target.drafter if target else None)
    if checkpoint.config.get("num_hidden_layers") != 1:
        return  # said; of more layers nothing is known here
    tensors = checkpoint.tensors
    if engine == "vllm":
        tensors = by_sfdds_names(tensors, method)
    if not checkpoint.config.get("draft_vocab_size") and "lm_head.weight" in tensors:
        sizes = replace(sizes, draft_vocabulary=len(tensors["lm_head.weight"]))  # said already
    expected = expected_tensors(method, engine, sizes)
    known = optional_tensors(method, engine, sizes) | expected
    yield from _names(tensors, expected, [name for name in tensors if name not in known], engine)
    yield from _shapes(tensors, known, engine)
    yield from _values({n: t for n, t in tensors.items() if n in known}, checkpoint.config)
    if method == EAGLE3:
        yield from aux_layer_findings(checkpoint.config, engine, target.layers if target else None)
        yield from vocabulary_findings(tensors.get("d2t"), tensors.get("t2d"), sizes)
    if target:
        yield from _target(sizes, target)
        if engine == "vllm" and (reason := why_not_served(method, target.model_type)):
            yield reason


def _pickles(checkpoint: Checkpoint) -> Iterator[str]:
    for name in checkpoint.files:
        if name.endswith(_PICKLES):
            yield (
                f"{name} is a pickle, which can run code when it is opened, and engines read those, "
                "too: remove it."
            )


def _kind(config: Mapping[str, Any], engine: str, method: str) -> Iterator[str]:
    """Whether the engine finds the class that loads such a drafter."""
    wanted, found = [ARCHITECTURES[method, engine]], config.get("architectures")
    also = [[name] for name in ALSO.get((method, engine), ())]
    if found not in [wanted, *also]:
        yield (
            f"config.json has architectures {found}, but {ENGINES[engine]} loads what sfdd trains as "
            f"{wanted}: if this is that, {export_again(engine)}."
        )
    if config.get("model_type") != "llama":
        found = config.get("model_type")
        yield f"config.json has model_type {found!r}, but the drafters that sfdd trains are 'llama'."


def _names(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    unknown: list[str],
    engine: str,
) -> Iterator[str]:
    """Tensors that are missing, under another name, or unknown."""
    name = ENGINES[engine]
    for missing in (tensor for tensor in expected if tensor not in tensors):
        alike = [other for other in unknown if tuple(tensors[other].shape) == expected[missing]]
        near = difflib.get_close_matches(missing, alike, n=1, cutoff=0.5)
        if near:
            unknown.remove(near[0])
            yield f"{missing} is missing, and {near[0]} is like it: {name} knows the first name alone."
        elif missing == "d2t":
            yield f"{missing} is missing, so {name} takes draft tokens for the target's first tokens."
        else:
            yield f"{missing} is missing, and {name} would run with what memory holds in its place."
    for tensor in unknown:
        if tensor == "d2t":
            yield (
                f"{tensor} maps a draft vocabulary, but draft_vocab_size is the whole one, and {name} "
                f"stops at a map that it has no use for: {export_again(engine)}."
            )
        elif engine == "sglang" or tensor.endswith(".bias"):
            yield f"{tensor} is unknown to {name}, which leaves it out without a word: remove it."
        else:
            yield f"{tensor} is unknown to {name}, which stops at it: remove it."


def _shapes(
    tensors: Mapping[str, Tensor], known: Mapping[str, tuple[int, ...]], engine: str
) -> Iterator[str]:
    for name, wanted in known.items():
        shape = tuple(tensors[name].shape) if name in tensors else wanted
        if shape == wanted:
            continue
        if name in _MAPS and len(shape) == 1:
            size = "draft_vocab_size" if name == "d2t" else "vocab_size"
            yield f"{name} has {shape[0]} entries, but config.json a {size} of {wanted[0]}."
        else:
            yield (
                f"{name} is {list(shape)}, but by its sizes in config.json {ENGINES[engine]} makes "
                f"it {list(wanted)}."
            )


def _values(known: Mapping[str, Tensor], config: Mapping[str, Any]) -> Iterator[str]:
    """Dtypes, and whether the weights are finite."""
    weights = {name: tensor for name, tensor in known.items() if name not in _MAPS}
    for name, tensor in known.items():
        if name in _MAPS and tensor.dtype != _MAPS[name]:
            yield f"{name} is of {_called(tensor.dtype)}, but must be of {_called(_MAPS[name])}."
        elif name in weights and tensor.dtype not in _FLOATS:
            yield f"{name} is of {_called(tensor.dtype)}, but weights are of 16 or 32 bits."
        elif name in weights and not bool(tensor.isfinite().all()):
            yield (
                f"{name} has values that are not finite: export in bfloat16 rather than float16, or "
                "train again with a lower --learning-rate."
            )
    dtypes = sorted({_called(tensor.dtype) for tensor in weights.values()})
    if len(dtypes) > 1:
        yield f"The weights are of {' and '.join(dtypes)}; they must be of one dtype."
    elif config.get("dtype") and dtypes and dtypes != [config["dtype"]]:
        yield f"config.json has dtype {config['dtype']}, but the weights are of {dtypes[0]}."


def _target(sizes: Sizes, target: TargetFacts) -> Iterator[str]:
    for what, ours, theirs in (
        ("vocab_size", sizes.vocabulary, target.vocabulary),
        ("target_hidden_size", sizes.target_hidden, target.hidden),
        ("hidden_size", sizes.hidden, target.hidden),  # embeddings are the target's
    ):
        if ours != theirs:
            yield (
                f"config.json has a {what} of {ours}, but the target one of {theirs}: use the target "
                "that it was trained for."
            )


def _called(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
