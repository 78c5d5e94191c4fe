"""What a progress report says, worked out by hand."""

import sys

import pytest
from sfdd_cli.display import describe, progress

from sfdd.progress import Progress


def moment(done: int, **changes: object) -> Progress:
    return Progress("scoring", "conversations", done, **{"total": 100, **changes})  # type: ignore[arg-type]


def test_speed_counts_from_the_first_report_and_without_what_was_resumed() -> None:
    first = moment(0)
    now = moment(30, tokens=4000, resumed=10, figures={"skipped": "2"})
    assert describe(now, first, seconds=10.0) == (
        "2 conversations/s, 400 tokens/s, 0:00:35 left, skipped 2"
    )


def test_nothing_is_claimed_before_anything_is_done() -> None:
    assert describe(moment(0), moment(0), seconds=5.0) == ""


def test_hours_and_an_unknown_total() -> None:
    slow = describe(moment(1, total=10_000), moment(0), seconds=1.0)
    assert slow == "1 conversations/s, 2:46:39 left"
    assert describe(moment(1, total=None), moment(0), seconds=1.0) == "1 conversations/s"


@pytest.mark.parametrize("terminal", [True, False])
def test_bar_and_lines(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    with progress() as show:
        show(moment(0))
        show(moment(100))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "scoring" in captured.err
    assert "100/100" in captured.err
