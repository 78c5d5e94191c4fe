"""What a run trains on: where the data are, what of them can be used, what is held out."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from sfdd.artifacts import (
    RunDirectory,
    digest_bytes,
    digest_json,
    distilled_files,
    read_parquet_provenance,
)
from sfdd.conversations.config import MaskConfig, mask_of
from sfdd.conversations.conversation import Skipped, SkipReason, TokenizedConversation
from sfdd.conversations.pipeline import tokenize
from sfdd.conversations.records import Source
from sfdd.drafters.drafter import target_mismatch
from sfdd.errors import ArtifactError, DataError, UsageError
from sfdd.training.batches import learnable_tokens
from sfdd.training.config import TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Ints: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]

# More held-out conversations would cost time at every epoch and hardly sharpen the figures.
_MOST_HELD_OUT = 256


def with_run_defaults(config: TrainConfig) -> TrainConfig:
    """Fill in the target, data, length and mask of the run's earlier stages, where none are given.

    Raises:
        UsageError: there are none.
    """
    run = RunDirectory(config.run)
    path = next((path for path in (run.selection, run.scores) if path.is_file()), None)
    scored = read_parquet_provenance(path).identity if path else {}
    return replace(  # the drafter learns the tokens that were scored, unless told otherwise
        config,
        target=config.target or _default_target(run),
        data=config.data or _default_data(run),
        max_length=config.max_length or scored.get("max_length"),
        **mask_of(config, scored).identity(),
    )


def _default_target(run: RunDirectory) -> str:
    for path in (run.selection, run.scores):
        if path.is_file():
            return str(read_parquet_provenance(path).about["target"])
    raise UsageError(f"No target given, and nothing was scored in {run.root}: give --target.")


def _default_data(run: RunDirectory) -> tuple[str, ...]:
    """The run's distilled files, checked to be what the selection says."""
    if not run.selection.is_file():
        raise UsageError(
            f"No training data given, and {run.root} has no distilled data. "
            "Name a data set, or make one with 'sfdd filter'."
        )
    return distilled_files(run)


def check_selection(run: RunDirectory, target: str, identity: Mapping[str, Any]) -> None:
    """Raise ArtifactError where the run's data were selected by a target other than the given one."""
    if not run.selection.is_file():
        return
    provenance = read_parquet_provenance(run.selection)
    if differences := target_mismatch(provenance, identity):
        raise ArtifactError(
            f"The data in {run.root} were selected by {provenance.about.get('target')}, "
            f"but the target is {target}: {'; '.join(differences)}. "
            "Train with the target that selected them, or in another directory with --run."
        )


@dataclass(frozen=True)
class TrainingData:
    """The records that can be used, in file order, and how many cannot, by reason."""

    conversations: list[TokenizedConversation]
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def truncated(self) -> int:
        return len({c.origin for c in self.conversations if c.truncated})


def read_training_data(
    sources: Sequence[Source],
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    mask: MaskConfig = MaskConfig(),
) -> TrainingData:
    """Read and tokenize some data sets.

    Raises:
        DataError: no record can be used.
    """
    conversations: list[TokenizedConversation] = []
    skipped: Counter[str] = Counter()
    for item in tokenize(sources, tokenizer, max_length, mask):
        if isinstance(item, Skipped):
            skipped[item.reason.partition(":")[0]] += 1
        elif learnable_tokens(item):
            conversations.append(item)
        else:
            skipped[SkipReason.NO_SUPERVISED_TOKENS] += 1
    if not conversations:
        reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.most_common())
        raise DataError(
            f"No training data in {', '.join(source.name for source in sources)}: "
            + (f"every record was skipped ({reasons})." if skipped else "there are no records.")
            + " Give conversations with assistant turns."
        )
    return TrainingData(conversations, dict(skipped))


@dataclass(frozen=True)
class Split:
    """Conversations to train on and conversations to measure on; nothing is in both."""

    training: list[TokenizedConversation]
    held_out: list[TokenizedConversation]


def split(conversations: Sequence[TokenizedConversation], held_out: float, seed: int) -> Split:
    """Hold out a fraction of the distinct conversations: one at least, unless there is but one.

    Copies of a conversation stay on one side, and so do its samples, or the drafter would be measured on
    what it has seen.
    """
    firsts = {c.origin: digest_bytes(c.input_ids.tobytes()) for c in reversed(conversations)}
    contents = [firsts[c.origin] for c in conversations]
    distinct = list(dict.fromkeys(contents))
    count = 0
    if held_out and len(distinct) > 1:
        wanted = max(1, round(held_out * len(distinct)))
        count = min(wanted, len(distinct) - 1, _MOST_HELD_OUT)
    order = np.random.default_rng(seed).permutation(len(distinct))
    chosen = {distinct[i] for i in order[:count]}
    pairs = list(zip(conversations, contents, strict=True))
    return Split(
        [c for c, content in pairs if content not in chosen],
        [c for c, content in pairs if content in chosen],
    )


def supervised_counts(conversations: Sequence[TokenizedConversation], vocab_size: int) -> Ints:
    """How often each token is supervised. int64 [V]"""
    learnt = [conversation.input_ids[conversation.loss_mask] for conversation in conversations]
    return np.bincount(np.concatenate(learnt), minlength=vocab_size)


def digest_conversations(conversations: Sequence[TokenizedConversation]) -> str:
    """Identity of the tokens and loss masks, in order."""
    return digest_json(
        [digest_bytes(c.input_ids.tobytes() + c.loss_mask.tobytes()) for c in conversations]
    )
