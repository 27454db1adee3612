"""The event cutter over arbitrary cuts."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from lightning.gateway.http import EventCutter, data_of

TEXT = st.text(alphabet=st.characters(exclude_characters="\r\n", codec="utf-8"), max_size=20)
END = st.sampled_from([b"\n", b"\r\n", b"\r"])


def cut(payload: bytes, places: list[int]) -> list[bytes]:
    marks = sorted({place % (len(payload) + 1) for place in places} | {0, len(payload)})
    return [payload[a:b] for a, b in itertools.pairwise(marks)]


@given(texts=st.lists(TEXT, max_size=6), end=END, places=st.lists(st.integers(0, 10_000), max_size=12))
def test_any_cut_gives_the_same_payloads(texts, end, places):
    payload = b"".join(b"data: " + text.encode() + end + end for text in texts)
    cutter = EventCutter()
    events = [event for piece in cut(payload, places) for event in cutter.feed(piece)]
    assert b"".join(events) + cutter.rest() == payload
    assert [data_of(event) for event in events] == [text.encode() for text in texts]


@given(payload=st.binary(max_size=200), places=st.lists(st.integers(0, 10_000), max_size=12))
def test_no_byte_is_lost_or_moved(payload, places):
    cutter = EventCutter()
    events = [event for piece in cut(payload, places) for event in cutter.feed(piece)]
    assert b"".join(events) + cutter.rest() == payload


def test_every_single_cut_of_a_mixed_stream():
    payload = b': ping\n\nid: 4\r\ndata: {"a":1}\r\n\r\ndata: a\ndata:b\n\ndata: [DONE]\n\n'
    for place in range(len(payload)):
        cutter = EventCutter()
        events = [*cutter.feed(payload[:place]), *cutter.feed(payload[place:])]
        assert [data for event in events if (data := data_of(event))] == [b'{"a":1}', b"a\nb", b"[DONE]"]


def test_comments_have_no_data():
    assert data_of(b": keep-alive\n\n") is None
