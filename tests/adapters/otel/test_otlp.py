"""Reading OTLP: whatever arrives gives bounded, storable spans or a `DataError`."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.errors import DataError
from lightning.store import rows
from lightning.types import Json, Span
from lightning_otel.traces import otlp
from lightning_otel.traces.otlp import MAX_ATTRIBUTES

KEYS = ("resourceSpans", "scopeSpans", "spans", "resource", "attributes", "key", "value", "stringValue", "intValue")
MORE = (
    "traceId",
    "name",
    "kind",
    "status",
    "events",
    "startTimeUnixNano",
    "arrayValue",
    "kvlistValue",
    "values",
    "code",
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5) | st.just("12"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS + MORE), inner, max_size=4),
    max_leaves=20,
)


def read_or_refused(read: Callable[[bytes], list[Span]], data: bytes) -> list[Span]:
    try:
        return read(data)
    except DataError as error:
        said = str(error)
    assert 0 < len(said) < 300
    return []


def checked(spans: list[Span]) -> None:
    for span in spans:
        rows.SPANS.values(span)
        assert len(span.name) <= 256
        assert len(json.dumps(dict(span.attributes))) < 10 * 4096 * MAX_ATTRIBUTES


@given(ANYTHING)
def test_json_is_read_or_refused(value: Json) -> None:
    for body in ({"resourceSpans": value}, {"resourceSpans": [{"scopeSpans": [{"spans": [value]}]}]}):
        checked(read_or_refused(otlp.read_json, json.dumps(body).encode()))


@given(st.binary(max_size=200))
def test_bytes_are_read_or_refused(data: bytes) -> None:
    for read in (otlp.read_json, otlp.read_protobuf):
        checked(read_or_refused(read, data))


def test_no_more_spans_are_read_than_were_asked_for() -> None:
    body = {"resourceSpans": [{"scopeSpans": [{"spans": [{}, {}]}, {"spans": [{}]}]}]}
    for read, data in (
        (otlp.read_json, json.dumps(body).encode()),
        (otlp.read_protobuf, b"\x0a\x06\x12\x04\x12\x00\x12\x00" * 2),
    ):
        found = len(read(data))
        assert len(read(data, found)) == found > 2
        with pytest.raises(
            DataError, match=f"has at least {found} spans, and a request may have at most 2: send fewer"
        ):
            read(data, 2)


def test_a_span_has_room_for_so_many_attributes_and_they_are_json() -> None:
    values = [
        ({"stringValue": "x" * 5000}, "x" * 4095 + "…"),
        ({"doubleValue": "NaN"}, "nan"),
        ({"arrayValue": {"values": [{"doubleValue": "Infinity"}]}}, "[Infinity]"),
        ({"kvlistValue": {"values": [{"key": "a", "value": {"intValue": "5"}}]}}, {"a": 5}),
        ({"arrayValue": {"values": [{"stringValue": "y" * 5000}]}}, '["' + "y" * 4093 + "…"),
        ({"bytesValue": "AAE="}, "AAE="),
        ({"boolValue": False}, False),
        ({}, None),
    ]
    pairs = [{"key": f"k{number}", "value": value} for number, (value, _) in enumerate(values)]
    many = [{"key": f"m{number}", "value": {"intValue": number}} for number in range(200)]
    body = {"resourceSpans": [{"scopeSpans": [{"spans": [{"attributes": [*pairs, *many, pairs[0]]}]}]}]}
    (span,) = otlp.read_json(json.dumps(body).encode())
    assert [span.attributes[f"k{number}"] for number in range(len(values))] == [kept for _, kept in values]
    assert len(span.attributes) == MAX_ATTRIBUTES


@pytest.mark.parametrize(
    ("ids", "good"),
    [
        (("a" * 32, "b" * 16, ""), True),
        (("a" * 32, "b" * 16, "c" * 16), True),
        (("0" * 32, "b" * 16, ""), False),
        (("a" * 32, "0" * 16, ""), False),
        (("a" * 32, "b" * 16, "0" * 16), False),
        (("a" * 31, "b" * 16, ""), False),
        (("g" * 32, "b" * 16, ""), False),
        (("", "", ""), False),
    ],
)
def test_ids_are_those_of_the_standard(ids: tuple[str, str, str], good: bool) -> None:
    assert otlp.well_identified(Span("r", 1, *ids)) is good


def test_an_error_is_said_in_the_words_of_whoever_knows_most() -> None:
    def read(**fields: object) -> tuple[str, str]:
        body = {"resourceSpans": [{"scopeSpans": [{"spans": [fields]}]}]}
        (span,) = otlp.read_json(json.dumps(body).encode())
        return span.status, span.error

    exception = {"name": "exception", "attributes": [{"key": "exception.message", "value": {"stringValue": "boom"}}]}
    typed = [{"key": "error.type", "value": {"stringValue": "Timeout"}}]
    assert read(status={"code": 2, "message": "told"}, events=[exception]) == ("error", "told")
    assert read(status={"code": 2}, events=[exception], attributes=typed) == ("error", "boom")
    assert read(attributes=typed) == ("unset", "Timeout")
    assert read(status={"code": 1}, events=[exception]) == ("ok", "")
    assert read(status={"code": 99}) == ("unset", "")


def test_attributes_without_a_bottom_are_refused() -> None:
    value = '{"arrayValue":{"values":[' * 330 + '{"intValue":1}' + "]}}" * 330
    pair = f'{{"key":"a","value":{value}}}'
    body = f'{{"resourceSpans":[{{"scopeSpans":[{{"spans":[{{"attributes":[{pair}]}}]}}]}}]}}'
    with pytest.raises(DataError, match="nested too deep"):
        otlp.read_json(body.encode())
