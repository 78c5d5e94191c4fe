"""A command that several processes run together: which of them speaks."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from sfdd.errors import SfddError
from sfdd.progress import ProgressCallback, silent

# How long another process waits with an error that the first is likely to tell as well.
_GRACE = 60.0  # seconds; a busy machine takes its time to end a process


def is_first() -> bool:
    """Whether this is the process that prints; `torchrun` and `accelerate launch` say so."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def in_the_background() -> Iterator[ProgressCallback]:
    """What another process than the first says: nothing, unless the first did not say it."""
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    logging.disable(logging.WARNING)
    try:
        yield silent
    except SfddError:
        # Most often the first has ended with the same, and this one is ended, too.
        time.sleep(_GRACE)
        raise
    except KeyboardInterrupt as stop:
        raise typer.Exit(130 if type(stop) is KeyboardInterrupt else 143) from None
