"""`sfdd export-data`: the distilled conversations, in the form that another trainer reads."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sfdd.artifacts import (
    Provenance,
    RunDirectory,
    atomic_path,
    digest_files,
    environment,
    write_text,
)
from sfdd.conversations.conversation import Skipped
from sfdd.conversations.pipeline import open_sources, read_conversations
from sfdd.conversations.records import Source
from sfdd.conversations.rendering import ChatRenderer
from sfdd.errors import ArtifactError, DataError, UsageError
from sfdd.export.config import ExportDataConfig
from sfdd.export.recorded import Recorded, as_recorded
from sfdd.export.records import AsText, AsTokens, Converter, any_reasoning
from sfdd.export.trainers import TRAINERS, TextForm, Trainer
from sfdd.export.writing import Write, json_lines, parquet_turns
from sfdd.progress import Progress, ProgressCallback, silent
from sfdd.targets.loading import TargetSource, tokenizer_identity


@dataclass(frozen=True)
class ExportDataReport:
    """What was written: `read` = `written` + `skipped`, in conversations.

    Attributes:
        trainer: as its authors write it.
        form: "text" or "tokens".
        provenance: where it is written what the output was made of.
        hand_over: the setting of the trainer that takes the output.
        rows: of the output; more than `written` where the chat template makes samples of a conversation.
        reasons: how many were skipped, by reason.
        truncated: conversations cut at the maximum length.
        notes: what the form cannot say of how the run was scored.
    """

    trainer: str
    form: str
    output: Path
    provenance: Path
    hand_over: str
    data: tuple[str, ...]
    read: int
    written: int
    rows: int
    skipped: int
    reasons: Mapping[str, int] = field(default_factory=dict)
    truncated: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Plan:
    """What becomes of every conversation, where the rows go, and what decides how they come out."""

    convert: Converter
    writer: Callable[[Path], AbstractContextManager[Write]]
    suffix: str
    identity: Mapping[str, Any]


def export_data(
    config: ExportDataConfig, on_progress: ProgressCallback = silent
) -> ExportDataReport:
    """Write conversations as another trainer reads them, and beside the file what it was made of.

    The same data and settings give the same bytes.

    Raises:
        UsageError: the trainer does not read that form; or no data or target are given, and the run has
            none.
        DataError: a data set cannot be read, or none of its conversations can be written.
        ArtifactError: the output exists or cannot be written; the run's data are not what was selected,
            or were selected by another target.
        TargetError: the target's tokenizer cannot be loaded.
    """
    trainer = TRAINERS[config.trainer]
    form = trainer.chosen(config.form)
    config, recorded = as_recorded(config)
    sources = open_sources(config.data, config.format)
    plan = (
        _text_plan(config, trainer.text, sources)
        if form == "text"
        else _tokens_plan(config, recorded)
    )
    output = (
        config.output or RunDirectory(config.run).root / f"export/{config.trainer}{plan.suffix}"
    )
    # Not .json: given a folder, some loaders read all files of that name in it.
    sidecar = output.with_name(f"{output.name}.provenance")
    for path in (output, sidecar):
        _refuse_to_overwrite(path, sources, config.overwrite)
    with atomic_path(output) as temporary:
        with plan.writer(temporary) as write:
            counts = _write(sources, config, plan.convert, write, on_progress)
        report = ExportDataReport(
            trainer=trainer.name,
            form=form,
            output=output,
            provenance=sidecar,
            hand_over=trainer.hand_over[form].format(output),
            data=config.data,
            notes=tuple(_notes(config, form, recorded)),
            **counts,
        )
        _refuse_nothing(trainer, report)
        provenance = _provenance(config, plan, sources, recorded, report, temporary)
    write_text(sidecar, provenance.to_json())
    return report


def _text_plan(config: ExportDataConfig, form: TextForm, sources: Sequence[Source]) -> _Plan:
    """Reasoning is looked for beforehand: plain chats are better off without the key."""
    writes_reasoning = form.reasoning and any_reasoning(
        read_conversations(sources, config.format), config.mask
    )
    parquet = form.suffix == ".parquet"
    return _Plan(
        AsText(form, config.mask.reasoning, writes_reasoning),
        partial(parquet_turns, form=form, writes_reasoning=writes_reasoning)
        if parquet
        else json_lines,
        form.suffix,
        {"for": config.trainer, "form": "text", "reasoning": config.mask.reasoning},
    )


def _tokens_plan(config: ExportDataConfig, recorded: Recorded) -> _Plan:
    if not config.target:
        raise UsageError(
            f"Tokens are made by a target's tokenizer, and nothing was scored in {config.run}: give "
            "--target, or --form text."
        )
    source = TargetSource(config.target, config.trust_remote_code)
    tokenizer = source.load_tokenizer()
    tokenizer_is = tokenizer_identity(tokenizer)
    recorded.check_tokenizer(config.target, tokenizer_is)
    max_length = config.max_length or 0
    return _Plan(
        AsTokens(ChatRenderer(tokenizer, max_length, config.mask)),
        json_lines,
        ".jsonl",
        {
            "for": config.trainer,
            "form": "tokens",
            **tokenizer_is,
            **config.mask.identity(),
            "max_length": max_length,
        },
    )


def _refuse_to_overwrite(output: Path, sources: Sequence[Source], overwrite: bool) -> None:
    if any(Path(source.name) == output.resolve() for source in sources):
        raise ArtifactError(f"{output} is one of the data sets to export. Choose another output.")
    if output.is_dir():
        raise ArtifactError(f"{output} is a directory. Name a file to write.")
    if output.exists() and not overwrite:
        raise ArtifactError(f"{output} exists. Choose another output, or add --overwrite.")


def _write(
    sources: Sequence[Source],
    config: ExportDataConfig,
    convert: Converter,
    write: Write,
    on_progress: ProgressCallback,
) -> dict[str, Any]:
    """Convert and write every conversation; the counts of the report."""
    total = sum(source.count() for source in sources)
    read = rows = truncated = 0
    reasons: Counter[str] = Counter()
    for item in read_conversations(sources, config.format):
        records = item if isinstance(item, Skipped) else convert(item)
        read += 1
        if isinstance(records, Skipped):
            reasons[records.reason.partition(":")[0]] += 1
        else:
            for record in records:
                write(record.value)
            rows += len(records)
            truncated += any(record.truncated for record in records)
        on_progress(Progress("exporting", "conversations", read, total))
    skipped = reasons.total()
    return {
        "read": read,
        "written": read - skipped,
        "rows": rows,
        "skipped": skipped,
        "reasons": dict(reasons.most_common()),
        "truncated": truncated,
    }


def _refuse_nothing(trainer: Trainer, report: ExportDataReport) -> None:
    if report.written:
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in report.reasons.items())
    other = " Try --form tokens." if report.form == "text" and "tokens" in trainer.hand_over else ""
    raise DataError(
        f"None of the {report.read} conversations can be written as {trainer.name} reads them "
        f"({reasons or 'there are no records'}), so nothing was.{other}"
    )


def _notes(config: ExportDataConfig, form: str, recorded: Recorded) -> Iterator[str]:
    """What the trainer does not learn from text of how the run was scored."""
    if form == "text" and config.mask.last_turn_only:
        yield (
            "Only the last answer of a conversation was scored, and text cannot say so: set the trainer "
            "to supervise that alone, or it learns all of them."
        )
    if form == "text" and recorded.of_the_run and (cut := _cut_when_scored(config)):
        yield (
            f"{cut:,} of the scored conversations were cut at {config.max_length} tokens, and text is "
            "written whole: set the trainer to cut it there, or it learns more than was scored."
        )


def _cut_when_scored(config: ExportDataConfig) -> int:
    """How many of the run's conversations were cut at the maximum length; 0 where that is not known."""
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(RunDirectory(config.run).scores, columns=["truncated"])
        return sum(table["truncated"].to_pylist())
    except (OSError, ValueError, LookupError):  # the selection alone is needed
        return 0


def _provenance(
    config: ExportDataConfig,
    plan: _Plan,
    sources: Sequence[Source],
    recorded: Recorded,
    report: ExportDataReport,
    written: Path,
) -> Provenance:
    """What the output was made of; it names the output by its content."""
    data = {source.name: source.fingerprint() for source in sources}
    run = recorded.provenance
    return Provenance(
        identity={**plan.identity, "data": data, "output": digest_files([written])},
        about={
            "target": config.target,
            "report": asdict(report),
            "run": json.loads(run.to_json()) if run else None,
            **environment(),
        },
    )
