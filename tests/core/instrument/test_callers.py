"""Who is asked who is calling, in which order, and what becomes of those who fail."""

from __future__ import annotations

import lightning
import pytest
from lightning.instrument import activate, ask, components, current_caller
from lightning.plugins import Plugins
from lightning.types import LLM, Caller

ADAPTER, HANDLER = Caller("adapter"), Caller("handler")


@pytest.fixture(autouse=True)
def _answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(components, "_asked", ())
    monkeypatch.setattr(Plugins, "identify", lambda self: ADAPTER)


def test_what_was_registered_by_hand_is_asked_before_the_adapters() -> None:
    answers: list[Caller | None] = [HANDLER, None]

    def identify() -> Caller | None:
        return answers.pop(0)

    ask(identify)
    ask(identify)
    assert [current_caller(), current_caller()] == [HANDLER, ADAPTER], "asked twice in all: registered once"


def test_one_that_fails_is_named_once_and_costs_nothing(warnings_of) -> None:
    def broken() -> Caller:
        raise ZeroDivisionError("in here")

    ask(broken)
    ask(lambda: HANDLER)
    assert [current_caller(), current_caller()] == [HANDLER, HANDLER]
    (warning,) = warnings_of()
    assert "broken" in warning
    assert "in here" in warning


def test_a_tool_run_knows_who_was_named_by_hand() -> None:
    @lightning.tool
    def search() -> str:
        return "found"

    ask(lambda: HANDLER)
    with activate(LLM("http://127.0.0.1:1/v1", "key", "policy")) as session:
        search()
    assert [event.caller for event in session.tool_events] == [HANDLER]
