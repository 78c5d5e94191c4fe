"""`sfdd export`: a drafter in the form that an engine loads; `sfdd export --check`: whether it would."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from sfdd.artifacts import Provenance, RunDirectory, ensure_writable, environment
from sfdd.drafters.drafter import target_mismatch
from sfdd.errors import ArtifactError, DrafterError
from sfdd.export.checkpoint import (
    Checkpoint,
    move_into_place,
    read_checkpoint,
    refuse_to_replace,
    write_checkpoint,
)
from sfdd.export.config import CheckConfig, ExportConfig
from sfdd.export.drafting import draft_token
from sfdd.export.findings import TargetSizes, findings
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
        drafted: the token that the draft step gave; None without a target.
        notes: what else the user should know.
    """

    engine: str
    drafter: Path
    accepted: bool
    rejections: tuple[str, ...]
    described: Described
    drafted: int | None = None
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
    refuse_to_replace(output, config.overwrite)
    exported = _converted(read_checkpoint(source), config)
    ensure_writable(output.parent)
    staged = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
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
        TargetError: the target cannot be loaded.
    """
    directory = config.drafter or RunDirectory(config.run).drafter
    checkpoint = read_checkpoint(directory)
    target = _load_target(config)
    rejections = list(findings(checkpoint, config.engine, _sizes(target)))
    drafted = None
    if target and not rejections:
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
    exported = {"export": json.loads(json.dumps(asdict(config), default=str)) | environment()}
    try:
        own = Provenance.from_json(checkpoint.provenance or "")
    except ValueError:
        own = Provenance({})
    return Provenance(own.identity, {**own.about, **exported}).to_json()


def _load_target(config: CheckConfig) -> TransformersTarget | None:
    if not config.target:
        return None
    return TransformersTarget.load(
        config.target, device=config.device, trust_remote_code=config.trust_remote_code
    )


def _sizes(target: TransformersTarget | None) -> TargetSizes | None:
    if target is None:
        return None
    return TargetSizes(target.vocab_size, target.hidden_size, target.config.num_hidden_layers)


def _describe(checkpoint: Checkpoint) -> Described:
    weights = {n: t for n, t in checkpoint.tensors.items() if t.is_floating_point()}
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in weights.values()})
    third = method_of(checkpoint) == EAGLE3
    return Described(
        method=method_of(checkpoint),
        tensors=len(checkpoint.tensors),
        parameters=sum(t.numel() for t in weights.values()),
        dtype=" and ".join(dtypes),
        draft_vocab_size=checkpoint.config.get("draft_vocab_size") if third else None,
        aux_layers=aux_layers(checkpoint.config) if third else (),
        target=_about(checkpoint).get("target"),
    )


def _about(checkpoint: Checkpoint) -> Mapping[str, str]:
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
