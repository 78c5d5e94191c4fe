"""Records on their way to the target: read and tokenized ahead of it, a window at a time."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import TypeVar

from sfdd.conversations.conversation import Skipped, TokenizedConversation
from sfdd.errors import DataError

T = TypeVar("T")

# How far ahead conversations are collected to find others of like length. Bounds the memory, too. The
# first windows are small, so that the target need not wait.
_FIRST_WINDOW_TOKENS = 2**14
_WINDOW_RECORDS = 2048
_WINDOW_TOKENS = 2**20
_WINDOWS_AHEAD = 2
_SECONDS_BETWEEN_LOOKS = 0.2


@dataclass
class Window:
    """Consecutive records: samples to be forwarded, skipped records, how many were finished before."""

    samples: list[TokenizedConversation] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    resumed: int = 0
    tokens: int = 0

    @property
    def records(self) -> int:
        return len(self.samples) + len(self.skipped) + self.resumed


def windows(
    records: Iterable[list[TokenizedConversation] | Skipped | None],
) -> Iterator[Window]:
    """Group records as they come; None is one that was finished before."""
    window, limit = Window(), _FIRST_WINDOW_TOKENS
    try:
        for record in records:
            if record is None:
                window.resumed += 1
            elif isinstance(record, Skipped):
                window.skipped.append(record)
            else:
                window.samples += record
                window.tokens += sum(map(len, record))
            if window.records >= _WINDOW_RECORDS or window.tokens >= limit:
                yield window
                window, limit = Window(), min(2 * limit, _WINDOW_TOKENS)
    except DataError:
        yield window  # what could be read of damaged data is scored before the run ends
        raise
    if window.records:
        yield window


def ahead(items: Callable[[], Iterator[T]]) -> Iterator[T]:
    """Make items in a thread of their own, a few ahead of whoever takes them; errors come out here."""
    queue: Queue[tuple[T | None, BaseException | None]] = Queue(_WINDOWS_AHEAD)
    stopped = Event()

    def put(item: T | None, error: BaseException | None = None) -> None:
        while not stopped.is_set():
            try:
                queue.put((item, error), timeout=_SECONDS_BETWEEN_LOOKS)
                return
            except Full:
                continue

    def work() -> None:
        try:
            for item in items():
                put(item)
                if stopped.is_set():
                    return
            put(None, StopIteration())
        except BaseException as error:
            put(None, error)

    Thread(target=work, daemon=True).start()
    try:
        while True:
            try:
                item, error = queue.get(timeout=_SECONDS_BETWEEN_LOOKS)
            except Empty:  # a wait without end would be deaf to Ctrl-C on some systems
                continue
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item  # type: ignore[misc]
    finally:
        stopped.set()
