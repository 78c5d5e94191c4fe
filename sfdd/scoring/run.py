"""`sfdd score`: read, tokenize, forward, write — for every record, once."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from threading import Thread
from time import monotonic
from typing import TypeVar

from sfdd.artifacts import Provenance, RunDirectory, environment, exclusive
from sfdd.conversations.conversation import Origin, Skipped, TokenizedConversation
from sfdd.conversations.pipeline import open_sources, read_conversations
from sfdd.conversations.records import Source
from sfdd.conversations.rendering import ChatRenderer
from sfdd.errors import ArtifactError, DataError
from sfdd.progress import Progress, ProgressCallback, silent
from sfdd.scoring.batching import ahead, windows
from sfdd.scoring.config import ScoreConfig
from sfdd.scoring.report import ScoreReport, Work, make_report, report_of_part
from sfdd.scoring.schema import score_schema, scored_row, skipped_row
from sfdd.scoring.store import ScoreStore
from sfdd.scoring.watch import Watch
from sfdd.scoring.workers import ALONE, Worker, device_of_worker, this_worker
from sfdd.targets.backend import Backend, open_backend
from sfdd.targets.statistics import TokenStats

T = TypeVar("T")

LOSS_MASK_RULE = "assistant content, reasoning, tool calls and end of turn"


class _Data:
    """The data sets, counted (and fingerprinted) behind the first batches: both read all of them."""

    def __init__(self, sources: list[Source], worker: Worker) -> None:
        self.sources = sources
        self.worker = worker
        self._counts = _in_background(lambda: [source.count() for source in sources])
        # Of several workers only the one that merges needs them, and nobody knows yet which.
        self._fingerprints = _in_background(self._read_fingerprints) if worker.is_alone else None

    @property
    def records(self) -> int:
        return sum(self._counts.result())

    @property
    def share(self) -> int | None:
        """Records of this worker; None while they are being counted."""
        return sum(map(self.worker.share, self._counts.result())) if self._counts.done() else None

    @property
    def fingerprints(self) -> dict[str, str]:
        return self._fingerprints.result() if self._fingerprints else self._read_fingerprints()

    def _read_fingerprints(self) -> dict[str, str]:
        return {source.name: source.fingerprint() for source in self.sources}


@dataclass
class _Counts:
    """Running totals of this process."""

    done: int = 0
    resumed: int = 0
    tokens: int = 0
    skipped: int = 0

    def moment(self, total: int | None) -> Progress:
        figures = {"skipped": str(self.skipped)} if self.skipped else {}
        return Progress(
            "scoring", "conversations", self.done, total, self.tokens, figures, self.resumed
        )


def score(config: ScoreConfig, on_progress: ProgressCallback = silent) -> ScoreReport:
    """Score every conversation of some data sets into the run's scores.parquet.

    Raises:
        SfddError: data or target cannot be used, or the run holds scores of other provenance.
        DataError: not one record could be scored; the table with the reasons is there.
    """
    worker = this_worker(config.shard_index, config.num_shards)
    sources = open_sources(config.data, config.mask.format)
    # Locked before the target is loaded: nobody waits for that to be told that the run is in use.
    with worker.alone_at_its_part(RunDirectory(config.run)):
        device = device_of_worker(config.device, config.tensor_parallel_size or 1)
        backend = open_backend(config.target, replace(config, device=device), config.max_length)
        try:
            return score_with(backend, sources, config, on_progress, worker)
        finally:
            backend.close()


def score_with(
    backend: Backend,
    sources: list[Source],
    config: ScoreConfig,
    on_progress: ProgressCallback = silent,
    worker: Worker = ALONE,
) -> ScoreReport:
    """`score` with an engine and data sets that are open already, in a part of the caller's alone."""
    run = RunDirectory(config.run)
    config = replace(config, max_length=backend.usable_length(config.max_length))
    provenance = _provenance(config, backend, sources)
    schema = score_schema(config.token_scores)
    names = [source.name for source in sources]
    store = ScoreStore(run, schema, provenance, names, worker, config.overwrite)
    data = _Data(sources, worker)
    work = _score_all(backend, data, config, store, on_progress)
    if not _merge(run, store, provenance, data):
        return report_of_part(run.scores, work)
    report = make_report(run.scores, work)
    if not report.scored:
        reasons = ", ".join(f"{reason} {count}" for reason, count in report.reasons.items())
        raise DataError(
            f"None of the {report.read} records could be scored ({reasons or 'there are none'}). The "
            f"column 'reason' of {run.scores} says why, record by record; so does 'sfdd inspect'."
        )
    return report


def _score_all(
    backend: Backend,
    data: _Data,
    config: ScoreConfig,
    store: ScoreStore,
    on_progress: ProgressCallback,
) -> Work:
    """Bring a row of every record of this worker into the store."""
    started = monotonic()
    renderer = ChatRenderer(backend.tokenizer, config.max_length, config.mask)
    watch = Watch(config.target, backend.vocab_size)
    counts = _Counts()
    on_progress(counts.moment(data.share))
    try:
        for window in ahead(lambda: windows(_records(data, config, renderer, store))):
            store.add([skipped_row(item) for item in window.skipped])
            counts.resumed += window.resumed
            counts.skipped += len(window.skipped)
            counts.done += window.resumed + len(window.skipped)
            for parts, stats in _whole(backend.token_stats(window.samples)):
                watch.see(stats)
                store.add([scored_row(parts, stats)])
                counts.done += 1
                counts.tokens += sum(map(len, parts))
                on_progress(counts.moment(data.share))
            on_progress(counts.moment(data.share))
    finally:
        store.flush()
    watch.judge()
    store.finished.require_all_seen()
    on_progress(counts.moment(counts.done))
    return Work(
        resumed=store.resumed,
        records=counts.done,
        tokens=counts.tokens,
        computed_tokens=backend.computed_tokens,
        batch_tokens=backend.batch_tokens,
        engine=backend.engine,
        seconds=monotonic() - started,
    )


def _records(
    data: _Data, config: ScoreConfig, renderer: ChatRenderer, store: ScoreStore
) -> Iterator[list[TokenizedConversation] | Skipped | None]:
    """This worker's records: rendered, skipped, or None for one whose row is there."""
    for item in read_conversations(data.sources, config.mask.format, data.worker.takes):
        if store.finished.holds(item.origin, item.content_hash):
            yield None
        else:
            yield item if isinstance(item, Skipped) else renderer.render(item)


def _whole(
    batches: Iterable[tuple[Sequence[TokenizedConversation], Sequence[TokenStats]]],
) -> Iterator[tuple[Sequence[TokenizedConversation], TokenStats]]:
    """Conversations with all their samples, in whatever batches and order those were forwarded."""
    waiting: dict[Origin, dict[int, tuple[TokenizedConversation, TokenStats]]] = {}
    for batch, stats in batches:
        for sample, of_sample in zip(batch, stats, strict=True):
            parts = waiting.setdefault(sample.origin, {})
            parts[sample.part] = (sample, of_sample)
            if len(parts) == sample.parts:
                del waiting[sample.origin]
                samples, statistics = zip(*(parts[i] for i in range(sample.parts)), strict=True)
                yield samples, TokenStats.join(statistics)


def _merge(run: RunDirectory, store: ScoreStore, provenance: Provenance, data: _Data) -> bool:
    """Make the finished table, if every record has its row; False if other workers are not done.

    Workers wait for one another here: one that looked just before another's last rows were there would
    leave, and the other must look again.
    """
    with exclusive(run, "score-merge", wait=True):
        pieces, keys = store.keys()
        if len(keys) == data.records:
            if data.worker.is_alone or any(piece.path != run.scores for piece in pieces):
                about = {**provenance.about, "data": data.fingerprints}
                store.merge(pieces, keys, Provenance(provenance.identity, about))
            return True
        if data.worker.is_alone:  # so nobody else will bring the missing rows
            raise ArtifactError(
                f"{data.records - len(keys)} rows in {run.shards} were lost while this ran. Run the same "
                "command again: it scores them alone."
            )
    return False


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


def _provenance(config: ScoreConfig, backend: Backend, sources: list[Source]) -> Provenance:
    return Provenance(
        identity={
            **backend.identity,
            "max_length": config.max_length,
            "loss_mask": LOSS_MASK_RULE,
            **config.mask.identity(),
            "token_scores": config.token_scores,
        },
        about={
            "target": backend.source.reference,
            **backend.about,
            "data": [source.name for source in sources],
            "settings": asdict(config),
            **environment(),
        },
    )
