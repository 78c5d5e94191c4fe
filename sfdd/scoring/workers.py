"""Several processes that score one data set together, and share nothing but the run directory.

Each takes the records whose row leaves its index as the remainder, and writes shards of its own. Whoever
finds at its end that every row is there merges them. A worker that died is started again, alone.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from sfdd.artifacts import RunDirectory, exclusive
from sfdd.errors import UsageError


@dataclass(frozen=True)
class Worker:
    """One of `count` processes, the `index`-th from 0."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise UsageError(
                f"--shard-index is {self.index} of {self.count} shards; it must be from 0 to "
                f"{self.count - 1}."
            )

    @property
    def is_alone(self) -> bool:
        return self.count == 1

    def takes(self, row: int) -> bool:
        """Whether a record is this worker's."""
        return row % self.count == self.index

    def share(self, rows: int) -> int:
        """How many of the first `rows` records of a data set are this worker's."""
        return len(range(self.index, rows, self.count))

    @contextmanager
    def alone_at_its_part(self, run: RunDirectory) -> Iterator[None]:
        """Keep out a second process with the same part, and whoever wants all parts.

        Raises:
            ArtifactError: there is one already.
        """
        if self.is_alone:
            with exclusive(run, "score"):
                yield
        else:
            part = f"score-{self.index}-of-{self.count}"
            with exclusive(run, "score", shared=True), exclusive(run, part):
                yield


ALONE = Worker()


def this_worker(
    index: int | None, count: int | None, environment: Mapping[str, str] = os.environ
) -> Worker:
    """The worker that the options name, else the one that `torchrun` started, else one for everything.

    Raises:
        UsageError: there is no such part.
    """
    if index is not None and count is not None:
        return Worker(index, count)
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return Worker(int(environment["RANK"]), int(environment["WORLD_SIZE"]))
    return ALONE


def device_of_worker(
    device: str, gpus: int = 1, environment: Mapping[str, str] = os.environ
) -> str:
    """`auto` under `torchrun` is the first of the GPUs of the process's local rank, where there are any.

    Args:
        gpus: how many each process takes.
    """
    if device != "auto" or "LOCAL_RANK" not in environment:
        return device
    import torch

    count = torch.cuda.device_count()
    return f"cuda:{int(environment['LOCAL_RANK']) * gpus % count}" if count else "auto"
