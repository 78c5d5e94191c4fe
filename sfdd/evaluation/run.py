"""`evaluate`: prompts and a drafter in, acceptance and speedup against the baseline out."""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from functools import reduce
from operator import add
from pathlib import Path

from sfdd.artifacts import (
    Provenance,
    RunDirectory,
    digest_files,
    ensure_writable,
    environment,
    write_text,
)
from sfdd.drafters.drafter import Drafter, read_provenance, target_mismatch
from sfdd.drafters.loading import load_drafter, new_drafter, untrained_like
from sfdd.errors import DataError, UsageError
from sfdd.evaluation.comparison import Comparison
from sfdd.evaluation.config import EvalConfig
from sfdd.evaluation.prompts import Prompt, read_prompts
from sfdd.evaluation.report import DRAFTER, UNTRAINED, EvalReport, Measurement
from sfdd.progress import Progress, ProgressCallback, silent
from sfdd.targets.transformers_target import TransformersTarget

log = logging.getLogger(__name__)

_ALONE = "eagle"  # the kind of an untrained drafter with no trained one beside it


def evaluate(config: EvalConfig, progress: ProgressCallback = silent) -> EvalReport:
    """Measure a drafter against the autoregressive baseline; write eval.json into the run.

    Both decode every turn of every prompt in one process, taking turns in going first, after a
    warm-up that is not counted. A conversation goes on with the baseline's response for all of them
    (at temperature 0 they are equal), so that they always read the same tokens.

    Raises:
        UsageError: no target is named and no drafter records one.
        DataError: a prompt file is not one, or no prompt fits into the target's context.
        DrafterError: the drafter is missing, damaged or of another shape than the target.
        TargetError: the target cannot be loaded.
        ArtifactError: the run directory cannot be written.
    """
    prompts = read_prompts(config.prompts, config.limit)
    directory = _drafter_directory(config)
    recorded = read_provenance(directory) if directory else None
    target = _load_target(config, recorded)
    drafters = _load_drafters(config, directory, target)
    if recorded:
        _warn_of_another_target(recorded, target)

    ensure_writable(config.run)
    sets = _by_set(prompts, Comparison.of(target, drafters, config), progress)
    provenance = _provenance(config, target, directory, recorded)
    report = EvalReport(reduce(add, sets.values()), sets, provenance)
    write_text(RunDirectory(config.run).evaluation, report.to_json())
    return report


def _drafter_directory(config: EvalConfig) -> Path | None:
    """Where the trained drafter is; None where only an untrained one is wanted."""
    directory = config.drafter or RunDirectory(config.run).drafter
    trained = (directory / "config.json").is_file()
    untrained_alone = config.untrained and config.drafter is None and not trained
    return None if untrained_alone else directory


def _load_target(config: EvalConfig, recorded: Provenance | None) -> TransformersTarget:
    name = config.target or (recorded.about.get("target") if recorded else None)
    if not name:
        raise UsageError("No drafter tells which target it is for. Name the target with --target.")
    return TransformersTarget.load(
        name,
        dtype=config.dtype,
        device=config.device,
        attn_implementation=config.attn_implementation,
        trust_remote_code=config.trust_remote_code,
    )


def _load_drafters(
    config: EvalConfig, directory: Path | None, target: TransformersTarget
) -> Mapping[str, Drafter]:
    drafters = {}
    if directory:
        drafters[DRAFTER] = load_drafter(directory, target)
    if config.untrained:
        drafters[UNTRAINED] = (
            untrained_like(drafters[DRAFTER], target, config.seed)
            if drafters
            else new_drafter(_ALONE, target, seed=config.seed)
        )
    return {name: drafter.as_served(target.model.dtype) for name, drafter in drafters.items()}


def _warn_of_another_target(recorded: Provenance, target: TransformersTarget) -> None:
    if differences := target_mismatch(recorded, target.identity):
        log.warning(
            "The drafter was trained for another target; fewer of its tokens may be accepted: %s.",
            ", ".join(differences),
        )


def _by_set(
    prompts: list[Prompt], comparison: Comparison, progress: ProgressCallback
) -> Mapping[str, Measurement]:
    """Measure every prompt; the sums, by prompt set."""
    sets: dict[str, Measurement] = {}
    comparison.warm_up(min(prompts, key=lambda prompt: len(prompt.turns[0])))
    progress(_moment(0, len(prompts), sets))
    for number, prompt in enumerate(prompts):
        if measured := comparison.measure(prompt, number):
            sets[prompt.set] = sets[prompt.set] + measured if prompt.set in sets else measured
        progress(_moment(number + 1, len(prompts), sets))
    if not sets:
        raise DataError(
            "No prompt fits into the target's context together with its response. "
            "Lower --max-new-tokens or give shorter prompts."
        )
    return sets


def _moment(done: int, total: int, sets: Mapping[str, Measurement]) -> Progress:
    if not sets:
        return Progress("evaluating", "prompts", done, total)
    so_far = reduce(add, sets.values())
    name, result = next(iter(so_far.drafters.items()))
    tau, speedup = result.acceptance.acceptance_length, so_far.speedup(name)
    tokens = so_far.baseline.num_tokens + sum(
        result.speed.num_tokens for result in so_far.drafters.values()
    )
    figures = {"tau": f"{tau:.2f}" if tau else "none", "speedup": f"{speedup:.2f}"}
    return Progress("evaluating", "prompts", done, total, tokens, figures)


def _provenance(
    config: EvalConfig,
    target: TransformersTarget,
    directory: Path | None,
    recorded: Provenance | None,
) -> Provenance:
    return Provenance(
        identity={**target.identity, "prompts": digest_files(list(config.prompts))},
        about={
            "target": target.source.reference,
            "drafter": str(directory) if directory else None,
            "drafter_provenance": json.loads(recorded.to_json()) if recorded else None,
            "settings": json.loads(json.dumps(asdict(config), default=str)),
            **environment(),
        },
    )
