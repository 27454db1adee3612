"""A conversation is stored as it was said, or not at all if a plugin would leave something out of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from lightning.types import Conversation
from lightning_record.conversation import storable

from tests.core.security.test_redaction import Broken, Names, plugin  # noqa: F401 — a fixture


def said(text: str) -> Conversation:
    """A conversation with a text in it."""
    return Conversation(({"role": "user", "content": [{"type": "text", "text": text}]},), "resp_1", 2)


def test_a_plugin_is_asked_of_a_conversation(plugin: Callable[[object], None]) -> None:  # noqa: F811
    names = Names()
    plugin(names)
    assert storable(said("I am Ada")) is None
    assert set(names.asked) == {"conversation"}


@pytest.mark.parametrize("answer", [None, 5, b"bytes"])
def test_a_plugin_that_fails_costs_the_text_and_not_the_secret(
    answer: object,
    plugin: Callable[[object], None],  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    plugin(Broken(answer))
    assert storable(said("a private matter")) is None
    assert "a private matter" not in caplog.text
    assert "redactor-0" in caplog.text


def test_what_must_stay_exact_stays() -> None:
    assert storable(said("hi there")) == said("hi there")
