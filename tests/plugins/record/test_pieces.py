"""A request's pieces have all of it, are few, and are the same in a later request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning_record.texts import SMALLEST, as_object, cut

TEXT = st.text(st.characters(), max_size=12)
NUMBERS = st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT | st.just("\ud800 alone"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
BODY = st.dictionaries(TEXT, JSON, max_size=5)


def as_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


@given(BODY)
def test_the_pieces_of_a_request_have_all_of_its_values(body: Any) -> None:
    request, pieces = cut(body)
    found: dict[str, Any] = {}
    for piece in pieces:
        for name, value in json.loads(as_object(request, piece)).items():
            found[name] = found.get(name, []) + value if piece.name is not None else value
    assert as_text(found) == as_text(body)


CHAT = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("body", "most"),
    [
        ({"prompt": list(range(32_000))}, 1),
        ({"prompt": ["a text"] * 32_000}, 1),
        ({"messages": [[]] * 50_000}, 100_000 // SMALLEST + 3),
        ({"messages": [CHAT] * 10_000}, 350_000 // SMALLEST + 3),
        ({"messages": [CHAT, []] * 5_000}, 350_000 // SMALLEST + 3),
        ({f"field {n}": n for n in range(10_000)}, 220_000 // SMALLEST + 3),
        ({"messages": [{"content": "x" * 2000}] * 20}, 20),
    ],
    ids=["ids", "texts", "lists", "messages", "mixed", "fields", "long messages"],
)
def test_a_request_has_few_pieces_however_many_values(body: Any, most: int) -> None:
    assert len(cut(body)[1]) <= most


def test_what_a_later_request_repeats_has_the_same_pieces() -> None:
    messages = [{"content": f"{n} " * (n % 40 * 20 + 1)} for n in range(60)]
    before, after = (cut({"messages": messages[:n], "model": "m"})[1] for n in (50, 60))
    known = {piece.key for piece in before}
    assert sum(piece.key not in known for piece in before + after) <= 12
