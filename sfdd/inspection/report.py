"""What `sfdd inspect` shows: a record, its tokens and its numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Token:
    """A token in its place in a rendered conversation.

    Attributes:
        text: its part of the text; the texts of all tokens join to the whole. A character that takes
            several tokens stands at the last of them, whole, and the others are "".
        flatness: of the distribution that predicts it; None if that is not known, or not supervised.
    """

    id: int
    text: str
    supervised: bool
    flatness: float | None = None


@dataclass(frozen=True)
class InspectReport:
    """A record as the target sees it.

    Attributes:
        status: `rendered`, or `skipped` for the `reason` that is given.
        roles: of its turns; none for a record that came as tokens, or could not be read.
        num_tokens, num_supervised_tokens: of all its samples.
        flatness, entropy, top1, margin, energy, nll: means over the supervised tokens, if scored.
        effective_tokens: how many tokens a distribution of that flatness spreads over, V flatness^2.
        vocab_size: V; None if not scored.
        scores: where the numbers come from: the score table, or `live`.
        notes: sentences on what is not shown, and why.
        messages: of a skipped record that could be read.
        samples: one, or one per assistant turn where the template rewrites history.
    """

    id: str
    source: str
    row: int
    format: str
    roles: tuple[str, ...]
    status: str
    reason: str | None
    content_hash: str
    truncated: bool = False
    rewritten: bool = False
    num_tokens: int = 0
    num_supervised_tokens: int = 0
    flatness: float | None = None
    entropy: float | None = None
    top1: float | None = None
    margin: float | None = None
    energy: float | None = None
    nll: float | None = None
    effective_tokens: float | None = None
    vocab_size: int | None = None
    scores: str | None = None
    notes: tuple[str, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    samples: tuple[tuple[Token, ...], ...] = ()
