"""Requests and replies are read back exactly, whatever JSON they are, and what is damaged is an error."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.errors import ParentGoneError, StoreError
from lightning.store.memory import MemoryStore
from lightning.store.rows import LARGEST_EXTRA, pack_extras, unpack_extras
from lightning.types import CallStatus, Rollout, Run, Task, Transition, logprobs, token_ids
from lightning_record import exchanges
from lightning_record.exchanges import TEXTS, Exchange, Parent, Said, parents_of

TEXT = st.text(st.characters(), max_size=12)
NUMBERS = st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT | st.just("\ud800 alone"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
BODY = st.dictionaries(TEXT, JSON, max_size=5)


def call(seq: int, packed: bytes | None, rollout: str = "r") -> Transition:
    return Transition(
        rollout,
        1,
        seq,
        f"c{seq}",
        token_ids(),
        token_ids(),
        logprobs(),
        extras={} if packed is None else {TEXTS: packed},
    )


def trunk(*said: tuple[Any, Any]) -> list[Transition]:
    """The calls of a parent, each told against the one before."""
    calls, before = [], exchanges.NOBODY
    for seq, (request, reply) in enumerate(said):
        text, answer = exchanges.canonical(request), json.dumps(reply).encode()
        calls.append(call(seq, exchanges.pack("/chat", 200, text, answer, before), "p"))
        before = Said(seq, text, answer)
    return calls


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


@given(
    st.lists(st.tuples(BODY, BODY), min_size=1, max_size=4),
    st.lists(st.tuples(BODY, BODY), min_size=1, max_size=4),
    st.data(),
)
def test_a_branch_is_read_back_with_the_calls_of_its_parent(
    before: list[tuple[Any, Any]], own: list[tuple[Any, Any]], data: st.DataObject
) -> None:
    parent = trunk(*before)
    bases = exchanges.said_in_parent(parent, data.draw(st.permutations(range(len(parent)))))
    stored = []
    for seq, (request, reply) in enumerate(own):
        if data.draw(st.booleans()):  # it asks what its parent asked, or goes on with that
            request = data.draw(st.sampled_from(before))[0] | data.draw(st.dictionaries(TEXT, JSON, max_size=1))
            own[seq] = request, reply
        text, answer = exchanges.canonical(request), json.dumps(reply).encode()
        stored.append(call(seq, exchanges.pack("/chat", 200, text, answer, data.draw(st.sampled_from(bases)))))
        bases.append(Said(seq, text, answer))
    found = exchanges.read(stored, Parent("p", parent))
    assert [as_text([one.request, one.reply]) for one in found if one] == [as_text(list(pair)) for pair in own]


LONG = {"messages": ["a" * 100]}


def test_a_branch_stores_nothing_of_what_its_parent_asked() -> None:
    texts = [hashlib.sha512(bytes([n])).hexdigest() for n in range(5)]  # they hardly compress
    asked, again = {"messages": texts[:1]}, {"messages": texts[:2]}
    parent = trunk((asked, {"text": texts[2]}), (again, {"text": texts[3]}))
    (base,) = exchanges.said_in_parent(parent, [1])
    packed = exchanges.pack("/chat", 200, base.request, json.dumps({"text": texts[4]}).encode(), base)
    assert len(packed) <= len(parent[1].extras[TEXTS])
    assert exchanges.flags_of(call(0, packed)) == exchanges.Flag.OF_PARENT
    (found,) = exchanges.read([call(0, packed)], Parent("p", parent))
    assert found == Exchange("/chat", again, {"text": texts[4]}, 200)


def test_a_branch_without_its_parents_calls_is_an_error_that_names_it() -> None:
    parent = trunk((LONG, {"id": "first answer"}))
    (base,) = exchanges.said_in_parent(parent, [0])
    own = [call(0, exchanges.pack("/chat", 200, exchanges.canonical(LONG | {"n": 1}), b"{}", base))]
    with pytest.raises(
        ParentGoneError, match=r"call 0 of its parent run/0/1, whose calls are not in the store any more: .*prune"
    ) as gone:
        exchanges.read(own, Parent("run/0/1"))
    with pytest.raises(StoreError, match="parents_of"):
        exchanges.read(own)
    # A parent that was made again asks and answers something else under the same number, or asks nothing there.
    others = [trunk(({"messages": ["c" * 100]}, {"id": "first answer"})), trunk((LONG, {"id": "other answer"}))]
    others += [[replace(parent[0], seq=1)], [replace(call(0, None), status=CallStatus.REFUSED)]]
    others += [[replace(call(0, None), choice=1)], own]
    errors = [gone.value]
    for other in others:
        with pytest.raises(
            ParentGoneError, match=r"call 0 of its parent p, and that is another call now: .*branch again"
        ) as e:
            exchanges.read(own, Parent("p", other))
        errors.append(e.value)
    with pytest.raises(
        ParentGoneError, match=r"its parent p, of which no request is recorded now: .*record_requests"
    ) as e:
        exchanges.read(own, Parent("p", [call(0, None)]))
    for error in (*errors, e.value):
        assert "its tokens and rewards are still there" in str(error)
        assert "Restore" not in str(error)


def test_a_damaged_parent_is_not_taken_for_one_that_is_gone() -> None:
    parent = trunk((LONG, {"id": "first answer"}))
    (base,) = exchanges.said_in_parent(parent, [0])
    own = [call(0, exchanges.pack("/chat", 200, exchanges.canonical(LONG | {"n": 1}), b"{}", base))]
    damaged = [call(0, parent[0].extras[TEXTS][:20])]
    with pytest.raises(StoreError, match="is corrupt") as error:
        exchanges.read(own, Parent("p", damaged))
    assert not isinstance(error.value, ParentGoneError)


def test_the_calls_of_a_long_parent_are_read() -> None:
    parent = trunk(*(({"messages": [n]}, {"id": n}) for n in range(1500)))
    (base,) = exchanges.said_in_parent(parent, [1499])
    assert (json.loads(base.request), json.loads(base.reply)) == ({"messages": [1499]}, {"id": 1499})


async def test_parents_are_read_once_and_those_that_are_gone_have_no_calls() -> None:
    store = MemoryStore()
    await store.open()
    await store.put_run(Run("run", "run"))
    branches = [("b", ("p", 1, 0)), ("c", ("p", 1, 0)), ("d", ("gone", 1, 0)), ("e", ("known", 2, 0))]
    rollouts = [Rollout(name, "run", Task("q"), "g", parent=key) for name, key in (("p", None), *branches)]
    await store.create_rollouts(rollouts)
    await store.lease("run", "w", limit=1)
    (own,) = trunk((LONG, {"id": "first answer"}))
    await store.append([own])
    found = await parents_of(store, rollouts, {("known", 2): [own]})
    assert found == [None, Parent("p", [own]), Parent("p", [own]), Parent("gone", ()), Parent("known", [own])]
    await store.close()


FIRST = (
    "AQD/////KLUv/SBrFQMAYkYWG3Brc6YmbBqkKU51hK0tWL8/EDS4n6ZE1RDBAs2Bxaji4EP+I2/WkuaVyxg5G7qMNmjzS6h02vyW"
    "cU8LwshXeaWKGYK8uUi76TADJIQCHjx4zgD9tCgCIwEBAF8UVBQ="
)
SECOND = (
    "AQAAAAAAKLUv/SBTPQIAxANbIi9jaGF0IiwyMDAsNjEsMiw0NV0KLHsiY29udGVudCI6LCJyb2xlIjoiYXNzaXN0YW50In1ZZXMu"
    "In0CALqwMc1DPQE="
)


def test_what_was_stored_before_there_were_branches_is_read() -> None:
    first, second = exchanges.read([call(n, base64.b64decode(text)) for n, text in enumerate((FIRST, SECOND))])
    asked = {"role": "user", "content": "What is two and two?"}
    assert first == Exchange("/chat", {"messages": [asked]}, {"text": "It is four."}, 200)
    said = {"role": "assistant", "content": "It is four."}
    assert second == Exchange("/chat", {"messages": [asked, said]}, {"text": "Yes."}, 200)


@given(BODY)
def test_equal_requests_have_one_canonical_form(body: Any) -> None:
    again = dict(reversed(json.loads(json.dumps(body)).items()))
    assert exchanges.canonical(again) == exchanges.canonical(body)
    assert as_text(json.loads(exchanges.canonical(body))) == as_text(body)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_what_is_kept_of_a_value_has_its_size() -> None:
    """What orjson returns takes four kilobytes, however short it is."""
    before = resident()
    kept = [exchanges.written([n]) for n in range(20_000)]
    assert resident() - before < 20 << 20, len(kept)


def test_a_call_whose_earlier_one_is_missing_is_an_error_that_names_it() -> None:
    first = Said(0, exchanges.canonical({"messages": ["a" * 100]}), b'{"id": "first answer"}')
    packed = exchanges.pack("/chat", 200, exchanges.canonical({"messages": ["a" * 100, "b"]}), b"{}", first)
    with pytest.raises(StoreError, match=r"call 0 .*has no exchange"):
        exchanges.read([call(1, packed)])


@pytest.mark.parametrize("packed", [b"", b"\x01\x00", b"\x01\x00\xff\xff\xff\xffno frame", b"\x07\x00\xff\xff\xff\xff"])
def test_what_is_damaged_or_of_another_form_is_an_error(packed: bytes) -> None:
    with pytest.raises(StoreError, match=r"corrupt|works with form 1 only"):
        exchanges.read([call(0, packed)])


def test_calls_that_are_not_recorded_have_none() -> None:
    assert exchanges.read([call(0, None)]) == [None]
    assert exchanges.flags_of(call(0, None)) == 0
    assert Exchange("/chat", {}).status == 0


def test_the_largest_exchange_fits() -> None:
    """Noise: nothing of it is compressed."""
    noise = os.urandom(exchanges.LARGEST)
    packed = exchanges.pack("/chat/completions", 200, noise, noise[::-1])
    assert exchanges.LARGEST * 2 < len(packed) <= LARGEST_EXTRA
    assert exchanges.LARGEST_FRAME < LARGEST_EXTRA
    kept = {exchanges.TEXTS: packed}
    assert unpack_extras(pack_extras(kept, "them"), "them") == kept
