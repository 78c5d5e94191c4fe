"""`sfdd score`: read, tokenize, forward, write — for every record, once."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from sfdd.artifacts import Provenance, RunDirectory, environment, exclusive
from sfdd.conversations.conversation import Origin, Skipped, TokenizedConversation
from sfdd.conversations.pipeline import open_sources, tokenize
from sfdd.conversations.records import Source
from sfdd.errors import DataError
from sfdd.progress import Progress, ProgressCallback, silent
from sfdd.scoring.batching import batches, windows
from sfdd.scoring.config import ScoreConfig
from sfdd.scoring.schema import SCORED, SKIPPED, score_schema, scored_row, skipped_row
from sfdd.scoring.store import ScoreStore
from sfdd.targets.statistics import TokenStats
from sfdd.targets.transformers_target import TransformersTarget

T = TypeVar("T")

LOSS_MASK_RULE = "assistant content, reasoning, tool calls and end of turn"


@dataclass(frozen=True)
class ScoreReport:
    """What a scoring run did; `read` = `scored` + `skipped`.

    Attributes:
        resumed: how many of `read` were finished before this process.
        rewritten: scored conversations whose history the template rewrites.
        duplicates: scored conversations that are exact copies of an earlier one.
        reasons: number of skipped records by reason.
        mean_flatness: over scored conversations; None if there are none.
        seconds: of this process, model loading excluded.
        tokens_per_second: conversation tokens forwarded per second, padding not counted.
    """

    scores: Path
    read: int
    scored: int
    skipped: int
    resumed: int
    truncated: int
    rewritten: int
    duplicates: int
    reasons: dict[str, int]
    num_tokens: int
    num_supervised_tokens: int
    mean_flatness: float | None
    seconds: float
    tokens_per_second: float


@dataclass
class _Counts:
    """Running totals of this process."""

    total: Future[int]
    done: int = 0
    resumed: int = 0
    tokens: int = 0
    skipped: int = 0

    def moment(self) -> Progress:
        figures = {"skipped": str(self.skipped)} if self.skipped else {}
        total = self.total.result() if self.total.done() else None
        return Progress(
            "scoring", "conversations", self.done, total, self.tokens, figures, self.resumed
        )


def score(config: ScoreConfig, on_progress: ProgressCallback = silent) -> ScoreReport:
    """Score every conversation of some data sets into the run's scores.parquet.

    Raises:
        SfddError: data or target cannot be used, or the run holds scores of other provenance.
        DataError: not one record could be scored; the table with the reasons is there.
    """
    sources = open_sources(config.data, config.mask.format)
    # Locked before the target is loaded: nobody waits for that to be told that the run is in use.
    with exclusive(RunDirectory(config.run), "score"):
        target = TransformersTarget.load(
            config.target,
            dtype=config.dtype,
            device=config.device,
            attn_implementation=config.attn_implementation,
            trust_remote_code=config.trust_remote_code,
        )
        return score_with(target, sources, config, on_progress)


def score_with(
    target: TransformersTarget,
    sources: list[Source],
    config: ScoreConfig,
    on_progress: ProgressCallback = silent,
) -> ScoreReport:
    """`score` with a target and data sets that are open already, in a run of the caller's alone."""
    run = RunDirectory(config.run)
    config = replace(config, max_length=target.usable_length(config.max_length))
    provenance = _provenance(config, target, sources)
    names = [source.name for source in sources]
    schema = score_schema(config.token_scores)
    store = ScoreStore(run, schema, provenance, names, config.overwrite)
    started = monotonic()
    # Both read all of the data; the first batch does not wait for them.
    counts = _Counts(_in_background(lambda: sum(source.count() for source in sources)))
    fingerprints = _in_background(lambda: {s.name: s.fingerprint() for s in sources})
    on_progress(counts.moment())
    try:
        for parts, stats in _whole(_forward(target, sources, config, store, counts)):
            store.add([scored_row(parts, stats)])
            counts.done += 1
            counts.tokens += sum(map(len, parts))
            on_progress(counts.moment())
    finally:
        store.flush()
    counts.total.result()
    on_progress(counts.moment())
    about = {**provenance.about, "data": fingerprints.result()}
    table = store.finish(Provenance(provenance.identity, about))
    report = _report(table, run.scores, store.resumed, counts, monotonic() - started)
    if not report.scored:
        reasons = ", ".join(f"{reason} {count}" for reason, count in report.reasons.items())
        raise DataError(
            f"None of the {report.read} records could be scored ({reasons or 'there are none'}). "
            f"The column 'reason' of {run.scores} says why, record by record."
        )
    return report


def _forward(
    target: TransformersTarget,
    sources: list[Source],
    config: ScoreConfig,
    store: ScoreStore,
    counts: _Counts,
) -> Iterator[tuple[list[TokenizedConversation], list[TokenStats]]]:
    """The statistics of every conversation that has none yet, batch by batch."""
    records = tokenize(sources, target.tokenizer, config.max_length, config.mask)
    for window in windows(_unfinished(records, store, counts)):
        for batch in batches(window, config.batch_tokens):
            yield batch, target.token_stats(batch)


def _whole(
    batches: Iterable[tuple[list[TokenizedConversation], list[TokenStats]]],
) -> Iterator[tuple[list[TokenizedConversation], TokenStats]]:
    """Conversations with all their samples, in whatever batches and order those were forwarded."""
    waiting: dict[Origin, dict[int, tuple[TokenizedConversation, TokenStats]]] = {}
    for batch, stats in batches:
        for sample, of_sample in zip(batch, stats, strict=True):
            parts = waiting.setdefault(sample.origin, {})
            parts[sample.part] = (sample, of_sample)
            if len(parts) == sample.parts:
                del waiting[sample.origin]
                samples, statistics = zip(*(parts[i] for i in range(sample.parts)), strict=True)
                yield list(samples), TokenStats.join(statistics)


def _in_background(work: Callable[[], T]) -> Future[T]:
    """Run in a thread that an interrupted process does not wait for."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def _unfinished(
    records: Iterable[TokenizedConversation | Skipped], store: ScoreStore, counts: _Counts
) -> Iterator[TokenizedConversation]:
    """Samples that still need a forward pass; skipped records go straight to the store."""
    for _, parts in groupby(records, key=lambda item: item.origin):
        item = next(parts)
        if store.holds(item):
            counts.resumed += 1
            counts.done += 1
        elif isinstance(item, Skipped):
            store.add([skipped_row(item)])
            counts.skipped += 1
            counts.done += 1
        else:
            yield item
            yield from (part for part in parts if not isinstance(part, Skipped))


def _provenance(
    config: ScoreConfig, target: TransformersTarget, sources: list[Source]
) -> Provenance:
    return Provenance(
        identity={
            **target.identity,
            "max_length": config.max_length,
            "loss_mask": LOSS_MASK_RULE,
            **config.mask.identity(),
            "token_scores": config.token_scores,
        },
        about={
            "target": target.source.reference,
            "data": [source.name for source in sources],
            "settings": asdict(config),
            **environment(),
        },
    )


def _report(
    table: pa.Table, scores: Path, resumed: int, counts: _Counts, seconds: float
) -> ScoreReport:
    status = Counter(table["status"].to_pylist())
    reasons = (reason.split(":")[0] for reason in table["reason"].to_pylist() if reason)
    return ScoreReport(
        scores=scores,
        read=table.num_rows,
        scored=status[SCORED],
        skipped=status[SKIPPED],
        resumed=resumed,
        truncated=_sum(table["truncated"]),
        rewritten=_sum(table["rewritten"]),
        duplicates=_duplicates(table),
        reasons=dict(Counter(reasons).most_common()),
        num_tokens=_sum(table["num_tokens"]),
        num_supervised_tokens=_sum(table["num_supervised_tokens"]),
        mean_flatness=pc.mean(table["flatness"]).as_py(),
        seconds=seconds,
        tokens_per_second=counts.tokens / seconds,
    )


def _duplicates(table: pa.Table) -> int:
    hashes = table.filter(pc.equal(table["status"], SCORED))["content_hash"]
    return len(hashes) - int(pc.count_distinct(hashes).as_py())


def _sum(column: Any) -> int:
    return int(pc.sum(column).as_py() or 0)
