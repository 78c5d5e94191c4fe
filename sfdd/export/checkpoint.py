"""A drafter's directory: config.json, safetensors, provenance.json."""

import glob
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from sfdd.drafters.drafter import CONFIG, PROVENANCE, WEIGHTS
from sfdd.errors import ArtifactError, DrafterError

_FILES = (CONFIG, WEIGHTS, PROVENANCE)


@dataclass(frozen=True)
class Checkpoint:
    """What lies in a drafter's directory.

    Attributes:
        config: of config.json.
        tensors: of all safetensors files, as engines gather them.
        provenance: the text of provenance.json; None where there is none that is text.
        files: the names of all files.
    """

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    provenance: str | None
    files: tuple[str, ...]


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read a drafter's directory.

    Raises:
        DrafterError: it is missing or damaged, or has no safetensors.
    """
    if not directory.is_dir():
        raise DrafterError(
            f"There is no directory {directory}. Train a drafter with 'sfdd train-draft'."
        )
    files = sorted(path.name for path in directory.iterdir() if path.is_file())
    try:
        return Checkpoint(
            directory=directory,
            config=_read_config(directory),
            tensors=_read_tensors(directory, files),
            provenance=_read_provenance(directory) if PROVENANCE in files else None,
            files=tuple(files),
        )
    except OSError as error:
        raise DrafterError(f"The drafter in {directory} cannot be read: {error}.") from error


def _read_config(directory: Path) -> Mapping[str, Any]:
    path = directory / CONFIG
    if not path.is_file():
        raise DrafterError(f"{directory} has no {CONFIG}, by which engines know what they load.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DrafterError(f"{path} is not JSON: {error}.") from error
    if not isinstance(config, dict):
        raise DrafterError(f"{path} is not a JSON object.")
    return config


def _read_provenance(directory: Path) -> str | None:
    try:
        return (directory / PROVENANCE).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def _read_tensors(directory: Path, files: list[str]) -> Mapping[str, Tensor]:
    """Every tensor of every safetensors file, since engines load them all."""
    tensors: dict[str, Tensor] = {}
    found_in: dict[str, str] = {}
    names = [name for name in files if name.endswith(".safetensors")]
    if not names:
        raise DrafterError(f"{directory} has no {WEIGHTS}, or any other safetensors file.")
    for name in names:
        try:
            part = load_file(directory / name)
        except (SafetensorError, ValueError) as error:
            raise DrafterError(f"{directory / name} is damaged: {error}.") from error
        for tensor in part:
            if tensor in found_in:
                raise DrafterError(
                    f"{tensor} is in both {found_in[tensor]} and {name} of {directory}, and engines load "
                    "every safetensors file: keep one of the two."
                )
            found_in[tensor] = name
        tensors |= part
    return tensors


def write_checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    provenance: str,
) -> None:
    """Write the files of a drafter into an existing directory."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    (directory / WEIGHTS).write_bytes(save(contiguous, metadata={"format": "pt"}))
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (directory / PROVENANCE).write_text(provenance, encoding="utf-8")


def refuse_to_replace(directory: Path, overwrite: bool) -> None:
    """Raise ArtifactError where a directory exists that may not, or must not, be replaced."""
    if not directory.exists():
        return
    if not overwrite:
        raise ArtifactError(f"{directory} exists. Choose another output, or add --overwrite.")
    if not directory.is_dir() or directory.is_symlink():
        raise ArtifactError(f"{directory} is no directory of an export. Choose another output.")
    others = [p.name for p in directory.iterdir() if p.name not in _FILES]
    if others:
        raise ArtifactError(
            f"{directory} holds more than an export ({others[0]}), so it is not replaced. "
            "Choose another output."
        )


def staging_directory(directory: Path) -> Path:
    """A new directory beside the one to write."""
    return Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))


def clear_leftovers(directory: Path) -> None:
    """Put an export back that a killed one had moved away; remove what else that one left.

    What holds other files than an export does is left alone.
    """
    name = glob.escape(directory.name)
    earlier, staged = (
        [path for path in sorted(directory.parent.glob(pattern)) if _is_export(path)]
        for pattern in (f".{name}.*.earlier", f".{name}-{'?' * 8}")
    )
    if earlier and not directory.exists():
        with suppress(OSError):
            earlier.pop().rename(directory)
    for path in (*earlier, *staged):
        shutil.rmtree(path, ignore_errors=True)


def _is_export(directory: Path) -> bool:
    """Whether a directory holds nothing but what `write_checkpoint` writes."""
    try:
        return directory.is_dir() and all(path.name in _FILES for path in directory.iterdir())
    except OSError:
        return False


def move_into_place(staged: Path, directory: Path) -> None:
    """Rename a written directory to where it belongs, in place of an earlier one.

    Killed in between, the earlier one lies beside, and nothing half-written where it was; see
    `clear_leftovers`.
    """
    earlier = directory.with_name(f".{directory.name}.{os.getpid()}.earlier")
    for path in (staged / name for name in _FILES):
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
    if directory.exists():
        directory.rename(earlier)
    try:
        staged.rename(directory)
    except OSError:
        with suppress(OSError):
            earlier.rename(directory)
        raise
    shutil.rmtree(earlier, ignore_errors=True)
