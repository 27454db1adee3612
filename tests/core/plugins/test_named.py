"""What is recorded of an agent is a name that another process can import."""

from __future__ import annotations

import json
import sys
from functools import partial
from types import ModuleType

import pytest
from lightning.plugins.named import import_named, name_of


class Holder:
    @staticmethod
    def held() -> None: ...


class Anything:
    def __getattr__(self, name: str) -> object:
        return self


def test_a_function_of_a_module_is_found_again_by_its_name() -> None:
    for target in (json.dumps, Holder.held, Holder):
        assert import_named(name_of(target), "agent") is target


def test_what_another_process_cannot_import_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def inner() -> None: ...

    script = ModuleType("__main__")
    script.agent = inner
    inner.__module__, inner.__qualname__ = "__main__", "agent"
    monkeypatch.setitem(sys.modules, "__main__", script)
    made = ModuleType("made_here")
    made.agent = lambda task, llm: 0.0
    made.agent.__module__, made.agent.__qualname__ = "made_here", "agent"
    monkeypatch.setitem(sys.modules, "made_here", made)
    nameless = lambda task, llm: 0.0  # noqa: E731 — the agent of a first try
    for target in (inner, nameless, partial(json.dumps), Holder(), Anything(), made.agent, None):
        assert name_of(target) == ""
