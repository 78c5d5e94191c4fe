"""What `sfdd score` can be told, and what it does when told nothing."""

from dataclasses import dataclass, field
from pathlib import Path

from sfdd.artifacts import DEFAULT_RUN
from sfdd.conversations.config import MAX_LENGTH, MaskConfig
from sfdd.errors import UsageError
from sfdd.targets.config import BackendConfig


@dataclass(frozen=True)
class ScoreConfig(BackendConfig):
    """Settings of one scoring run.

    Attributes:
        data: files, patterns, saved data sets or hub ids.
        target: local directory, GGUF file, hub id, or `smollm2`.
        max_length: tokens kept of a conversation; a longer one is cut there and flagged.
        mask: what is read of a record, and which of its tokens are supervised.
        shard_index, num_shards: which part of the records this process scores, of how many; None for
            what `torchrun` says, else all of them.
        token_scores: also store the flatness of every supervised token.
        overwrite: start again instead of continuing or refusing.

    The others are those of `BackendConfig`, by name alone.
    """

    data: tuple[str, ...]
    target: str
    run: Path = DEFAULT_RUN
    mask: MaskConfig = field(default_factory=MaskConfig)
    max_length: int = MAX_LENGTH
    shard_index: int | None = None
    num_shards: int | None = None
    token_scores: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        if not self.data:
            raise UsageError("No data set given. Name at least one file, folder or hub id.")
        if self.max_length < 2:
            raise UsageError("--max-length must be at least 2.")
        super().__post_init__()
        if (self.shard_index is None) != (self.num_shards is None):
            raise UsageError("--shard-index and --num-shards go together; give both.")
        if self.overwrite and (self.num_shards or 1) > 1:
            raise UsageError(
                "--overwrite is for one process: each of several would remove what the others did. "
                "Remove scores.parquet and scores.partial of the run before starting them."
            )
