"""`sfdd filter`: select by the scores, write the selection and the distilled data set."""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sfdd.artifacts import (
    PARQUET_METADATA_KEY,
    Provenance,
    RunDirectory,
    atomic_path,
    digest_files,
    environment,
    exclusive,
    read_parquet_provenance,
)
from sfdd.conversations.records import Source
from sfdd.conversations.sources import open_source
from sfdd.errors import ArtifactError, UsageError
from sfdd.filtering.config import METRICS, FilterConfig
from sfdd.filtering.distill import check_unchanged, distill
from sfdd.filtering.selection import Selection, select


@dataclass(frozen=True)
class FilterReport:
    """What was kept, in conversations and in supervised tokens; `scored` = `kept` + `dropped`."""

    selection: Path
    distilled: list[Path]
    metric: str
    keep: float
    threshold: float
    scored: int
    skipped: int
    kept: int
    dropped: int
    retention_ratio: float
    supervised_tokens_scored: int
    supervised_tokens_kept: int


def filter_data(config: FilterConfig) -> FilterReport:
    """Keep the fraction of the scored conversations that teaches a drafter most.

    Raises:
        ArtifactError: there are no scores, or they are damaged.
        DataError: the scored data are gone or have changed.
    """
    run = RunDirectory(config.run)
    scores_path = config.scores or run.scores
    provenance = read_parquet_provenance(scores_path)
    with exclusive(run, "filter"):
        sources = _open_scored_data(provenance, scores_path, config.data)
        scores = _read_scores(scores_path, config.metric)
        selection = select(scores, config.metric, config.keep, config.seed)
        if not selection.kept.num_rows:
            raise ArtifactError(
                f"{scores_path} holds no scored conversation, so there is nothing to keep. "
                "Its column 'reason' says why each was skipped."
            )
        distilled = _write(run, selection, sources, provenance, config)
    return _report(run, selection, config, distilled)


def _open_scored_data(
    provenance: Provenance, scores: Path, moved_to: tuple[str, ...]
) -> dict[str, Source]:
    """The data sets that were scored, by the name they had, checked to be the same still."""
    fingerprints = provenance.about.get("data")
    if not isinstance(fingerprints, dict):
        raise ArtifactError(f"{scores} is not a finished score table. Make one with 'sfdd score'.")
    if moved_to and len(moved_to) != len(fingerprints):
        raise UsageError(
            f"--data names {len(moved_to)} data sets, but {len(fingerprints)} were scored: "
            f"{', '.join(fingerprints)}. Name all of them, in that order."
        )
    names = moved_to or tuple(fingerprints)
    sources = {
        scored_as: open_source(name) for scored_as, name in zip(fingerprints, names, strict=True)
    }
    for scored_as, source in sources.items():
        check_unchanged(source, fingerprints[scored_as])
    return sources


def _write(
    run: RunDirectory,
    selection: Selection,
    sources: dict[str, Source],
    scores: Provenance,
    config: FilterConfig,
) -> list[Path]:
    """Distilled files and selection together: the selection holds the digests of its files.

    Killed between the two, the files do not match it, which whoever reads them next will notice.
    """
    earlier = _earlier_files(run)
    staging = run.root / "distilled.partial"
    try:
        staged = distill(selection.table, sources, staging)
        distilled = [run.distilled / path.name for path in staged]
        _refuse_to_overwrite(distilled, earlier, sources)
        digests = {path.name: digest_files([path]) for path in staged}
        _write_selection(run, selection, scores, config, digests)
        run.distilled.mkdir(exist_ok=True)
        for path, destination in zip(staged, distilled, strict=True):
            path.replace(destination)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    for path in earlier - set(distilled):
        path.unlink(missing_ok=True)
    return distilled


def _refuse_to_overwrite(
    distilled: list[Path], earlier: set[Path], sources: dict[str, Source]
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


def _read_scores(path: Path, metric: str) -> pa.Table:
    column = METRICS[metric].column
    columns = ["id", "source", "row", "status", "reason", "num_supervised_tokens"]
    try:
        return pq.read_table(path, columns=[*columns, *([column] if column else [])])
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{path} is damaged ({error}). Score again with --overwrite."
        ) from error


def _earlier_files(run: RunDirectory) -> set[Path]:
    """Distilled files of an earlier selection in this run."""
    if not run.selection.exists():
        return set()
    about = read_parquet_provenance(run.selection).about
    return {run.distilled / Path(name).name for name in about.get("distilled", ())}


def _write_selection(
    run: RunDirectory,
    selection: Selection,
    scores: Provenance,
    config: FilterConfig,
    digests: dict[str, str],
) -> None:
    provenance = Provenance(
        identity={
            **scores.identity,
            "metric": config.metric,
            "keep": config.keep,
            **({"seed": config.seed} if METRICS[config.metric].column is None else {}),
        },
        about={
            "target": scores.about["target"],
            "threshold": selection.threshold,
            "distilled": digests,
            "settings": asdict(config),
            "scores": scores.about,
            **environment(),
        },
    )
    metadata = {PARQUET_METADATA_KEY: provenance.to_json()}
    with atomic_path(run.selection) as temporary:
        pq.write_table(selection.table.replace_schema_metadata(metadata), temporary)


def _report(
    run: RunDirectory, selection: Selection, config: FilterConfig, distilled: list[Path]
) -> FilterReport:
    table, kept, dropped = selection.table, selection.kept, selection.dropped
    tokens_kept = pc.sum(kept["num_supervised_tokens"]).as_py() or 0
    tokens_dropped = pc.sum(dropped["num_supervised_tokens"]).as_py() or 0
    return FilterReport(
        selection=run.selection,
        distilled=distilled,
        metric=config.metric,
        keep=config.keep,
        threshold=selection.threshold,
        scored=kept.num_rows + dropped.num_rows,
        skipped=table.num_rows - kept.num_rows - dropped.num_rows,
        kept=kept.num_rows,
        dropped=dropped.num_rows,
        retention_ratio=selection.retention_ratio,
        supervised_tokens_scored=tokens_kept + tokens_dropped,
        supervised_tokens_kept=tokens_kept,
    )
