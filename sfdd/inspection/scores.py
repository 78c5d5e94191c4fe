"""The numbers of one conversation: from the run's score table, or from the target itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from sfdd.artifacts import Provenance
from sfdd.conversations.conversation import Origin, TokenizedConversation
from sfdd.errors import ArtifactError
from sfdd.targets.statistics import STATISTICS, TokenStats
from sfdd.targets.transformers_target import TransformersTarget

LIVE = "live"
_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Scores:
    """What is known of the flatness of a conversation.

    Attributes:
        scores: where it comes from: the score table, or `LIVE`.
        means: of every statistic, over the supervised tokens of all samples.
        token_flatness: of each of those tokens, in order; None if only the means are known. [N]
        vocab_size: V.
    """

    scores: str
    means: Mapping[str, float]
    token_flatness: Sequence[float] | None
    vocab_size: int


def live_scores(
    target: TransformersTarget, samples: Sequence[TokenizedConversation]
) -> Scores | str:
    """Forward the samples one by one; or why there are no numbers."""
    stats = TokenStats.join([target.token_stats([sample])[0] for sample in samples])
    if not stats.all_finite():
        return (
            "The target's logits overflow on this conversation, so it has no flatness (non_finite)."
        )
    return Scores(LIVE, stats.means(), stats.flatness.tolist(), target.vocab_size)


def recorded_scores(
    table: Path,
    provenance: Provenance,
    shown: Mapping[str, Any],
    samples: Sequence[TokenizedConversation],
) -> Scores | str:
    """What the score table says about these very tokens; or why it says nothing.

    Args:
        provenance: of the table.
        shown: what the samples were rendered with: the target's name and what tells the tokens.

    Raises:
        ArtifactError: the table is damaged.
    """
    made_with = {**provenance.identity, "target": provenance.about.get("target")}
    made = Provenance({name: made_with.get(name) for name in shown}, provenance.about)
    if differences := made.differences(Provenance(shown)):
        return (
            f"{table} was made with another {'; '.join(differences)}, so its numbers are not shown. "
            "Leave out the options that differ, or add --score."
        )
    first = samples[0]
    row = _find(table, first.origin, first.content_hash)
    if row is None:
        return f"{table} has no scores of this conversation. Score it, or add --score."
    if row["content_hash"] != first.content_hash:
        return (
            f"Row {first.origin.row} of {first.origin.source} has changed since it was scored, so the "
            f"numbers in {table} are not shown. Score it again with --overwrite, or add --score."
        )
    if row["status"] != "scored":
        return f"This conversation was skipped when it was scored: {row['reason']}."
    supervised = sum(sample.num_supervised_tokens for sample in samples)
    if row["num_supervised_tokens"] != supervised:
        return (
            f"{table} has {row['num_supervised_tokens']} supervised tokens of this conversation, not "
            f"{supervised}: another version of sfdd made it. Score again with --overwrite, or add "
            "--score."
        )
    return Scores(
        scores=str(table),
        means={name: row[name] for name in STATISTICS},
        token_flatness=row.get("token_flatness"),
        vocab_size=provenance.identity["vocab_size"],
    )


def _find(table: Path, origin: Origin, content_hash: str) -> dict[str, Any] | None:
    """The row of a record; where it does not stand there, of the same conversation elsewhere.

    So the distilled data, whose rows are other ones, find the scores that they were chosen by. Only the
    keys are read of the whole table, never every token's flatness.
    """
    try:
        file = pq.ParquetFile(table, pre_buffer=False)
        found: dict[int, tuple[int, int]] = {}
        for group in range(file.num_row_groups):
            keys = file.read_row_group(group, columns=["source", "row", "content_hash"])
            here = pc.and_(
                pc.equal(keys["source"], origin.source), pc.equal(keys["row"], origin.row)
            )
            same = pc.equal(keys["content_hash"], content_hash)
            for rank, matches in enumerate((pc.and_(here, same), same, here)):
                if (index := pc.index(matches, True).as_py()) >= 0:
                    found.setdefault(rank, (group, index))
        return _read_row(file, *found[min(found)]) if found else None
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise ArtifactError(
            f"The scores in {table} are damaged ({error}). Score again with --overwrite."
        ) from error


def _read_row(file: Any, group: int, index: int) -> dict[str, Any]:
    """One row of a row group, which is read as far as there."""
    for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=[group]):
        if index < batch.num_rows:
            return batch.slice(index, 1).to_pylist()[0]
        index -= batch.num_rows
    raise ValueError("a row group ends early")
