"""What can go wrong for a user, as one sentence: what happened, where, and what to do next.

The command line prints an `SfddError` as that sentence and exits with its `exit_code`; any other
exception is a bug and shows its traceback.
"""


class SfddError(Exception):
    """Something the user can put right. `str(error)` is the whole message."""

    exit_code = 1


class UsageError(SfddError):
    """An option or configuration value that can never work, whatever the data."""

    exit_code = 2


class DataError(SfddError):
    """A data set that is missing, empty, unreadable, or not what it was when it was scored."""


class OutOfTimeError(SfddError):
    """The time that the user allowed is over; what was done in it is kept."""

    exit_code = 124  # as of the command timeout


class TargetError(SfddError):
    """A target model that cannot be loaded or used the way sfdd needs it."""


class DrafterError(SfddError):
    """A drafter directory that is missing, damaged, or made for another target."""


class ArtifactError(SfddError):
    """A file of a run directory that is missing, damaged, unwritable, or of other provenance."""
