"""What ends a training before its end: a signal, or the time it was given. Both leave a checkpoint."""

import signal
import threading
import time
from types import FrameType
from typing import Any, Self

from sfdd.training.distributed import Ranks

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_OUT_OF_TIME = 1000  # above every signal's number


class Stopping:
    """Within it, Ctrl-C and SIGTERM wait for the end of the step; a second Ctrl-C does not.

    A signal may reach one process before the others, or one alone, so `reason` is what all agree on.
    """

    def __init__(self, ranks: Ranks, deadline: float | None) -> None:
        """Args:
        deadline: by `time.monotonic`.
        """
        self._ranks, self._deadline = ranks, deadline
        self._received = 0
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # Ignored ones, as of a process in the background, stay ignored.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def reason(self, progressed: bool) -> int:
        """Why to stop now: a signal's number, `is_time`'s, or 0 to go on. All processes must ask.

        Args:
            progressed: time is never up before something was done, or nothing ever would be.
        """
        late = progressed and self._deadline is not None and time.monotonic() >= self._deadline
        return self._ranks.highest(self._received or (_OUT_OF_TIME if late else 0))

    @staticmethod
    def is_time(reason: int) -> bool:
        """Whether a reason is that time is up."""
        return reason == _OUT_OF_TIME

    def give_way(self, reason: int) -> None:
        """Let a signal do what it would have done: for the command line, raise KeyboardInterrupt."""
        self.__exit__()
        self._received = 0
        signal.raise_signal(reason)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # Of several processes none may leave alone; who started them ends them if they take too long.
        if self._received and self._ranks.count == 1:
            self.give_way(number)
        self._received = number
