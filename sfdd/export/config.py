"""What `sfdd export` and `sfdd export-data` can be told, and what they do when told nothing."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from sfdd.artifacts import DEFAULT_RUN
from sfdd.conversations.config import MaskConfig, mask_of
from sfdd.errors import UsageError
from sfdd.export.trainers import TRAINERS

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}  # and as their authors write them
DTYPES = ("bfloat16", "float16", "float32")
FORMS = ("text", "tokens")


@dataclass(frozen=True)
class ExportConfig:
    """Settings of one export of a drafter.

    Attributes:
        engine: one of `ENGINES`.
        output: the directory to write; None for the run's own.
        drafter: the directory to read; None for the run's own.
        dtype: one of `DTYPES`; None keeps what it is stored in.
        overwrite: replace an earlier export.
    """

    engine: str
    output: Path | None = None
    drafter: Path | None = None
    run: Path = DEFAULT_RUN
    dtype: str | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        require_choice("--for", self.engine, ENGINES)
        if self.dtype is not None:
            require_choice("--dtype", self.dtype, DTYPES)


@dataclass(frozen=True)
class CheckConfig:
    """Settings of one check of a drafter's directory.

    Attributes:
        engine: one of `ENGINES`.
        drafter: the directory to check; None for the run's drafter.
        target: with which to run a draft step; None for the one that the drafter records.
        files_only: load no target.
        device, trust_remote_code: how the target is loaded.
    """

    engine: str
    drafter: Path | None = None
    run: Path = DEFAULT_RUN
    target: str | None = None
    files_only: bool = False
    device: str = "auto"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        require_choice("--for", self.engine, ENGINES)


@dataclass(frozen=True)
class ExportDataConfig:
    """Settings of one export of data.

    Attributes:
        trainer: one of `trainers.TRAINERS`.
        output: the file to write; None for the run's own.
        data: files, patterns, saved data sets or hub ids; none for the run's distilled data.
        form: one of `FORMS`: what is said, or token ids and loss mask; None for what the trainer reads
            best.
        target: whose tokenizer makes the tokens; None for the run's.
        format, reasoning, rewritten, last_turn_only: as in `MaskConfig`; None for what the run was
            scored with.
        max_length: tokens kept of a conversation; None for what the run was scored with.
        overwrite: replace an earlier export.
    """

    trainer: str
    output: Path | None = None
    data: tuple[str, ...] = ()
    run: Path = DEFAULT_RUN
    form: str | None = None
    target: str | None = None
    format: str | None = None
    reasoning: str | None = None
    rewritten: str | None = None
    last_turn_only: bool | None = None
    max_length: int | None = None
    trust_remote_code: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        _ = self.mask  # checks its own part
        require_choice("--for", self.trainer, TRAINERS)
        if self.form is not None:
            require_choice("--form", self.form, FORMS)
        if self.max_length is not None and self.max_length < 2:
            raise UsageError("--max-length must be at least 2.")

    @property
    def mask(self) -> MaskConfig:
        """What is read of a record, and which tokens are supervised."""
        return mask_of(self)


def require_choice(option: str, value: str, choices: Collection[str]) -> None:
    """Raise UsageError unless the value of an option is one of its choices."""
    if value not in choices:
        raise UsageError(f"{option} is {value!r}; choose one of {', '.join(choices)}.")
