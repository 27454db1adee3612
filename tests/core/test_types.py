"""The nouns: what a task may hold."""

from __future__ import annotations

import dataclasses
import json
import sys
from array import array
from types import MappingProxyType
from typing import get_type_hints

import lightning.types
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.errors import DataError
from lightning.types import Task

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


class Graph:
    """What an agent builds for itself."""


LOOP: list[object] = []
LOOP.append(LOOP)


@given(JSON, JSON, st.dictionaries(st.text(), JSON, max_size=3))
def test_any_json_makes_a_task_that_is_the_same_after_a_journey(
    value: object, expected: object, metadata: dict
) -> None:
    task = Task(value, expected, metadata)
    assert Task(*json.loads(json.dumps([value, expected, metadata]))) == task


def test_tuples_and_read_only_metadata_are_fine() -> None:
    assert Task((1, 2), metadata=MappingProxyType({"a": (1,)})).id == Task([1, 2], metadata={"a": [1]}).id


@pytest.mark.parametrize("name", ["", "mine"], ids=["hashed", "named"])
@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"input": Graph()}, "its input is a Graph. Put only"),
        ({"input": {"state": [1, Graph()]}}, "its input['state'][1] is a Graph"),
        ({"input": b"text"}, "its input is a bytes"),
        ({"input": {1, 2}}, "its input is a set"),
        ({"input": {1: "a"}}, "its input has the key 1, which is no string"),
        ({"input": LOOP}, "is nested more than 100 deep, or contains itself"),
        ({"input": 1, "expected": float("nan")}, "its expected is nan, not a finite number"),
        ({"input": 1, "expected": {"bounds": [0.0, float("inf")]}}, "its expected['bounds'][1] is inf"),
        ({"input": 1, "metadata": {"at": Graph()}}, "its metadata['at'] is a Graph"),
    ],
)
def test_what_json_cannot_hold_is_named_with_its_place_and_the_cure(
    fields: dict[str, object], problem: str, name: str
) -> None:
    with pytest.raises(DataError) as caught:
        Task(**fields, id=name)  # type: ignore[arg-type]
    assert problem in str(caught.value)
    assert "build other objects inside the agent" in str(caught.value)
    assert str(caught.value).startswith("task 'mine' " if name else "a task ")


def test_metadata_that_is_no_mapping_is_named() -> None:
    with pytest.raises(DataError, match="task 'mine': its metadata is a list; give a mapping"):
        Task(1, metadata=["a"], id="mine")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "noun",
    [item for item in vars(lightning.types).values() if dataclasses.is_dataclass(item)],
    ids=lambda noun: noun.__name__,
)
def test_the_type_hints_of_every_noun_resolve(noun: type) -> None:
    """In each Python: some look up the names inside an alias in the module of the class."""
    if noun is lightning.Transition and sys.version_info < (3, 12):
        with pytest.raises(TypeError, match="not subscriptable"):  # an array has no `array[int]` there
            get_type_hints(noun)
        return
    hints = get_type_hints(noun)
    assert set(hints) >= {item.name for item in dataclasses.fields(noun)}
    if noun is lightning.Transition:
        assert (hints["prompt_ids"], hints["logprobs"]) == (array[int], array[float])
