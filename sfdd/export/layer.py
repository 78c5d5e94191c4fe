"""What an engine would run otherwise than it was trained: the settings of a drafter's one layer.

Engines can do more to a layer than sfdd's drafters are trained with, and rotate and normalise by what
config.json says, not by what the target does.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from sfdd.export.config import ENGINES
from sfdd.export.layouts import EAGLE3, export_again, mapping

_BASE = 10_000  # of rotary positions, where config.json has none
_EPSILON = 1e-6  # of norms, likewise
# What the drafters that sfdd trains do without.
_SWITCHES = (
    "norm_before_residual",
    "norm_before_fc",
    "norm_output",
    "fc_norm",
    "attention_bias",
    "mlp_bias",
    "quantization_config",
    "sliding_window",
)


def layer_findings(
    config: Mapping[str, Any], engine: str, method: str, wanted: Mapping[str, Any] | None
) -> Iterator[str]:
    """Settings by which an engine would run another layer.

    Args:
        wanted: the config.json of a new drafter for the target; None where the target is not known.
    """
    yield from _kind(config, engine, method)
    for setting in _added(config):
        yield (
            f"config.json sets {setting}, which the drafters that sfdd trains do without: leave it out "
            "if this is one of them."
        )
    yield from _base(config, engine, wanted)
    if wanted:
        yield from _as_the_target(config, wanted)


def _kind(config: Mapping[str, Any], engine: str, method: str) -> Iterator[str]:
    name = ENGINES[engine]
    if config.get("num_hidden_layers") != 1:
        found = config.get("num_hidden_layers")
        yield f"config.json has num_hidden_layers {found}, but the drafters that sfdd trains have 1."
    if config.get("hidden_act", "silu") != "silu":
        yield f"config.json has hidden_act {config['hidden_act']!r}, but {name} runs 'silu' alone."
    if method == EAGLE3 and not config.get("draft_vocab_size"):
        without = "stops without it" if engine == "sglang" else "takes the whole vocabulary for it"
        yield f"config.json has no draft_vocab_size, and {name} {without}: write lm_head's rows."
    if method == EAGLE3 and config.get("tie_word_embeddings"):
        yield (
            f"config.json ties the head to the embeddings, so {name} may not use the drafter's own "
            "lm_head: set tie_word_embeddings to false."
        )


def _added(config: Mapping[str, Any]) -> Iterator[str]:
    """What a config.json sets of `_SWITCHES` and of numbers that a layer has its own values for."""
    nested = mapping(config, "eagle_config")
    on = {name: config.get(name) or nested.get(name) for name in _SWITCHES}
    if "norm_before_fc" in nested:
        on["norm_before_fc"] = nested["norm_before_fc"]  # vLLM looks there first
    yield from (name for name in _SWITCHES if on[name])
    part = {**config, **mapping(config, "rope_parameters")}.get("partial_rotary_factor")
    if part not in (None, 1):
        yield f"partial_rotary_factor {part}"
    if config.get("logit_scale") not in (None, 1):
        yield f"logit_scale {config['logit_scale']}"
    kinds = config.get("layer_types")
    if kinds and kinds != ["full_attention"]:
        yield f"layer_types {kinds}"


def _base(
    config: Mapping[str, Any], engine: str, wanted: Mapping[str, Any] | None
) -> Iterator[str]:
    """Where an engine would take a base of rotary positions of its own."""
    if wanted is None and rotary(config).get("rope_theta") is None:
        yield (
            f"config.json has no rope_theta, so {ENGINES[engine]} takes {_BASE}: write the target's."
        )
    theta = mapping(config, "rope_parameters").get("rope_theta")
    if engine == "sglang" and theta and config.get("rope_theta", _BASE) != theta:
        yield (
            f"config.json has a rope_theta of {theta} in rope_parameters alone, and SGLang on an older "
            f"transformers takes {_BASE}: {export_again(engine)}."
        )


def _as_the_target(config: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    ours, theirs = ({"rope_theta": _BASE, **rotary(c)} for c in (config, wanted))
    for c in (ours, theirs):
        c.pop("partial_rotary_factor", None)  # sfdd's drafters rotate whole heads
    differing = [key for key in {**theirs, **ours} if ours.get(key) != theirs.get(key)]
    pairs = [(key, ours.get(key), theirs.get(key)) for key in differing]
    epsilons = [c.get("rms_norm_eps", _EPSILON) for c in (config, wanted)]
    if not _close(*epsilons):
        pairs.append(("rms_norm_eps", *epsilons))
    if config.get("head_dim") and config["head_dim"] != wanted["head_dim"]:
        pairs.append(("head_dim", config["head_dim"], wanted["head_dim"]))
    for key, own, of_the_target in pairs:
        has = f"no {key}" if own is None else f"{key} {own}"
        yield (
            f"config.json has {has}, but the target {of_the_target or 'none'}, by which sfdd trains its "
            "drafters: use the target that it was trained for."
        )


def _close(one: Any, other: Any) -> bool:
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return numbers and math.isclose(one, other)


def rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Base and scaling of rotary positions, wherever this or an older transformers writes them."""
    older = {"rope_theta": config.get("rope_theta"), **mapping(config, "rope_scaling")}
    found = {**older, **mapping(config, "rope_parameters")}
    kind = found.pop("type", "default")
    return {"rope_type": kind} | {key: value for key, value in found.items() if value is not None}
