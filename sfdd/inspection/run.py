"""`sfdd inspect`: one record, rendered and masked as for scoring, with its flatness where it is known."""

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

from sfdd.artifacts import RunDirectory, read_parquet_provenance
from sfdd.conversations.conversation import Conversation, Skipped, TokenizedConversation
from sfdd.conversations.pipeline import open_sources
from sfdd.conversations.rendering import ChatRenderer
from sfdd.inspection.config import InspectConfig
from sfdd.inspection.records import find_record
from sfdd.inspection.report import InspectReport, Token
from sfdd.inspection.scores import Scores, live_scores, recorded_scores
from sfdd.inspection.tokens import token_texts
from sfdd.targets.loading import TargetSource, tokenizer_identity
from sfdd.targets.transformers_target import TransformersTarget


def inspect_record(config: InspectConfig) -> InspectReport:
    """Find the record, render it, and look up or compute its flatness. Writes nothing.

    Raises:
        UsageError: target or data are not given, and nothing was scored in the run.
        DataError: the data cannot be read, or have no such record.
        TargetError: the target or its tokenizer cannot be loaded.
        ArtifactError: the run's scores are damaged.
    """
    table = RunDirectory(config.run).scores
    scored = read_parquet_provenance(table) if table.is_file() else None
    config = config.as_scored(scored)
    record = find_record(
        open_sources(config.data, config.format), config.row, config.id, config.format
    )
    if isinstance(record, Skipped):
        return _skipped(record)

    source = TargetSource(config.target or "", config.trust_remote_code)
    target = _load(config) if config.score else None
    tokenizer = target.tokenizer if target else source.load_tokenizer()
    max_length = config.max_length or 0
    if target:
        max_length = target.usable_length(max_length)
    samples = ChatRenderer(tokenizer, max_length, config.mask).render(record)
    if isinstance(samples, Skipped):
        return _skipped(samples, record)

    numbers: Scores | str | None = None
    if target:
        numbers = live_scores(target, samples)
    elif scored:
        shown = {
            "target": source.reference,
            **tokenizer_identity(tokenizer),
            **config.mask.identity(),
            "max_length": max_length,
        }
        numbers = recorded_scores(table, scored, shown, samples)
    return _rendered(record, samples, [_texts(tokenizer, s) for s in samples], numbers)


def _load(config: InspectConfig) -> TransformersTarget:
    return TransformersTarget.load(
        config.target or "",
        dtype=config.dtype,
        device=config.device,
        attn_implementation=config.attn_implementation,
        trust_remote_code=config.trust_remote_code,
    )


def _texts(tokenizer: Any, sample: TokenizedConversation) -> list[str]:
    return token_texts(tokenizer, sample.input_ids.tolist())


def _skipped(skipped: Skipped, record: Conversation | None = None) -> InspectReport:
    return InspectReport(
        id=skipped.id,
        source=skipped.origin.source,
        row=skipped.origin.row,
        format=record.format if record else "",
        roles=record.roles if record else (),
        status="skipped",
        reason=skipped.reason,
        content_hash=skipped.content_hash,
        messages=record.messages if record else (),
    )


def _rendered(
    record: Conversation,
    samples: Sequence[TokenizedConversation],
    texts: Sequence[Sequence[str]],
    numbers: Scores | str | None,
) -> InspectReport:
    known = numbers if isinstance(numbers, Scores) else None
    flatness = iter(known.token_flatness if known and known.token_flatness else repeat(None))
    return InspectReport(
        id=record.id,
        source=record.origin.source,
        row=record.origin.row,
        format=record.format,
        roles=record.roles,
        status="rendered",
        reason=None,
        content_hash=record.content_hash,
        truncated=samples[0].truncated,
        rewritten=samples[0].rewritten,
        num_tokens=sum(map(len, samples)),
        num_supervised_tokens=sum(sample.num_supervised_tokens for sample in samples),
        notes=_notes(numbers),
        samples=tuple(
            tuple(
                Token(int(id), text, bool(supervised), next(flatness) if supervised else None)
                for id, text, supervised in zip(
                    sample.input_ids, of_sample, sample.loss_mask, strict=True
                )
            )
            for sample, of_sample in zip(samples, texts, strict=True)
        ),
        **(_figures(known) if known else {}),
    )


def _figures(known: Scores) -> Mapping[str, Any]:
    return {
        **known.means,
        "effective_tokens": known.vocab_size * known.means["flatness"] ** 2,
        "vocab_size": known.vocab_size,
        "scores": known.scores,
    }


def _notes(numbers: Scores | str | None) -> tuple[str, ...]:
    if isinstance(numbers, str):
        return (numbers,)
    if numbers and numbers.token_flatness is None:
        return (
            f"{numbers.scores} holds the means alone. For every token's flatness, add --score, or run "
            "'sfdd score' with --token-scores --overwrite.",
        )
    return ()
