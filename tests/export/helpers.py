"""Damaging a drafter's directory, and looking at it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]


def damaged(
    directory: Path,
    to: Path,
    tensors: Callable[[Tensors], object] | None = None,
    config: Callable[[dict[str, Any]], object] | None = None,
) -> Path:
    """A copy of a drafter, its tensors and its configuration changed in place."""
    shutil.copytree(directory, to)
    if tensors:
        changed = load_file(to / "model.safetensors")
        tensors(changed)
        contiguous = {name: tensor.clone() for name, tensor in changed.items()}
        save_file(contiguous, to / "model.safetensors", {"format": "pt"})
    if config:
        settings = read_config(to)
        config(settings)
        (to / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return to


def read_config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text(encoding="utf-8"))


def shapes(directory: Path) -> dict[str, list[int]]:
    tensors = load_file(directory / "model.safetensors")
    return {name: list(tensor.shape) for name, tensor in tensors.items()}
