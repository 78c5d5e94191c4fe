"""`sfdd export`: a drafter in the form that an engine loads; `sfdd export --check`: whether it would."""

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sfdd.artifacts import Provenance, RunDirectory, ensure_writable, environment
from sfdd.drafters.drafter import target_mismatch
from sfdd.drafters.eagle import EagleDrafter
from sfdd.drafters.layer import drafter_config
from sfdd.errors import ArtifactError, DrafterError, TargetError
from sfdd.export.checkpoint import (
    Checkpoint,
    clear_leftovers,
    move_into_place,
    read_checkpoint,
    refuse_to_replace,
    staging_directory,
    write_checkpoint,
)
from sfdd.export.config import CheckConfig, ExportConfig
from sfdd.export.drafting import draft_token, has_other_embeddings
from sfdd.export.findings import TargetFacts, findings
from sfdd.export.layouts import EAGLE3, NO_SIZES, as_trained, aux_layers, for_engine, method_of
from sfdd.targets.transformers_target import TransformersTarget


@dataclass(frozen=True)
class Described:
    """What a drafter is.

    Attributes:
        method: "eagle" or "eagle3".
        parameters: numbers in all tensors but the maps.
        draft_vocab_size, aux_layers: of EAGLE-3; layers as sfdd and vLLM count.
        target: as the drafter records it; None where it does not.
    """

    method: str
    tensors: int
    parameters: int
    dtype: str
    draft_vocab_size: int | None = None
    aux_layers: tuple[int, ...] = ()
    target: str | None = None


@dataclass(frozen=True)
class ExportReport:
    """What was written for an engine, and from which directory."""

    engine: str
    output: Path
    drafter: Path
    described: Described


@dataclass(frozen=True)
class CheckReport:
    """Whether an engine would load a directory as what it is meant to be.

    Attributes:
        rejections: a sentence for everything that it would reject, or take for something else.
        drafted: the token that the draft step gave; None where none was run.
        not_drafted: why none was run; None where one was, or would be of what is rejected.
        notes: what else the user should know.
    """

    engine: str
    drafter: Path
    accepted: bool
    rejections: tuple[str, ...]
    described: Described
    drafted: int | None = None
    not_drafted: str | None = None
    notes: tuple[str, ...] = ()


def export_drafter(config: ExportConfig) -> ExportReport:
    """Write a drafter as an engine loads it; what is written has passed `findings`.

    Raises:
        DrafterError: the drafter is missing or damaged, or not one that an engine would load.
        ArtifactError: the output exists or cannot be written.
    """
    run = RunDirectory(config.run)
    source = config.drafter or run.drafter
    output = config.output or run.root / f"export/{config.engine}"
    if output.resolve() == source.resolve():
        raise ArtifactError(f"{output} is the drafter to export. Choose another output.")
    clear_leftovers(output)
    refuse_to_replace(output, config.overwrite)
    exported = _converted(read_checkpoint(source), config)
    ensure_writable(output.parent)
    staged = staging_directory(output)
    try:
        provenance = _provenance(exported, config)
        write_checkpoint(staged, exported.config, exported.tensors, provenance)
        for rejection in findings(read_checkpoint(staged), config.engine):
            raise DrafterError(f"The drafter in {source} cannot be exported: {rejection}")
        staged.chmod(0o755)  # as any directory; temporary ones are private
        move_into_place(staged, output)
    except OSError as error:
        raise ArtifactError(
            f"Cannot write {output}: {error.strerror or error}. Free the disk or choose another output."
        ) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return ExportReport(config.engine, output, source, _describe(exported))


def check_drafter(config: CheckConfig) -> CheckReport:
    """Read a directory again and say what an engine would reject; run one draft step where it can be.

    Raises:
        DrafterError: the directory is missing or cannot be read.
        TargetError: a target is named, and cannot be loaded.
    """
    directory = config.drafter or RunDirectory(config.run).drafter
    checkpoint = read_checkpoint(directory)
    target, not_drafted = _load_target(config, _about(checkpoint).get("target"))
    rejections = list(findings(checkpoint, config.engine, _facts(target)))
    drafted = None
    if target and has_other_embeddings(checkpoint, target):
        not_drafted = "it holds other embeddings than the target's, which sfdd's drafters read"
        if config.engine == "sglang":
            rejections.append(
                "embed_tokens.weight is not the target's, which SGLang reads instead."
            )
    elif target and not rejections:
        try:
            drafted = draft_token(checkpoint, target)
        except DrafterError as error:
            rejections.append(str(error))
    return CheckReport(
        engine=config.engine,
        drafter=directory,
        accepted=not rejections,
        rejections=tuple(rejections),
        described=_describe(checkpoint),
        drafted=drafted,
        not_drafted=not_drafted,
        notes=tuple(_notes(checkpoint, config.engine, target)),
    )


def _converted(checkpoint: Checkpoint, config: ExportConfig) -> Checkpoint:
    dtype = getattr(torch, config.dtype) if config.dtype else None
    try:
        return for_engine(as_trained(checkpoint), config.engine, dtype)
    except NO_SIZES as error:
        raise DrafterError(
            f"The drafter in {checkpoint.directory} cannot be exported, it is damaged ({error}): "
            f"'sfdd export --check {checkpoint.directory} --for {config.engine}' says in what."
        ) from error


def _provenance(checkpoint: Checkpoint, config: ExportConfig) -> str:
    """The drafter's own, and what was made of it."""
    # Names alone: the folders of whoever exported it are nobody's business.
    settings = {k: v.name if isinstance(v, Path) else v for k, v in asdict(config).items()}
    exported = {"export": settings | environment()}
    try:
        own = Provenance.from_json(checkpoint.provenance or "")
    except ValueError:
        own = Provenance({})
    return Provenance(own.identity, {**own.about, **exported}).to_json()


def _load_target(
    config: CheckConfig, recorded: str | None
) -> tuple[TransformersTarget | None, str | None]:
    """The target that was named, else the recorded one; or why there is none."""
    name = config.target or recorded
    if config.files_only:
        return None, "the files alone were checked"
    if not name:
        return None, "no target is recorded, give --target"
    try:
        target = TransformersTarget.load(
            name, device=config.device, trust_remote_code=config.trust_remote_code
        )
    except TargetError as error:
        if config.target:
            raise
        return None, str(error)
    return target, None


def _facts(target: TransformersTarget | None) -> TargetFacts | None:
    if target is None:
        return None
    drafter: dict[str, Any] | None
    try:
        drafter = drafter_config(target, EagleDrafter.architecture).to_dict()
    except TargetError:
        drafter = None
    return TargetFacts(
        target.config.model_type,
        target.vocab_size,
        target.hidden_size,
        target.config.num_hidden_layers,
        drafter,
    )


def _describe(checkpoint: Checkpoint) -> Described:
    weights = {n: t for n, t in checkpoint.tensors.items() if t.is_floating_point()}
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in weights.values()})
    method = method_of(checkpoint)
    return Described(
        method=method,
        tensors=len(checkpoint.tensors),
        parameters=sum(t.numel() for t in weights.values()),
        dtype=" and ".join(dtypes),
        draft_vocab_size=checkpoint.config.get("draft_vocab_size") if method == EAGLE3 else None,
        aux_layers=aux_layers(checkpoint.config) if method == EAGLE3 else (),
        target=_about(checkpoint).get("target"),
    )


def _about(checkpoint: Checkpoint) -> Mapping[str, Any]:
    try:
        return Provenance.from_json(checkpoint.provenance or "").about
    except ValueError:
        return {}


def _notes(checkpoint: Checkpoint, engine: str, target: TransformersTarget | None) -> list[str]:
    """What no engine minds, and a person might."""
    notes = []
    if engine == "sglang" and len(aux_layers(checkpoint.config)) not in (0, 3):
        notes.append("Older releases of SGLang fuse three layers, no more and no fewer.")
    if "d2t" in checkpoint.tensors and "t2d" not in checkpoint.tensors:
        notes.append(
            "Without t2d it cannot be told for certain that d2t holds differences, not ids."
        )
    try:
        provenance = Provenance.from_json(checkpoint.provenance or "")
    except ValueError:
        return [
            *notes,
            "It has no readable provenance.json, so it cannot be told what it was trained for.",
        ]
    if target and (differences := target_mismatch(provenance, target.identity)):
        notes.append(
            "It was trained for another target, so fewer drafts may be accepted: "
            f"{'; '.join(differences)}."
        )
    return notes
