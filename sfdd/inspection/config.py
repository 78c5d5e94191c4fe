"""What `sfdd inspect` can be told, and what it does when told nothing."""

from dataclasses import dataclass, replace
from pathlib import Path

from sfdd.artifacts import DEFAULT_RUN, Provenance
from sfdd.conversations.config import MAX_LENGTH, MaskConfig, mask_of
from sfdd.errors import UsageError


@dataclass(frozen=True)
class InspectConfig:
    """Which record to look at, and how. Whatever is None is as the run's scores were made.

    Attributes:
        data: files, patterns, saved data sets or hub ids; none for those that the run scored.
        target: local directory, GGUF file, hub id, or `smollm2`.
        row: 0-based position of the record in the data set, as in the score table.
        id: of the record, as in the score table. Neither of the two: the first record.
        format, reasoning, rewritten, last_turn_only: as in `MaskConfig`.
        max_length: tokens kept of a conversation; a longer one is cut there.
        score: load the target, and compute the flatness of every token now.
    """

    data: tuple[str, ...] = ()
    target: str | None = None
    row: int | None = None
    id: str | None = None
    run: Path = DEFAULT_RUN
    format: str | None = None
    reasoning: str | None = None
    rewritten: str | None = None
    last_turn_only: bool | None = None
    max_length: int | None = None
    score: bool = False
    dtype: str = "auto"
    device: str = "auto"
    attn_implementation: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        _ = self.mask  # checks its own part
        if self.row is not None and self.id is not None:
            raise UsageError("--row and --id both name a record; give one of them.")
        if self.row is not None and self.row < 0:
            raise UsageError(f"--row is {self.row}; the first record is row 0.")
        if self.max_length is not None and self.max_length < 2:
            raise UsageError("--max-length must be at least 2.")

    @property
    def mask(self) -> MaskConfig:
        """What is read of a record, and which tokens are supervised."""
        return mask_of(self)

    def as_scored(self, scored: Provenance | None) -> "InspectConfig":
        """With everything that is None as the run's scores were made.

        Raises:
            UsageError: target or data are not given, and nothing was scored.
        """
        identity, about = (scored.identity, scored.about) if scored else ({}, {})
        target = self.target or about.get("target")
        if not target:
            raise UsageError(
                f"No target given, and nothing was scored in {self.run}: give --target."
            )
        data = self.data or tuple(about.get("data", ()))
        if not data:
            raise UsageError(f"No data set given, and nothing was scored in {self.run}: name one.")
        max_length = self.max_length or identity.get("max_length") or MAX_LENGTH
        mask = mask_of(self, identity).identity()
        return replace(self, target=target, data=data, max_length=max_length, **mask)
