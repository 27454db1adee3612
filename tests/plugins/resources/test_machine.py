"""Any order of operations on resources, against a model of them, on every store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from lightning.errors import StoreError
from lightning.store import Store
from lightning_resources.nouns import Resource
from lightning_resources.operations import list_aliases, list_resources, put_resource, roll_back_alias, set_alias


class ResourceMachine(RuleBasedStateMachine):
    """`make_store` is set by the test that runs the machine."""

    make_store: Callable[[], Store]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.store = type(self).make_store()
        self.texts: list[str] = []
        self.aliases: dict[str, list[int]] = {}

    @initialize()
    def begin(self) -> None:
        self.runner.run(self.store.open())

    def teardown(self) -> None:
        self.runner.run(self.store.close())
        self.runner.close()

    @rule(text=st.sampled_from("abc"))
    def put_resource(self, text: str) -> None:
        if text not in self.texts:
            self.texts.append(text)
        found = self.runner.run(put_resource(self.store, Resource("w", text)))
        assert (found.version, found.content) == (self.texts.index(text) + 1, text)

    @rule(alias=st.sampled_from(("production", "canary")), version=st.integers(1, 3))
    def set_alias(self, alias: str, version: int) -> None:
        if version > len(self.texts):
            with pytest.raises(StoreError):
                self.runner.run(set_alias(self.store, "w", alias, version))
            return
        assert self.runner.run(set_alias(self.store, "w", alias, version)).version == version
        stack = self.aliases.setdefault(alias, [])
        if stack[-1:] != [version]:
            stack.append(version)

    @rule(alias=st.sampled_from(("production", "canary")))
    def roll_back_alias(self, alias: str) -> None:
        stack = self.aliases.get(alias, [])
        if len(stack) < 2:
            with pytest.raises(StoreError):
                self.runner.run(roll_back_alias(self.store, "w", alias))
            return
        stack.pop()
        assert self.runner.run(roll_back_alias(self.store, "w", alias)).version == stack[-1]

    @precondition(lambda self: self.texts)
    @invariant()
    def every_alias_is_there(self) -> None:
        expected = {alias: stack[-1] for alias, stack in self.aliases.items()} | {"latest": len(self.texts)}
        assert {a.alias: a.version for a in self.runner.run(list_aliases(self.store, "w"))} == expected
        assert [item.content for item in self.runner.run(list_resources(self.store, "w"))] == self.texts


@pytest.mark.slow
def test_any_order_of_operations(make_store: Callable[[], Store], request: pytest.FixtureRequest) -> None:
    machine = type("Machine", (ResourceMachine,), {"make_store": staticmethod(make_store)})
    # A server answers a hundred times slower than a library, and it is asked for everything after each step.
    examples = 40
    if "postgres" in request.node.name:
        examples = 10
    if "http" in request.node.name:
        examples = 6  # what is behind the API is the store of the other machines
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=40, deadline=None))
