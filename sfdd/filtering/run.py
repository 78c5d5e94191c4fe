"""`sfdd filter`: select by the scores, write the selection and the distilled data set."""

import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sfdd.artifacts import (
    Provenance,
    RunDirectory,
    digest_files,
    environment,
    exclusive,
    read_parquet_provenance,
)
from sfdd.conversations.records import Source
from sfdd.conversations.sources import open_source
from sfdd.errors import ArtifactError, UsageError
from sfdd.filtering.config import FilterConfig
from sfdd.filtering.distill import distill, unchanged
from sfdd.filtering.report import FilterReport, report_of
from sfdd.filtering.scores import Scores, read_scores
from sfdd.filtering.selection import Selection, select
from sfdd.filtering.table import write_selection

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Scored:
    """The data sets that were scored, by the name they had, and their fingerprints then."""

    sources: Mapping[str, Source]
    fingerprints: Mapping[str, str]


def filter_data(config: FilterConfig) -> FilterReport:
    """Keep the scored conversations that teach a drafter most, as far as the budget goes.

    Raises:
        ArtifactError: there are no scores, or they are damaged, or nothing is kept.
        DataError: the scored data, or the table to join, are gone or not what they should be.
        UsageError: a column that the settings name is not there.
    """
    run = RunDirectory(config.run)
    scores_path = config.scores or run.scores
    provenance = read_parquet_provenance(scores_path)
    with exclusive(run, "filter"):
        data = _open_scored_data(provenance, scores_path, config.data)
        scores = read_scores(scores_path, config)
        selection = select(scores, config)
        _refuse_nothing(selection, scores, scores_path, config)
        report = report_of(scores, selection, config, run.selection)
        about = _provenance(provenance, report, config)
        distilled = _write(run, scores, selection, data, scores_path, about)
    for warning in report.warnings:
        log.warning("%s", warning)
    return replace(report, distilled=distilled)


def _open_scored_data(provenance: Provenance, scores: Path, moved_to: tuple[str, ...]) -> _Scored:
    """The data sets that were scored; that they are the same still is checked while they are copied."""
    fingerprints = provenance.about.get("data")
    if not isinstance(fingerprints, dict):
        raise ArtifactError(f"{scores} is not a finished score table. Make one with 'sfdd score'.")
    if moved_to and len(moved_to) != len(fingerprints):
        raise UsageError(
            f"--data names {len(moved_to)} data sets, but {len(fingerprints)} were scored: "
            f"{', '.join(fingerprints)}. Name all of them, in that order."
        )
    names = moved_to or tuple(fingerprints)
    opened = (open_source(name) for name in names)
    return _Scored(dict(zip(fingerprints, opened, strict=True)), fingerprints)


def _refuse_nothing(selection: Selection, scores: Scores, path: Path, config: FilterConfig) -> None:
    if selection.kept.any():
        return
    if not selection.scored.any():
        raise ArtifactError(
            f"{path} holds no scored conversation, so there is nothing to keep. "
            "Its column 'reason' says why each was skipped."
        )
    if selection.without_value.sum() == selection.scored.sum():
        raise ArtifactError(
            f"No scored conversation of {path} has a finite {config.metric}, so there is nothing to keep."
        )
    option, amount = config.budget
    if option == "keep_tokens":
        raise ArtifactError(
            f"--keep-tokens {amount:,} has no room for a single conversation: the first to keep "
            "has more supervised tokens. Give more."
        )
    raise ArtifactError("No conversation lies inside the band. Give a wider one.")


def _write(
    run: RunDirectory,
    scores: Scores,
    selection: Selection,
    data: _Scored,
    scores_path: Path,
    provenance: Provenance,
) -> list[Path]:
    """Distilled files and selection together: the selection holds the digests of its files.

    Killed between the two, the files do not match it, which whoever reads them next will notice.
    """
    earlier = _earlier_files(run)
    staging = run.root / "distilled.partial"
    origins, rows = scores.sources, scores.table["row"].to_numpy()
    try:
        with unchanged(data.sources, data.fingerprints):
            staged = distill(
                selection.kept,
                origins.codes,
                origins.labels.to_pylist(),
                rows,
                data.sources,
                staging,
            )
        distilled = [run.distilled / path.name for path in staged]
        _refuse_to_overwrite(distilled, earlier, data.sources)
        digests = {path.name: digest_files([path]) for path in staged}
        about = {**provenance.about, "distilled": digests}
        write_selection(
            run.selection, scores_path, scores, selection, replace(provenance, about=about)
        )
        run.distilled.mkdir(exist_ok=True)
        for path, destination in zip(staged, distilled, strict=True):
            path.replace(destination)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    for path in earlier - set(distilled):
        path.unlink(missing_ok=True)
    return distilled


def _refuse_to_overwrite(
    distilled: list[Path], earlier: set[Path], sources: Mapping[str, Source]
) -> None:
    for path in distilled:
        if any(path.resolve() == Path(source.name) for source in sources.values()):
            raise ArtifactError(
                f"{path} is one of the data sets scored; it would be overwritten. "
                "Choose another --run."
            )
        if path.exists() and path not in earlier:
            raise ArtifactError(
                f"{path} exists, and sfdd did not write it. Move it away, or choose another --run."
            )


def _earlier_files(run: RunDirectory) -> set[Path]:
    """Distilled files of an earlier selection in this run."""
    if not run.selection.exists():
        return set()
    about = read_parquet_provenance(run.selection).about
    return {run.distilled / Path(name).name for name in about.get("distilled", ())}


def _provenance(scores: Provenance, report: FilterReport, config: FilterConfig) -> Provenance:
    """Where a selection comes from, and what it means for those who train on it."""
    return Provenance(
        identity={**scores.identity, **_deciding(config)},
        about={
            "target": scores.about["target"],
            "threshold": report.threshold,
            "kept_share": {
                name: [asdict(share) for share in shares]
                for name, shares in report.kept_share.items()
            },
            "notes": report.notes,
            "warnings": report.warnings,
            "settings": asdict(config) | dict([config.budget]),
            "scores": scores.about,
            **environment(),
        },
    )


def _deciding(config: FilterConfig) -> dict[str, Any]:
    """Every setting on which the selection depends; those that have no effect are left out."""
    budget, amount = config.budget
    draws = config.ranking.column is None or budget in ("keep_rows", "keep_tokens")
    optional = {
        "low": config.low,
        "by": config.by,
        "match_length": config.match_length,
        "join": config.join and digest_files([config.join]),
        "seed": config.seed if draws else None,
    }
    used = {
        name: value for name, value in optional.items() if value is not None and value is not False
    }
    return {"metric": config.metric, budget: amount, **used}
