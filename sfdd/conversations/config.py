"""How conversations are read and masked; the same choices for scoring, training and looking."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from sfdd.errors import UsageError


class Format(StrEnum):
    """The kinds of record that sfdd reads; the values are what `--format` takes."""

    SHAREGPT = "sharegpt"  # a list of turns with from/value
    OPENAI = "openai"  # a list of turns with role/content
    PROMPT_RESPONSE = "prompt-response"  # prompt and response, or prompt and completion
    ALPACA = "alpaca"  # instruction, input, output
    TOKENIZED = "tokenized"  # input_ids and loss_mask


FORMATS = tuple(map(str, Format))

# Tokens kept of a conversation where neither the user nor an earlier stage of the run says how many.
MAX_LENGTH = 4096

REASONING = ("keep", "drop", "mask")
REWRITTEN = ("expand", "last")


@dataclass(frozen=True)
class MaskConfig:
    """What is read of a record, and which of its tokens are supervised.

    Attributes:
        format: read every record as this format; None takes each for what it is.
        reasoning: `keep` renders and supervises it, `mask` renders it only, `drop` leaves it out.
        rewritten: for conversations whose earlier turns the chat template changes later on: `expand`
            makes a sample of each assistant turn, with the history as the target sees it at that turn;
            `last` supervises the last turn alone.
        last_turn_only: supervise only the last assistant turn of every conversation.
    """

    format: str | None = None
    reasoning: str = "keep"
    rewritten: str = "expand"
    last_turn_only: bool = False

    def __post_init__(self) -> None:
        choices = {"format": (None, *FORMATS), "reasoning": REASONING, "rewritten": REWRITTEN}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                known = ", ".join(choice for choice in allowed if choice)
                raise UsageError(f"--{name} is {getattr(self, name)!r}; it must be one of {known}.")

    def identity(self) -> Mapping[str, Any]:
        """For provenance: scores made with other choices are other scores."""
        return asdict(self)


def mask_of(settings: Any, recorded: Mapping[str, Any] | None = None) -> MaskConfig:
    """The choices among some settings that have them as fields.

    Args:
        recorded: where to look for those that are None, such as an artifact's identity; what is None
            there, too, takes its default.

    Raises:
        UsageError: a choice that does not exist.
    """
    names = [f.name for f in fields(MaskConfig)]
    choices = {
        name: given
        if (given := getattr(settings, name)) is not None
        else (recorded or {}).get(name)
        for name in names
    }
    return MaskConfig(**{name: value for name, value in choices.items() if value is not None})
