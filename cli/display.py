"""What a person sees: results on stdout; progress on stderr, as a bar or as plain lines."""

import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sfdd.artifacts import DEFAULT_RUN
from sfdd.progress import Progress, ProgressCallback

_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def progress(as_json: bool = False) -> Iterator[ProgressCallback]:
    """Give the callback that a stage reports to."""
    if as_json:
        yield _now_and_then(lambda moment, _: log_json("progress", moment))
    elif sys.stderr.isatty():
        with _bar() as show:
            yield show
    else:
        yield _now_and_then(_print_line)


def log_json(event: str, what: Any) -> None:
    """One line of JSON on stderr: what happened and when, and the fields of a report or a moment."""
    fields = {"event": event, "time": time.time(), **dataclasses.asdict(what)}
    print(json.dumps(fields, default=str), file=sys.stderr, flush=True)


class _Speedometer:
    """What a stage has done since it first reported, and in how many seconds.

    Loading a model comes before the first report, so it does not count as work. A stage that starts
    over, as measuring does in every epoch, is a new one.
    """

    def __init__(self) -> None:
        self._stages: dict[str, tuple[Progress, float, Progress]] = {}

    def describe(self, moment: Progress) -> str:
        """Speed, time left and figures of a moment."""
        now = time.monotonic()
        first, since, last = self._stages.get(moment.stage, (moment, now, moment))
        if moment.done < last.done:
            first, since = moment, now
        self._stages[moment.stage] = (first, since, moment)
        return describe(moment, first, now - since)


def describe(moment: Progress, first: Progress, seconds: float) -> str:
    """`_Speedometer.describe`, `seconds` after the stage's `first` report."""
    resumed = moment.resumed - first.resumed
    speed = (moment.done - first.done - resumed) / seconds if seconds > 0 else 0.0
    tokens = (moment.tokens - first.tokens) / seconds if seconds > 0 else 0.0
    parts = []
    if speed:
        parts.append(f"{speed:.3g} {moment.unit}/s")
    if tokens:
        parts.append(f"{tokens:,.0f} tokens/s")
    if moment.total is not None and speed:
        parts.append(f"{duration((moment.total - moment.done) / speed)} left")
    parts += [f"{name} {value}" for name, value in moment.figures.items()]
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def _now_and_then(report: Callable[[Progress, str], None]) -> ProgressCallback:
    """Report a moment and its description every few seconds, and at the end."""
    speedometer = _Speedometer()
    last = time.monotonic()

    def show(moment: Progress) -> None:
        nonlocal last
        description, now = speedometer.describe(moment), time.monotonic()
        if now - last < _SECONDS_BETWEEN_LINES and moment.done != moment.total:
            return
        last = now
        report(moment, description)

    return show


def _print_line(moment: Progress, description: str) -> None:
    of = f"/{moment.total}" if moment.total is not None else ""
    line = f"{moment.stage}: {moment.done}{of} {moment.unit}"
    print(", ".join(filter(None, (line, description))), file=sys.stderr, flush=True)


@contextmanager
def _bar() -> Iterator[ProgressCallback]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with RichProgress(*columns, console=Console(stderr=True)) as bar:
        speedometer = _Speedometer()
        tasks = {}

        def show(moment: Progress) -> None:
            if moment.stage not in tasks:
                tasks[moment.stage] = bar.add_task(moment.stage, total=moment.total, text="")
            bar.update(
                tasks[moment.stage],
                completed=moment.done,
                total=moment.total,
                text=speedometer.describe(moment),
            )

        yield show


def print_json(report: Any) -> None:
    """A report as one JSON object on stdout."""
    print(json.dumps(dataclasses.asdict(report), default=str))


def print_table(title: str, rows: Mapping[str, str]) -> None:
    """A report for people on stdout."""
    width = max(map(len, rows))
    print(title)
    for name, value in rows.items():
        first, *more = value.split("\n")
        print(f"  {name:<{width}}  {first}")
        for line in more:
            print(f"  {'':<{width}}  {line}")


def counted(total: int, parts: Mapping[str, int]) -> str:
    """A number and what it is made of."""
    named = ", ".join(f"{name} {count:,}" for name, count in parts.items())
    return f"{total:,}" + (f" ({named})" if named else "")


def hint(command: str, run: Path) -> None:
    """The next command to run, on stderr."""
    where = "" if run == DEFAULT_RUN else f" --run {shlex.quote(str(run))}"
    print(f"Next: {command}{where}", file=sys.stderr)
