"""Requests and replies are read back exactly, whatever JSON they are, and what is damaged is an error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.errors import StoreError
from lightning.store import exchanges
from lightning.store.exchanges import Exchange, Said
from lightning.types import Transition, logprobs, token_ids

TEXT = st.text(st.characters(), max_size=12)
NUMBERS = st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT | st.just("\ud800 alone"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
BODY = st.dictionaries(TEXT, JSON, max_size=5)


def call(seq: int, packed: bytes | None) -> Transition:
    return Transition("r", 1, seq, f"c{seq}", token_ids(), token_ids(), logprobs(), exchange=packed)


def as_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


@given(st.lists(st.tuples(BODY, BODY | st.none()), min_size=1, max_size=5), st.data())
def test_what_was_said_is_read_back_digit_by_digit(said: list[tuple[Any, Any]], data: st.DataObject) -> None:
    stored, known = [], [exchanges.NOBODY]
    for seq, (request, reply) in enumerate(said):
        if seq and data.draw(st.booleans()):  # a conversation that goes on
            request = said[seq - 1][0] | {"messages": [request, *data.draw(st.lists(JSON, max_size=3))]}
            said[seq] = request, reply
        text, answer = exchanges.canonical(request), b"" if reply is None else json.dumps(reply).encode()
        stored.append(call(seq, exchanges.pack("/chat", 200, text, answer, data.draw(st.sampled_from(known)))))
        known.append(Said(seq, text, answer))
    found = exchanges.read(stored[::-1])[::-1]
    assert [as_text([one.request, one.reply]) for one in found if one] == [as_text(list(pair)) for pair in said]


@given(BODY)
def test_equal_requests_have_one_canonical_form(body: Any) -> None:
    again = dict(reversed(json.loads(json.dumps(body)).items()))
    assert exchanges.canonical(again) == exchanges.canonical(body)
    assert as_text(json.loads(exchanges.canonical(body))) == as_text(body)


def test_a_call_whose_earlier_one_is_missing_is_an_error_that_names_it() -> None:
    first = Said(0, exchanges.canonical({"messages": ["a" * 100]}), b'{"id": "first answer"}')
    packed = exchanges.pack("/chat", 200, exchanges.canonical({"messages": ["a" * 100, "b"]}), b"{}", first)
    with pytest.raises(StoreError, match=r"call 0 .*has none"):
        exchanges.read([call(1, packed)])


@pytest.mark.parametrize("packed", [b"", b"\x01\x00", b"\x01\x00\xff\xff\xff\xffno frame", b"\x07\x00\xff\xff\xff\xff"])
def test_what_is_damaged_or_newer_is_an_error(packed: bytes) -> None:
    with pytest.raises(StoreError, match=r"corrupt|newer release"):
        exchanges.read([call(0, packed)])


def test_calls_of_earlier_releases_have_none() -> None:
    assert exchanges.read([call(0, None)]) == [None]
    assert exchanges.flags_of(call(0, None)) == 0
    assert Exchange("/chat", {}).status == 0
