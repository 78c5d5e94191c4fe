"""Records on their way to the target: read and tokenized ahead of it, then batched by length."""

from collections.abc import Callable, Iterable, Iterator, Sequence
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
_MOST_PADDING = 0.04  # of a batch's tokens
_WORTH_A_BATCH = 0.125  # of the budget


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


def by_length(samples: Sequence[TokenizedConversation]) -> list[TokenizedConversation]:
    """Longest first: neighbours make batches with hardly any padding, and memory runs out at once or
    not at all."""
    return sorted(samples, key=len, reverse=True)


def next_batch(samples: Sequence[TokenizedConversation], batch_tokens: int) -> int:
    """How many of some samples, longest first, make a batch.

    Its width times its rows stays within `batch_tokens`; a sample longer than that is a batch of its own.
    A batch that is large enough to be worth a forward pass takes no more than a little padding.
    """
    width = len(samples[0])
    count = tokens = 0
    for sample in samples[: max(1, batch_tokens // width)]:
        computed = width * (count + 1)
        padding = computed - tokens - len(sample)
        if padding > _MOST_PADDING * computed and computed > _WORTH_A_BATCH * batch_tokens:
            break
        count, tokens = count + 1, tokens + len(sample)
    return count
