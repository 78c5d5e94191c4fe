"""JSON values from a stream: any chunks, anything broken between them, and no more held than one."""

import json
import time
import tracemalloc
from collections.abc import Iterator

import pytest
from helpers import openai, sharegpt

from sfdd.conversations import json_values
from sfdd.conversations.json_values import Element, read_values
from sfdd.conversations.streams import Utf8Reader

RECORDS = [sharegpt(f'Hi {i} \u00e9\U0001f600 {{"a":', "x]},", id=str(i)) for i in range(4)]
A, B, C, D = (json.dumps(record, ensure_ascii=False) for record in RECORDS)


def elements(text: str | bytes, step: int = 1 << 16) -> list[Element]:
    data = text.encode() if isinstance(text, str) else text
    chunks = (data[i : i + step] for i in range(0, len(data), step))
    return list(read_values(Utf8Reader(chunks)))


def read(text: str | bytes) -> list[object]:
    """The values, and the errors in their places."""
    return [element.error or element.value for element in elements(text)]


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 4096])
@pytest.mark.parametrize(
    "text",
    [
        f"[{A},{B},{C},{D}]",
        f"\n [ {A} ,\r\n{B}\t,{C},{D} ] \n",
        json.dumps(RECORDS, indent=1),
        f"{A}{B}{C}{D}",
        f"{A}\n{B}\n\n{C} {D}",
        f"[{A}{B} {C},,{D},]",
        f"[{A},{B}][{C}]\n[]{D}",
        f"\ufeff[{A},{B}]\ufeff[{C},{D}]",
        f"[[{A},{B}],[{C}],{D}]",
    ],
)
def test_values_whatever_the_chunks(text: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_values, "CHUNK", chunk)
    found = elements(text)
    assert [element.value for element in found] == RECORDS
    assert not any(element.error for element in found)
    assert all(json.loads(element.text) == element.value for element in found)
    assert all(element.text in text for element in found)


@pytest.mark.parametrize("chunk", [1, 2, 3, 64])
def test_scalars_are_not_split_by_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_values, "CHUNK", chunk)
    assert read('[1, 2.5,-3e7 1e-5, 1234567, true, null, "a"]') == (
        [1, 2.5, -3e7, 1e-5, 1234567, True, None, "a"]
    )


class TestBroken:
    def test_the_place_is_a_line_and_a_character_of_the_file(self) -> None:
        assert read(f'[{A},\n{{"id" 1}},\n{B}]') == [
            RECORDS[0],
            f"line 2, character {len(A) + 9}: Expecting ':' delimiter",
            RECORDS[1],
        ]

    @pytest.mark.parametrize(
        "broken",
        [
            B[:-1],  # no brace at the end
            B[:-3],  # nor an end of the list, nor of the turn
            B.replace('Hi 1 \u00e9\U0001f600 {\\"a\\":"', "Hi 1"),  # no quote at the end of a turn
            B.replace(":", "", 1),
            B.replace('"x]},"', "undefined"),
            B.replace("x]},", "a line\nfeed"),
            B.replace("x]},", "\\x41"),
            '{"n": ' + "9" * 5000 + "}",
            "[" * 50_000,
            '{"a":' * 50_000,
            "garbage { here",
        ],
    )
    def test_one_broken_element_costs_only_itself(self, broken: str) -> None:
        before, error, after, last = read(f"[{A},{broken},{C},{D}]")
        assert (before, after, last) == (RECORDS[0], RECORDS[2], RECORDS[3])
        assert str(error).startswith("line 1, character ")

    def test_a_value_that_swallows_the_others_gives_them_back(self) -> None:
        unclosed = '{"conversations": [{"from": "human", "value": "a"}'
        error, *values = read(f"[{unclosed},{A},{B},{C},{D}]")
        assert error == "line 1, character 1: the value has no end"
        assert values == RECORDS

    @pytest.mark.parametrize("extra", ["[", "]", "{", "}", '"', ",", "x"])
    def test_a_character_too_many_costs_at_most_one_record(self, extra: str) -> None:
        text = f"[{A}, {B}, {C}, {D}]"
        for i in range(1, len(text)):
            found = elements(text[:i] + extra + text[i:])
            assert sum(element.value in RECORDS for element in found) >= 3

    def test_turns_and_nested_records_are_no_records(self) -> None:
        nested = json.dumps({"chosen": openai("x", "y"), "by": RECORDS[3]})
        assert read(
            f'[{A}, {{"broken" 1}}, {nested}, {{"role": "user", "content": "x"}}, {B}]'
        ) == [
            RECORDS[0],
            f"line 1, character {len(A) + 13}: Expecting ':' delimiter",
            RECORDS[1],
        ]

    def test_a_record_in_a_text_is_none(self) -> None:
        text = json.dumps({"broken": json.dumps(RECORDS[0])}).replace(":", "", 1)
        assert len(read(f"[{text}, {B}]")) == 2

    def test_cut_off(self) -> None:
        found = elements(f'[{A}, {{"conversations": [{{"from": "human", "va')
        place = f"line 1, character {len(A) + 3}"
        assert [e.value for e in found] == [RECORDS[0], None]
        assert found[1].error == f"{place}: the value has no end; the file is cut off"
        assert found[1].cut_off

    @pytest.mark.parametrize("end", ["", ",", " ,\n"])
    def test_no_bracket_at_the_end(self, end: str) -> None:
        value, error = read(f"[{A}{end}")
        assert value == RECORDS[0]
        assert "the array has no end; the file may be cut off" in str(error)

    def test_broken_at_the_end_is_not_cut_off(self) -> None:
        value, error = read(f'[{A}, {{"a": 1, "b" 2}}]')
        assert value == RECORDS[0]
        assert str(error).endswith("Expecting ':' delimiter")

    def test_text_behind_the_end(self) -> None:
        value, error = read(f"[{A}] and so on")
        assert value == RECORDS[0]
        assert error == f"line 1, character {len(A) + 3}: Expecting value"

    def test_utf8_is_decoded_to_the_end(self) -> None:
        first, second = elements(b'["\xff", "\xc3')
        assert first.value == "\udcff"
        assert "cut off" in second.error


def _endless(start: str, repeated: str) -> Iterator[bytes]:
    yield start.encode()
    while True:
        yield repeated.encode() * (1 + (1 << 17) // len(repeated))


class TestBounds:
    def test_a_broken_element_does_not_make_one_read_on(self) -> None:
        values = read_values(Utf8Reader(_endless(f'[{{"broken" 1}}, {A},', "1, ")))
        assert next(values).error
        assert next(values).value == RECORDS[0]

    def test_a_value_without_an_end_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(json_values, "LONGEST_VALUE", 1 << 20)
        unclosed = '[{"conversations": [{"from": "human", "value": "a"},'
        tracemalloc.start()
        try:
            values = read_values(Utf8Reader(_endless(unclosed, f"{A},")))
            assert next(values).error == (
                "line 1, character 1: the value has no end within 1048576 characters"
            )
            assert [next(values).value for _ in range(1000)] == [RECORDS[0]] * 1000
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 40_000_000  # the Python objects of a value that long

    @pytest.mark.parametrize(
        ("start", "piece", "times"),
        [
            ("", '{"a" b} ', 40_000),  # objects that fail one by one
            ("", '{"a":', 60_000),  # objects that fail each within the other
            ("", '{"a":' * 400 + "} ", 150),
            ("", "{ not json } ", 100_000),
            ("", '{"a": [1, 2, {"b": "c"}]} ', 20_000),  # what can be read, and is no record
            ('{"a": "', "x", 3_000_000),
        ],
    )
    def test_the_search_for_a_record_takes_no_time(
        self, start: str, piece: str, times: int
    ) -> None:
        began = time.perf_counter()
        error, *_ = elements(f"[broken {start}{piece * times}, {A}]")
        assert error.error == "line 1, character 1: Expecting value"
        assert time.perf_counter() - began < 5  # seconds; quadratic, it would be minutes
