"""The nouns: what a task may hold."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, get_type_hints

import lightning
import lightning.types
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.config import Config, load_config, with_settings
from lightning.errors import ConfigError, DataError
from lightning.plugins import plugins
from lightning.store import codec
from lightning.testing import FakeVLLM, rollout
from lightning.types import Caller, Task, TokenIds, as_texts, shared_prefix, token_ids

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40).map(token_ids)


class Graph:
    """What an agent builds for itself."""


LOOP: list[object] = []
LOOP.append(LOOP)


@settings(max_examples=30)  # each draws three nested values
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
    [item for item in vars(lightning.types).values() if isinstance(item, type) and dataclasses.is_dataclass(item)],
    ids=lambda noun: noun.__name__,
)
def test_the_type_hints_of_every_noun_resolve(noun: type) -> None:
    """In each Python: some look up the names inside an alias in the module of the class."""
    hints = get_type_hints(noun)
    assert set(hints) >= {item.name for item in dataclasses.fields(noun)}
    if noun is lightning.Transition:
        assert (hints["prompt_ids"], hints["logprobs"]) == (memoryview, memoryview)


def _subclass(**attributes: Any) -> object:
    from lightning.testing import AdapterContract

    return type("TestAcme", (AdapterContract,), attributes)


def _adapters_of(names: Any) -> object:
    return plugins().install_adapters(lambda event: None, names)


SEQUENCES: dict[str, Callable[[Any], object]] = {
    "train_agents": lambda names: lightning.Trainer("model", train_agents=names),
    "adapters": lambda names: lightning.Trainer("model", adapters=names),
    "adapters of install_adapters": _adapters_of,
    "adapters of rollout": lambda names: rollout(lambda task, llm: 1.0, "x", [], adapters=names),
    "aliases": lambda names: FakeVLLM(aliases=names),
    "Caller.path": lambda names: Caller("writer", path=names),
    "overrides": lambda names: load_config(None, names, {}),
    "TestAcme.capabilities": lambda names: _subclass(capabilities=names),
    "runner.adapters": lambda names: with_settings(Config(), {"runner.adapters": names}),
    "engine.lora.target_modules": lambda names: with_settings(Config(), {"engine.lora.target_modules": names}),
    "runner.preload": lambda names: load_config(None, [f"runner.preload={names}"], {}),
    "policy_server.args": lambda names: load_config(None, (), {"LIGHTNING_POLICY_SERVER__ARGS": names}),
}


@pytest.mark.parametrize("what", SEQUENCES)
def test_a_text_in_the_place_of_several_is_refused_by_name(what: str) -> None:
    """Its letters would be globs and names: `*` in `*/writer` trains every agent."""
    with pytest.raises(ConfigError, match=rf"(?s){what.partition(' ')[0]}.*\*/writer"):
        SEQUENCES[what]("*/writer")


def test_texts_are_taken_from_any_collection_and_nothing_else_is_one() -> None:
    assert as_texts((name for name in ("a", "b")), "names") == ("a", "b")
    for wrong in (None, 3, b"a", [1], ["a", None]):
        with pytest.raises(ConfigError, match=r"names.* not a"):
            as_texts(wrong, "names")  # type: ignore[arg-type]


def test_a_script_that_is_one_text_is_refused() -> None:
    with pytest.raises(DataError, match=r"script is the text 'yes', not a list of replies"):
        rollout(lambda task, llm: 1.0, "x", "yes")


@given(TOKENS, TOKENS)
def test_shared_prefix_counts_tokens(left: TokenIds, right: TokenIds) -> None:
    expected = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        expected += 1
    assert shared_prefix(codec.pack(left), codec.pack(right), codec.ITEM) == expected


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60))
def test_shared_prefix_of_branches(trunk: int, left: int, right: int) -> None:
    a = codec.pack(token_ids([7] * trunk + [1] * left))
    b = codec.pack(token_ids([7] * trunk + [2] * right))
    assert shared_prefix(a, b, codec.ITEM) == trunk


@given(st.binary(max_size=40), st.binary(max_size=40), st.integers(1, 5))
def test_shared_prefix_counts_whole_items(left: bytes, right: bytes, item: int) -> None:
    both = next(
        (place for place, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )
    assert shared_prefix(left, right, item) == both // item
