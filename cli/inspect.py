"""`sfdd inspect`"""

import io
import json as json_text
import math
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from sfdd.artifacts import DEFAULT_RUN
from sfdd.inspection.config import InspectConfig

from . import display, options

if TYPE_CHECKING:
    from sfdd.inspection.report import InspectReport, Token

_DEFAULT = InspectConfig()

# What a terminal would obey, or hide: control characters but tab and line feed, marks that change the
# direction of writing, and halves of surrogate pairs.
_NOT_TO_BE_PRINTED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
# Levels of flatness by the effective number of tokens: their upper bounds, and how they look. Colours
# grow lighter and letters differ: no eye for colour is needed, and 16 colours are enough.
_BOUNDS = (1.1, 2.0, 5.0, 20.0, math.inf)
_STYLES = (
    "white on #000080",
    "italic white on #31688e",
    "bold black on #21918c",
    "underline black on #90d743",
    "bold underline black on #fde725",
)
_SUPERVISED = "bold black on green"


def inspect(
    data: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files, saved data sets or hub ids; default: those that the run scored.",
            show_default=False,
        ),
    ] = None,
    target: options.OptionalTarget = _DEFAULT.target,
    row: Annotated[
        int | None,
        typer.Option(
            help="0-based position of the record, as in the column 'row' of scores.parquet.",
            show_default="the first",
        ),
    ] = _DEFAULT.row,
    id: Annotated[
        str | None, typer.Option(help="Id of the record, as in the column 'id' of scores.parquet.")
    ] = _DEFAULT.id,
    run: options.Run = DEFAULT_RUN,
    format: options.Format = None,
    reasoning: options.ReasoningAsScored = None,
    rewritten: options.RewrittenAsScored = None,
    last_turn_only: options.LastTurnOnlyAsScored = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens kept of a conversation; longer ones are cut.", show_default="as scored"
        ),
    ] = _DEFAULT.max_length,
    score: Annotated[
        bool, typer.Option("--score", help="Load the target and score this record now.")
    ] = _DEFAULT.score,
    dtype: options.Dtype = _DEFAULT.dtype,
    device: options.Device = _DEFAULT.device,
    attn_implementation: options.AttnImplementation = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
    config: options.Config = None,
) -> None:
    """Show one record as the target sees it: its tokens, which are supervised, how flat they are.

    Flatness is read from RUN/scores.parquet, or computed with --score. Off a terminal, supervised text
    stands in ⟦ ⟧. Writes nothing.
    """
    settings = InspectConfig(
        data=tuple(data or ()),
        target=target,
        row=row,
        id=id,
        run=run,
        format=format,
        reasoning=reasoning,
        rewritten=rewritten,
        last_turn_only=last_turn_only,
        max_length=max_length,
        score=score,
        dtype=dtype,
        device=device,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
    )
    from sfdd.inspection.run import inspect_record

    report = inspect_record(settings)
    if json:
        display.print_json(report)
    else:
        _print(report)
    for note in report.notes:
        print(_line(note), file=sys.stderr)
    display.hint(_next(report, settings), run)


def _next(report: "InspectReport", settings: InspectConfig) -> str:
    words = [*map(shlex.quote, settings.data)]
    if settings.target:
        words += ["--target", shlex.quote(settings.target)]
    if not report.scores and not report.notes and report.samples:
        return " ".join(["sfdd score", *words])
    if len(settings.data) > 1:
        return "sfdd filter --keep 0.5"
    live = ["--score"] if settings.score else []
    return " ".join(["sfdd inspect", *words, "--row", str(report.row + 1), *live])


def _print(report: "InspectReport") -> None:
    """The conversation, what its colours mean, and the numbers."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # of what its encoding lacks
    if report.messages:
        print("As read; not rendered:")
    for message in report.messages:
        rest = {k: v for k, v in message.items() if k not in ("role", "content")}
        print(f"{_line(message['role'])}: {_shown(str(message.get('content') or ''))}")
        if rest:
            print(_shown(json_text.dumps(rest, ensure_ascii=False, default=str)))
    in_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for number, tokens in enumerate(report.samples, start=1):
        if len(report.samples) > 1:
            print(f"--- sample {number} of {len(report.samples)}")
        stretches = list(_stretches(tokens, report.vocab_size))
        (_print_coloured if in_colour else _print_bracketed)(stretches)
    if in_colour and any(token.flatness is not None for s in report.samples for token in s):
        _print_coloured(list(_legend(report.vocab_size or 0)))
    if report.samples or report.messages:
        print()
    display.print_table(_line(f"{report.source}:{report.row}"), _rows(report))


class _Stretch(NamedTuple):
    """Text that looks alike; `style` "" is text that is not supervised."""

    text: str
    style: str


def _stretches(tokens: "Sequence[Token]", vocab_size: int | None) -> Iterator[_Stretch]:
    pieces = (
        _Stretch(_shown("".join(token.text for token in piece)), _style(piece, vocab_size))
        for piece in _pieces(tokens)
    )
    for style, alike in groupby(pieces, key=lambda piece: piece.style):
        yield _Stretch("".join(piece.text for piece in alike), style)


def _pieces(tokens: "Sequence[Token]") -> Iterator[list["Token"]]:
    """Tokens that share a character together, up to the one that it stands at; others alone."""
    piece: list[Token] = []
    for token in tokens:
        piece.append(token)
        if token.text:
            yield piece
            piece = []
    if piece:
        yield piece


def _style(piece: "list[Token]", vocab_size: int | None) -> str:
    """Of the flattest token in it, if the one with the text is supervised."""
    if not piece[-1].supervised:
        return ""
    flatness = [token.flatness for token in piece if token.flatness is not None]
    if not flatness or vocab_size is None:
        return _SUPERVISED
    effective = vocab_size * max(flatness) ** 2
    return next(s for bound, s in zip(_BOUNDS, _STYLES, strict=True) if effective < bound)


def _legend(vocab_size: int) -> Iterator[_Stretch]:
    yield _Stretch("\nEffective number of tokens (flatness):", "")
    for bound, style in zip(_BOUNDS[:-1], _STYLES, strict=False):
        yield _Stretch(" ", "")
        yield _Stretch(f" < {bound:g} ({math.sqrt(bound / vocab_size):.3g}) ", style)
    yield _Stretch(" ", "")
    yield _Stretch(" more ", _STYLES[-1])


def _print_bracketed(stretches: Sequence[_Stretch]) -> None:
    text = ""
    for supervised, alike in groupby(stretches, key=lambda stretch: bool(stretch.style)):
        joined = "".join(stretch.text for stretch in alike)
        text += f"⟦{joined}⟧" if supervised else joined
    print(text, end="" if text.endswith("\n") else "\n")


def _print_coloured(stretches: Sequence[_Stretch]) -> None:
    """A supervised line break is shown as ↵ too, since nothing of a bare one could be coloured."""
    from rich.console import Console
    from rich.text import Text

    text = Text()
    for stretch in stretches:
        shown = stretch.text.replace("\n", "↵\n") if stretch.style else stretch.text
        text.append(shown, stretch.style or None)
    end = "" if text.plain.endswith("\n") else "\n"
    Console(highlight=False).print(text, end=end, soft_wrap=True)


def _rows(report: "InspectReport") -> dict[str, str]:
    rows = {"id": _line(report.id)}
    if report.reason:
        rows["skipped"] = _line(report.reason)
    if report.format:
        rows["format"] = report.format
    if report.roles:
        rows["roles"] = _line(", ".join(report.roles))
    if report.samples:
        rows |= {
            "samples": f"{len(report.samples):,}",
            "tokens": f"{report.num_tokens:,}" + (" (cut)" if report.truncated else ""),
            "supervised tokens": f"{report.num_supervised_tokens:,}",
            "rewritten": "yes" if report.rewritten else "no",
        }
    if report.flatness is not None:
        rows |= {
            "flatness": f"{report.flatness:.6g} ({report.effective_tokens:.3g} effective tokens "
            f"of {report.vocab_size:,})",
            "entropy": f"{report.entropy:.4g} nats",
            "top1": f"{report.top1:.4g}",
            "margin": f"{report.margin:.4g}",
            "energy": f"{report.energy:.4g}",
            "nll": f"{report.nll:.4g} nats",
            "scores": _line(report.scores or ""),
        }
    return rows


def _shown(text: str) -> str:
    """Text of the data as a terminal can be given it."""
    return _NOT_TO_BE_PRINTED.sub(lambda match: _spelt_out(ord(match[0])), text)


def _spelt_out(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _line(text: str) -> str:
    """`_shown`, on one line."""
    return _shown(text).replace("\n", "\\n")
