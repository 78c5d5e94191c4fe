"""JSON values one by one from a stream: of an array, alone, or one after another.

Only the value at hand is held, so an array may be as large as the disk. What is broken costs no more than
itself: reading goes on at the next record, and what lay between is one element with an error.
"""

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sfdd.conversations.formats import format_of
from sfdd.conversations.streams import CHUNK, Utf8Reader

# A value that has not ended by then has lost its end and swallows what follows it.
LONGEST_VALUE = 32 * 1024 * 1024
# An error so close to the end of what was read may come from its ending there, as in `-Infin`.
_NEAR_END = 16
_CUT_OFF = re.compile(r"[ \t\r\n]*(?:\\?u?[0-9a-fA-F]{0,4}|[.eE][+-]?|-?I[a-z]*|-|[Ntfn][a-zN]*)\Z")
_SPACE = re.compile(r"[ \t\r\n]*")
_BETWEEN = re.compile(r"[ \t\r\n,\ufeff]*")
_OBJECT = re.compile(r'\{[ \t\r\n]*(?:"|\Z)')
# Bounds of the search for a record inside something broken; see `_Window.find_record`.
_NESTED_ATTEMPTS = 16
_ABSURDLY_NESTED = 512
_SHORT = 4096


@dataclass(frozen=True)
class Element:
    """A value and its original wording, or why there is none.

    `cut_off`: nothing is wrong with it but that the file ends in it.
    """

    text: str = ""
    value: Any = None
    error: str = ""
    cut_off: bool = False


@dataclass(eq=False)
class _BrokenError(Exception):
    """No value can be read here.

    Attributes:
        reason: what is wrong.
        at: the position in the window where it is.
        reach: the position up to which the text was tried.
        cut_off: the text ends before the value does.
    """

    reason: str
    at: int
    reach: int
    cut_off: bool = False


def read_values(stream: Utf8Reader) -> Iterator[Element]:
    """Every value of a stream, and one element with an error for each stretch that cannot be read.

    The elements of an array at the top count as values, and so do those of an array of records in it;
    commas may be missing or too many.
    """
    window = _Window(stream)
    depth = 0
    while window.skip(_BETWEEN):
        character = window.text[window.position]
        if character == "[" and not depth:
            window.position, depth = window.position + 1, 1
            continue
        if character == "]" and depth:
            window.position, depth = window.position + 1, depth - 1
            continue
        try:
            value, end = window.value()
        except _BrokenError as broken:
            error = f"{window.place(broken.at)}: {broken.reason}"
            found = window.find_record()
            if not found:
                yield from _hopeless(error, broken.cut_off, window.line(), stream.damage)
                return
            yield Element(error=error)
            value, end = found
        if isinstance(value, list) and any(format_of(item) is not None for item in value):
            window.position, depth = window.position + 1, depth + 1
            continue
        yield Element(window.text[window.position : end], value)
        window.position = end
    if stream.damage:
        yield Element(error=f"line {window.line()}: {stream.damage}")
    elif depth:
        place = window.place(window.position)
        error = f"{place}: the array has no end; the file may be cut off"
        yield Element(error=error, cut_off=True)


def _hopeless(error: str, cut_off: bool, last_line: int, damage: str) -> Iterator[Element]:
    """What to say when nothing whole follows a broken value."""
    if not cut_off:
        yield Element(error=error)
    if damage:
        yield Element(error=f"line {last_line}: {damage}", cut_off=cut_off)
    elif cut_off:
        yield Element(error=f"{error}; the file is cut off", cut_off=True)


class _Window:
    """The part of a text that is held: `text`, from before `position` to the last character read."""

    def __init__(self, stream: Utf8Reader) -> None:
        self.text = ""
        self.position = 0
        self._stream = stream
        # Bytes that are no UTF-8 spoil their own string alone: it becomes invalid Unicode.
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._scanner = json.JSONDecoder()
        self._ended = False
        self._characters = self._lines = 0  # of what was let go

    def line(self) -> int:
        """1-based number of the last line that was read."""
        return self._lines + self.text.count("\n") + 1

    def place(self, position: int) -> str:
        """A position in the window as one in the file."""
        line = self._lines + self.text.count("\n", 0, position) + 1
        return f"line {line}, character {self._characters + position}"

    def skip(self, pattern: re.Pattern[str]) -> bool:
        """Move on over what matches; False if that is all there is."""
        while True:
            self.position = _end(pattern, self.text, self.position)
            if self.position < len(self.text):
                return True
            if not self._grow():
                return False

    def value(self) -> tuple[Any, int]:
        """The value that begins at `position`, and where it ends; reads as far as that takes.

        Raises:
            _BrokenError: there is none.
        """
        while True:
            try:
                value, end = self._scanner.raw_decode(self.text, self.position)
            except json.JSONDecodeError as error:
                if not self._may_be_cut(error):
                    raise _BrokenError(error.msg, error.pos, error.pos) from error
                if self._ended:
                    raise self._broken("the value has no end", cut_off=True) from error
            except RecursionError as error:
                reach = min(self.position + _ABSURDLY_NESTED, len(self.text))
                raise _BrokenError("nested too deep", self.position, reach) from error
            except ValueError as error:  # an integer of thousands of digits
                raise _BrokenError(str(error), self.position, self.position) from error
            else:
                # A number may go on behind the window: 1 2, 1 .5, 1 e-9
                is_closed = isinstance(value, dict | list | str)
                if is_closed or self._ended or end + _NEAR_END < len(self.text):
                    return value, end
            if len(self.text) - self.position >= LONGEST_VALUE:
                raise self._broken(f"the value has no end within {LONGEST_VALUE} characters")
            self._grow()

    def find_record(self) -> tuple[Any, int] | None:
        """Move on from something broken to the next record, and read it; None if there is none.

        A turn is an object as well, so only what is a record and stands like an element counts. An object
        that can be read and is none is passed over as a whole, and of the objects that fail at the same
        place, each within the other, only so many are tried: the search costs a multiple of its length.
        """
        attempts = reach = 0
        self.position += 1
        while True:
            match = _OBJECT.search(self.text, self.position)
            if not match:
                self.position = len(self.text)
                if not self._grow():
                    return None
                continue
            self.position = match.start()
            try:
                value, end = self._short_value() or self.value()
            except _BrokenError as broken:
                reached = self._characters + broken.reach
                attempts, reach = (attempts + 1 if reached == reach else 0), reached
                give_up = attempts > _NESTED_ATTEMPTS or isinstance(
                    broken.__cause__, RecursionError
                )
                self.position = max(self.position + 1, broken.reach if give_up else 0)
                continue
            if format_of(value) is not None:
                follower, end = self._character_after(end)
                if follower in ("", ",", "]", "{", "["):
                    return value, end
            self.position = end

    def _short_value(self) -> tuple[Any, int] | None:
        """`value`, or None where more than a piece of the text is needed to tell.

        Before it raises, json counts the lines up to an error, again and again those of the whole window.
        """
        piece = self.text[self.position : self.position + _SHORT]
        try:
            value, end = self._scanner.raw_decode(piece)
        except json.JSONDecodeError as error:
            if "Unterminated" in error.msg or error.pos > len(piece) - _NEAR_END:
                return None
            at = self.position + error.pos
            raise _BrokenError(error.msg, at, at) from error
        except (RecursionError, ValueError):
            return None
        return value, self.position + end

    def _character_after(self, end: int) -> tuple[str, int]:
        """The first character after `end` that is no space, or ""; and `end` in the window then."""
        while True:
            at = _end(_SPACE, self.text, end)
            if at < len(self.text) or self._ended:
                return self.text[at : at + 1], end
            end -= self.position
            self._grow()

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        """Whether more text might make a value of it."""
        if error.msg.startswith("Unterminated string"):
            return True
        if self._ended:
            return bool(_CUT_OFF.match(self.text, error.pos))
        return error.pos > len(self.text) - _NEAR_END

    def _broken(self, reason: str, cut_off: bool = False) -> _BrokenError:
        return _BrokenError(reason, self.position, len(self.text), cut_off)

    def _grow(self) -> bool:
        """Let go of what lies before `position`, and read as much as is held then.

        Doubling keeps the work in proportion to the text, though a value is parsed anew every time.
        """
        self._characters += self.position
        self._lines += self.text.count("\n", 0, self.position)
        self.text = self.text[self.position :]
        self.position = 0
        data = self._stream.read(max(CHUNK, len(self.text)))
        self.text += self._decoder.decode(data, final=not data)
        self._ended = not data
        return bool(data)


def _end(pattern: re.Pattern[str], text: str, start: int) -> int:
    """Where a pattern that always matches ends."""
    match = pattern.match(text, start)
    return match.end() if match else start
