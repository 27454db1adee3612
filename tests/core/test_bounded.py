"""What is held is bounded, and the oldest is forgotten first."""

from __future__ import annotations

import pytest
from lightning import bounded
from lightning.bounded import Aging, Bounded, Once


def test_the_entry_that_was_kept_or_used_longest_ago_is_forgotten() -> None:
    known = Bounded[str, int](2)
    assert [known.keep(name, number) for number, name in enumerate("ab")] == [0, 1]
    assert known.used("a") == 0
    known.keep("c", 2)
    assert list(known) == ["a", "c"]
    known.keep("a", 3)
    known.keep("d", 4)
    assert dict(known) == {"a": 3, "d": 4}


def test_to_get_an_entry_leaves_the_order() -> None:
    known = Bounded[str, int](2)
    for number, name in enumerate("ab"):
        known.keep(name, number)
    assert (known.get("a"), known.get("z"), known.used("z")) == (0, None, None)
    known.keep("c", 2)
    assert list(known) == ["b", "c"]


def test_what_is_too_old_is_not_believed() -> None:
    known = Aging[str, str](1)
    known.keep("a", ("said", 10.0))
    assert [known.fresh("a", now, 2.0) for now in (11.9, 12.0)] == ["said", None]
    assert known.fresh("b", 10.0, 2.0) is None


def test_each_thing_is_said_once_and_no_more_than_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "SAID", 2)
    once = Once()
    assert [once.first(what) for what in ("a", "a", "b", "b")] == [True, False, True, False]
    assert once.first("c")
    assert [once.first(what) for what in ("c", "a")] == [False, True]
