"""`sfdd score --dry-run`: what a run would read, skip and compute, and how long it would take."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from time import monotonic

from sfdd.conversations.conversation import Conversation, Skipped, TokenizedConversation
from sfdd.conversations.pipeline import open_sources, read_conversations
from sfdd.conversations.records import Source
from sfdd.conversations.rendering import ChatRenderer
from sfdd.errors import DataError
from sfdd.progress import Progress, ProgressCallback, silent
from sfdd.scoring.config import ScoreConfig
from sfdd.targets.backend import Backend, open_backend

# The estimate comes from these many samples, drawn from all over the data, or so many seconds of them.
_WARMUP_SAMPLES = 64
_WARMUP_SECONDS = 10.0
_WARMUP_AT_ONCE = 8  # of any length, as they were drawn
_PATTERNS_NAMED = 12
_MOST_PATTERNS = 10_000


@dataclass(frozen=True)
class ScorePlan:
    """What a scoring run would do; `read` = `scored` + `skipped`.

    Attributes:
        formats: number of records read as each format, and as `none`.
        roles: number of scored conversations by the roles of their turns, the most frequent first; what
            repeats stands in brackets with a plus.
        samples: how many texts the scored conversations are rendered to.
        duplicates: exact copies of an earlier conversation.
        tokens_per_second: of the warm-up, `warmup_tokens` long.
        seconds: estimated for all of the data on this machine.
    """

    read: int
    scored: int
    skipped: int
    formats: dict[str, int]
    roles: dict[str, int]
    reasons: dict[str, int]
    truncated: int
    rewritten: int
    samples: int
    duplicates: int
    num_tokens: int
    num_supervised_tokens: int
    warmup_tokens: int
    tokens_per_second: float
    seconds: float


@dataclass
class _Counts:
    read: int = 0
    scored: int = 0
    truncated: int = 0
    rewritten: int = 0
    samples: int = 0
    duplicates: int = 0
    num_tokens: int = 0
    num_supervised_tokens: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    roles: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    seen: set[int] = field(default_factory=set)
    first_reason: str = ""

    def add(
        self, read: Conversation | Skipped, rendered: list[TokenizedConversation] | Skipped
    ) -> None:
        self.read += 1
        self.formats[read.format if isinstance(read, Conversation) else "none"] += 1
        if isinstance(rendered, Skipped):
            self.reasons[rendered.reason.partition(":")[0]] += 1
            self.first_reason = self.first_reason or rendered.reason
            return
        roles = role_pattern(read.roles) if isinstance(read, Conversation) else ""
        self.roles[roles if len(self.roles) < _MOST_PATTERNS else "others"] += 1
        first = rendered[0]
        self.scored += 1
        self.truncated += first.truncated
        self.rewritten += first.rewritten
        self.samples += len(rendered)
        self.duplicates += hash(first.content_hash) in self.seen
        self.seen.add(hash(first.content_hash))
        self.num_tokens += sum(map(len, rendered))
        self.num_supervised_tokens += sum(sample.num_supervised_tokens for sample in rendered)


def plan(config: ScoreConfig, on_progress: ProgressCallback = silent) -> ScorePlan:
    """Read and render all of the data as `score` would; forward only a few samples.

    Raises:
        SfddError: data or target cannot be used.
        DataError: not one record could be scored.
    """
    sources = open_sources(config.data, config.mask.format)
    backend = open_backend(config.target, config, config.max_length)
    try:
        counts, drawn = _read(sources, backend, config, on_progress)
        if not drawn:
            raise DataError(
                f"None of the {counts.read} records can be scored ({_listed(counts.reasons)}). The "
                f"first: {counts.first_reason or 'there is none'}."
            )
        tokens, seconds = _warm_up(backend, drawn, on_progress)
    finally:
        backend.close()
    return _plan(counts, tokens, tokens / seconds)


def _read(
    sources: list[Source], backend: Backend, config: ScoreConfig, on_progress: ProgressCallback
) -> tuple[_Counts, list[TokenizedConversation]]:
    """Render everything; what it is, and a fair draw of it."""
    renderer = ChatRenderer(
        backend.tokenizer, backend.usable_length(config.max_length), config.mask
    )
    counts, drawn, random = _Counts(), list[TokenizedConversation](), Random(0)
    for item in read_conversations(sources, config.mask.format):
        rendered = item if isinstance(item, Skipped) else renderer.render(item)
        if not isinstance(rendered, Skipped):
            _draw(drawn, random.choice(rendered), counts.scored, random)
        counts.add(item, rendered)
        figures = {"skipped": str(counts.read - counts.scored)}
        on_progress(Progress("reading", "records", counts.read, None, counts.num_tokens, figures))
    return counts, drawn


def _draw(
    drawn: list[TokenizedConversation], sample: TokenizedConversation, before: int, random: Random
) -> None:
    """Keep a fair draw of everything seen (reservoir sampling); `before` have been seen already."""
    if len(drawn) < _WARMUP_SAMPLES:
        drawn.append(sample)
    elif (place := random.randrange(before + 1)) < _WARMUP_SAMPLES:
        drawn[place] = sample


def _warm_up(
    backend: Backend, drawn: Sequence[TokenizedConversation], on_progress: ProgressCallback
) -> tuple[int, float]:
    """Tokens forwarded and seconds taken, after a first sample that is not counted."""
    list(backend.token_stats(drawn[:1]))
    tokens, started = 0, monotonic()
    for first in range(0, len(drawn), _WARMUP_AT_ONCE):
        for batch, _ in backend.token_stats(drawn[first : first + _WARMUP_AT_ONCE]):
            tokens += sum(map(len, batch))
        on_progress(Progress("warm-up", "samples", first, len(drawn), tokens))
        if monotonic() - started > _WARMUP_SECONDS:
            break
    return tokens, monotonic() - started


def _plan(counts: _Counts, warmup_tokens: int, tokens_per_second: float) -> ScorePlan:
    return ScorePlan(
        read=counts.read,
        scored=counts.scored,
        skipped=counts.read - counts.scored,
        formats=dict(counts.formats.most_common()),
        roles=_most_frequent(counts.roles),
        reasons=dict(counts.reasons.most_common()),
        truncated=counts.truncated,
        rewritten=counts.rewritten,
        samples=counts.samples,
        duplicates=counts.duplicates,
        num_tokens=counts.num_tokens,
        num_supervised_tokens=counts.num_supervised_tokens,
        warmup_tokens=warmup_tokens,
        tokens_per_second=tokens_per_second,
        seconds=counts.num_tokens / tokens_per_second,
    )


def role_pattern(roles: Sequence[str]) -> str:
    """Roles in order, what repeats written once: `system (user assistant)+`."""
    pattern = re.sub(r"\b(\w+(?: \w+){0,3}?)(?: \1)+\b", r"(\1)+", " ".join(roles))
    return pattern or "(tokens)"


def _most_frequent(patterns: Counter[str]) -> dict[str, int]:
    named = dict(patterns.most_common(_PATTERNS_NAMED))
    others = patterns.total() - sum(named.values())
    return named | ({"others": others + named.get("others", 0)} if others else {})


def _listed(reasons: Counter[str]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in reasons.most_common()) or "no records"
