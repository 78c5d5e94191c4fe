"""Drafters of both kinds for a tiny target that has layers enough for EAGLE-3."""

from pathlib import Path

import pytest
import torch
from conftest import save_tiny_target

from sfdd.artifacts import Provenance
from sfdd.drafters.loading import new_drafter
from sfdd.targets.transformers_target import TransformersTarget

# H 32, I 64, 4 heads of 8, 2 of them for keys and values, V 260; D 100 of every second token from 3.
DRAFT_TO_TARGET = torch.arange(3, 203, 2)


@pytest.fixture(scope="session")
def deep_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    directory = tmp_path_factory.mktemp("targets") / "deep"
    return save_tiny_target(directory, num_hidden_layers=8, rope_parameters=rope)


@pytest.fixture(scope="session")
def deep_target(deep_directory: Path) -> TransformersTarget:
    return TransformersTarget.load(str(deep_directory))


@pytest.fixture(scope="session")
def trained(deep_target: TransformersTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what `sfdd train-draft` leaves of each method."""
    folder = tmp_path_factory.mktemp("trained")
    provenance = Provenance(
        dict(deep_target.identity), {"target": deep_target.source.name, "settings": {"epochs": 3}}
    )
    new_drafter("eagle", deep_target).save(folder / "eagle", provenance)
    for name, tokens in (("eagle3", DRAFT_TO_TARGET), ("whole", None)):
        drafter = new_drafter("eagle3", deep_target, draft_to_target=tokens)
        drafter.save(folder / name, provenance)
    return folder
