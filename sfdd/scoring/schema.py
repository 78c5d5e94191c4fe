"""The columns of scores.parquet, and a row for every record read."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from sfdd.conversations.conversation import Skipped, SkipReason, TokenizedConversation
from sfdd.targets.statistics import STATISTICS, TokenStats

SCORED, SKIPPED = "scored", "skipped"


def score_schema(token_scores: bool) -> pa.Schema:
    """One row a record read, in the order of the data; means are over supervised tokens.

    `reason`, the means and `token_flatness` are null where they do not apply. Where the template rewrites
    history, a conversation is several samples (`num_samples`); tokens and means are over all of them.
    `num_turns` counts assistant turns.
    """
    columns = [
        pa.field("id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("content_hash", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("reason", pa.string()),
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("num_supervised_tokens", pa.int32(), nullable=False),
        pa.field("num_samples", pa.int32(), nullable=False),
        pa.field("num_turns", pa.int32(), nullable=False),
        pa.field("truncated", pa.bool_(), nullable=False),
        pa.field("rewritten", pa.bool_(), nullable=False),
        *(pa.field(name, pa.float64()) for name in STATISTICS),
    ]
    if token_scores:
        columns.append(pa.field("token_flatness", pa.list_(pa.float32())))
    return pa.schema(columns)


def skipped_row(item: Skipped) -> dict[str, Any]:
    """The row of a record that was not scored."""
    return {
        "id": item.id,
        "source": item.origin.source,
        "row": item.origin.row,
        "content_hash": item.content_hash,
        "status": SKIPPED,
        "reason": item.reason,
        "num_tokens": 0,
        "num_supervised_tokens": 0,
        "num_samples": 0,
        "num_turns": 0,
        "truncated": False,
        "rewritten": False,
    }


def scored_row(parts: Sequence[TokenizedConversation], stats: TokenStats) -> dict[str, Any]:
    """The row of a scored conversation; one whose statistics are not finite counts as skipped.

    Args:
        parts: its samples, in order.
        stats: of the supervised tokens of all of them, in order.
    """
    first = parts[0]
    finite = stats.all_finite()
    row = {
        "id": first.id,
        "source": first.origin.source,
        "row": first.origin.row,
        "content_hash": first.content_hash,
        "status": SCORED if finite else SKIPPED,
        "reason": None if finite else str(SkipReason.NON_FINITE),
        "num_tokens": sum(map(len, parts)),
        "num_supervised_tokens": sum(part.num_supervised_tokens for part in parts),
        "num_samples": len(parts),
        "num_turns": first.num_turns,
        "truncated": first.truncated,
        "rewritten": first.rewritten,
    }
    return row | stats.means() | {"token_flatness": stats.flatness} if finite else row
