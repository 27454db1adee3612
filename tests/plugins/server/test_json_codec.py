"""Nouns over the wire come back as they were, and whatever else arrives is an error that names the field."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema_rs import Draft202012Validator
from lightning.errors import DataError
from lightning.store.protocol import MetricPoint
from lightning.types import (
    Outcome,
    Rollout,
    Run,
    Span,
    StepRecord,
    StepReward,
    Task,
    ToolEvent,
    Transition,
    logprobs,
    token_ids,
)
from lightning_resources.nouns import Alias, Resource, ResourceUse
from lightning_server import json_codec, messages
from lightning_server.operations import OPERATIONS
from lightning_server.tokens import Token

NOUNS = (
    Run,
    Rollout,
    Transition,
    Span,
    Outcome,
    ToolEvent,
    StepReward,
    StepRecord,
    Token,
    Alias,
    MetricPoint,
    ResourceUse,
)


def is_derived(cls: Any) -> bool:
    """Whether an operation's request or answer is a class that the table has made."""
    return dataclasses.is_dataclass(cls) and getattr(cls, "__module__", "").partition(".")[0] == "types"


MESSAGES = (
    *(cls for _, cls in inspect.getmembers(messages, dataclasses.is_dataclass) if cls.__module__ == messages.__name__),
    *(cls for cls in dict.fromkeys(made for one in OPERATIONS for made in (one.sent, one.answered)) if is_derived(cls)),
)
TEXT = st.text(st.characters(codec=None), max_size=8)
FLOATS = st.floats(width=32)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
INT64 = st.integers(-(2**63), 2**63 - 1)


def of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type, from its hints."""
    known: dict[Any, st.SearchStrategy[Any]] = {
        str: TEXT,
        bytes: st.binary(max_size=9),
        bool: st.booleans(),
        int: INT64,
        float: st.floats(allow_nan=False),
        json_codec._Ids: st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5).map(token_ids),
        json_codec._LogProbs: st.lists(FLOATS.filter(lambda x: not math.isnan(x)), max_size=5).map(logprobs),
        json_codec.AnyJson: JSON,
    }
    if hint in known:
        return known[hint]
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return st.none() | of(next(part for part in parts if part is not type(None)))
    if origin is tuple and parts[-1] is ...:
        return st.lists(of(parts[0]), max_size=2).map(tuple)
    if isinstance(origin, type) and issubclass(origin, Sequence) and origin is not tuple:
        return st.lists(of(parts[0]), max_size=2).map(list if origin is list else tuple)
    if origin is tuple:
        return st.tuples(*map(of, parts))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return st.dictionaries(TEXT, of(parts[1]), max_size=2)
    if issubclass(hint, Enum):
        return st.sampled_from(list(hint))
    if hint is Task:
        return st.builds(Task, JSON, JSON, st.dictionaries(TEXT, JSON, max_size=2), TEXT)
    hints = get_type_hints(hint, localns=json_codec.LOCAL)
    return st.builds(hint, **{field.name: of(hints[field.name]) for field in dataclasses.fields(hint)})


def there_and_back(value: object, hint: object) -> object:
    sent = json_codec.write(json_codec.codec_of(hint).encode(value))
    return json_codec.codec_of(hint).decode(json_codec.read(sent, "it"), "it", True)


@pytest.mark.parametrize("noun", NOUNS, ids=lambda noun: noun.__name__)
def test_a_noun_comes_back_as_it_was(noun: type) -> None:
    @given(of(noun))
    def check(value: object) -> None:
        assert there_and_back(value, noun) == value

    check()


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_every_message_travels_and_is_described(message: type) -> None:
    schema, uses = json_codec.describe(message)
    assert schema["description"]
    assert set(schema["properties"]) == {field.name for field in dataclasses.fields(message)}
    assert all(json_codec.describe(use)[0]["description"] for use in uses)
    json_codec.codec_of(message)


# No store takes extras under half of a character, and the validator takes no such name, either.
@given(of(Transition).filter(lambda call: all(map(str.isprintable, call.extras))))
def test_a_noun_on_the_wire_is_what_its_schema_says(call: Transition) -> None:
    schema, waiting = json_codec.describe(Transition)
    named: dict[str, Any] = {}
    pending = list(waiting)
    while pending:
        cls = pending.pop()
        named[cls.__name__], more = json_codec.describe(cls)
        pending += more
    schema = {**schema, "components": {"schemas": named}}
    Draft202012Validator(schema).validate(json.loads(json_codec.write(json_codec.codec_of(Transition).encode(call))))


def test_resources_come_back_as_they_were() -> None:
    given_ = Resource("writer", {"a": [1, 2.5, None, 2**70]}, kind="config", metadata={"reward": 0.5}, version=3)  # type: ignore[arg-type]
    assert there_and_back(given_, Resource) == given_


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_have_travel_by_name(number: float) -> None:
    point = MetricPoint(1, {"loss": number}, 2.0)
    found = there_and_back(point, MetricPoint)
    assert isinstance(found, MetricPoint)
    assert repr(found.values["loss"]) == repr(number)
    text = json_codec.write({"anywhere": [number]})
    assert json.loads(text, parse_constant=pytest.fail) == {
        "anywhere": [{"nan": "NaN", "inf": "Infinity"}.get(repr(number), "-Infinity")]
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq": "1"}, r'it.seq is "1"; it must be an integer'),
        ({"seq": 2**63}, "it.seq is a very large integer"),
        ({"seq": True}, "it.seq is true"),
        ({"attempt": 1.5}, "it.attempt is 1.5"),
        ({"prompt_ids": "AAA"}, "it.prompt_ids .* base64 of little-endian int32"),
        ({"prompt_ids": "AAAA"}, "it.prompt_ids .* base64"),
        ({"logprobs": [0.5]}, "it.logprobs is list; it must be base64"),
        ({"status": "fine"}, "it.status .* one of ok, media, aborted, error"),
        ({"versions": [{"start": 0}]}, r"it.versions\[0\] lacks 'version'"),
        ({"versions": {}}, "it.versions is dict; it must be a list"),
        ({"caller": None}, "it.caller is null; it must be an object"),
        ({"temperature": "hot"}, "it.temperature"),
        ({"temperature": 10**400}, "it.temperature"),
        ({"constrained": 0}, "it.constrained is 0; it must be true or false"),
        ({"sequence": 1}, "it has no field 'sequence': known: rollout, attempt, seq"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, object], message: str) -> None:
    codec = json_codec.codec_of(Transition)
    good = codec.encode(Transition("r", 1, 0, "c", token_ids([1]), token_ids([2]), logprobs([-1.0])))
    assert isinstance(good, dict)
    with pytest.raises(DataError, match=message):
        codec.decode({**good, **change}, "it", True)


def test_what_a_newer_server_adds_is_passed_over() -> None:
    codec = json_codec.codec_of(messages.Expiry)
    assert codec.decode({"expires_at": 1.0, "of": 2}, "the answer", False) == messages.Expiry(1.0)


@pytest.mark.parametrize("payload", [b"", b"{", b"\xff\xfe", b"NaN", b"[1e5000]"[:-1], b"[" * 100_000, b"9" * 10_000])
def test_what_is_not_json_is_said(payload: bytes) -> None:
    with pytest.raises(DataError, match="the body is not JSON"):
        json_codec.read(payload, "the body")


@given(JSON)
def test_any_json_may_stand_where_a_noun_should(value: object) -> None:
    for noun in (Transition, Outcome, messages.LeaseRequest):
        try:
            json_codec.codec_of(noun).decode(value, "it", True)
        except DataError as error:
            assert str(error).startswith(("it", "the ", "a "))  # noqa: PT017


def test_a_new_field_of_a_rollout_reaches_the_wire() -> None:
    longer = dataclasses.make_dataclass(
        "Rollout", [("ancestor", str, dataclasses.field(default=""))], bases=(Rollout,), frozen=True
    )
    a = longer("a", "run", Task("q"), "g", ancestor="first")
    codec = json_codec.codec_of(longer)
    assert codec.decode(codec.encode(a), "it", True) == a
