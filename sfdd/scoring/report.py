"""What a scoring run did, read from its finished table."""

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sfdd.scoring.schema import SCORED, SKIPPED

_COLUMNS = ["status", "reason", "content_hash", "num_tokens", "num_supervised_tokens"]
_COLUMNS += ["truncated", "rewritten", "flatness"]


@dataclass(frozen=True)
class Work:
    """What this process did, as opposed to the whole run.

    Attributes:
        resumed: records of its part that were finished before.
        records: records of its part.
        tokens: conversation tokens forwarded, padding not counted.
        computed_tokens: padding included.
        batch_tokens: budget per batch at the end; lower than asked for if memory ran out.
        engine: what computed, such as "transformers, float32 on cpu".
        seconds: model loading excluded.
    """

    resumed: int
    records: int
    tokens: int
    computed_tokens: int
    batch_tokens: int
    engine: str
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def padding(self) -> float:
        """Fraction of the computed tokens that was padding."""
        return 1 - self.tokens / self.computed_tokens if self.computed_tokens else 0.0


@dataclass(frozen=True)
class ScoreReport:
    """The run's table after this process; `read` = `scored` + `skipped`.

    Attributes:
        complete: every record has its row; False where other workers are not done.
        resumed: how many of `read` were finished before this process.
        rewritten: scored conversations whose history the template rewrites.
        duplicates: scored conversations that are exact copies of an earlier one.
        reasons: number of skipped records by reason.
        mean_flatness: over scored conversations; None if there are none.
        seconds: of this process, model loading excluded.
        tokens_per_second: conversation tokens forwarded per second, padding not counted.
        padding: fraction of the computed tokens that was padding.
        batch_tokens: padded tokens per batch; lower than asked for if memory ran out.
        engine: what computed, such as "transformers, float32 on cpu".
    """

    scores: Path
    complete: bool
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
    padding: float
    batch_tokens: int
    engine: str


def make_report(scores: Path, work: Work) -> ScoreReport:
    """The report of a finished table."""
    return _report(pq.read_table(scores, columns=_COLUMNS), scores, work, complete=True)


def report_of_part(scores: Path, work: Work) -> ScoreReport:
    """The report of a worker that others have not followed yet: only its own work is known."""
    empty = pa.table({name: pa.array([], _TYPES[name]) for name in _COLUMNS})
    return _report(empty, scores, work, complete=False)


_TYPES = dict.fromkeys(_COLUMNS, pa.int64()) | dict.fromkeys(_COLUMNS[:3], pa.string())
_TYPES |= dict.fromkeys(["truncated", "rewritten"], pa.bool_()) | {"flatness": pa.float64()}


def _report(table: pa.Table, scores: Path, work: Work, complete: bool) -> ScoreReport:
    status = _counts(table["status"])
    kinds = pc.list_element(pc.split_pattern(pc.drop_null(table["reason"]), ":", max_splits=1), 0)
    hashes = table.filter(pc.equal(table["status"], SCORED))["content_hash"]
    return ScoreReport(
        scores=scores,
        complete=complete,
        read=table.num_rows if complete else work.records,
        scored=status.get(SCORED, 0),
        skipped=status.get(SKIPPED, 0),
        resumed=work.resumed,
        truncated=_sum(table["truncated"]),
        rewritten=_sum(table["rewritten"]),
        duplicates=len(hashes) - int(pc.count_distinct(hashes).as_py()),
        reasons=_counts(kinds),
        num_tokens=_sum(table["num_tokens"]),
        num_supervised_tokens=_sum(table["num_supervised_tokens"]),
        mean_flatness=pc.mean(table["flatness"]).as_py(),
        seconds=work.seconds,
        tokens_per_second=work.tokens_per_second,
        padding=work.padding,
        batch_tokens=work.batch_tokens,
        engine=work.engine,
    )


def _counts(column: pa.ChunkedArray) -> dict[str, int]:
    """Number of rows by value, the most frequent first."""
    pairs = [(pair["values"], pair["counts"]) for pair in pc.value_counts(column).to_pylist()]
    return dict(sorted(pairs, key=lambda pair: -pair[1]))


def _sum(column: pa.ChunkedArray) -> int:
    return int(pc.sum(column).as_py() or 0)
