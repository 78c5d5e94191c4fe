"""What a run says of its data: which files were distilled, by whose tokens, and what is supervised."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sfdd.artifacts import Provenance, RunDirectory, distilled_files, read_parquet_provenance
from sfdd.conversations.config import MAX_LENGTH, mask_of
from sfdd.errors import ArtifactError, UsageError
from sfdd.export.config import ExportDataConfig


@dataclass(frozen=True)
class Recorded:
    """The provenance of a run's selection, or of its scores where nothing was selected, or of neither.

    Attributes:
        of_the_run: the data to export are those that were selected.
    """

    provenance: Provenance | None
    of_the_run: bool

    def check_tokenizer(self, target: str, identity: Mapping[str, str]) -> None:
        """Raise ArtifactError where the run's data were selected by another tokenizer or template."""
        if self.provenance is None or not self.of_the_run:
            return
        wanted = {key: self.provenance.identity.get(key) for key in identity}
        if differences := Provenance(wanted).differences(Provenance(identity)):
            raise ArtifactError(
                f"The data were selected by {self.provenance.about.get('target')}, but the target is "
                f"{target}: {'; '.join(differences)}. Export with the target that selected them."
            )


def as_recorded(config: ExportDataConfig) -> tuple[ExportDataConfig, Recorded]:
    """Fill in what is None as the run's earlier stages had it.

    Raises:
        UsageError: no data are given, and the run has none.
        ArtifactError: the run's files are damaged.
    """
    run = RunDirectory(config.run)
    found = next((path for path in (run.selection, run.scores) if path.is_file()), None)
    provenance = read_parquet_provenance(found) if found else None
    identity, about = (provenance.identity, provenance.about) if provenance else ({}, {})
    settings: dict[str, Any] = {
        "data": config.data or _distilled(run),
        "target": config.target or about.get("target"),
        "max_length": config.max_length or identity.get("max_length") or MAX_LENGTH,
        **mask_of(config, identity).identity(),
    }
    return replace(config, **settings), Recorded(provenance, not config.data)


def _distilled(run: RunDirectory) -> tuple[str, ...]:
    """The run's distilled files, checked to be what the selection says."""
    if not run.selection.is_file():
        raise UsageError(
            f"No data given, and {run.root} has no distilled data. "
            "Name a data set with --data, or make one with 'sfdd filter'."
        )
    return distilled_files(run)
