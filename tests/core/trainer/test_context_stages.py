"""Which plugins stood in the lines of calls and attempts, as a step's record says it."""

from __future__ import annotations

from lightning.trainer.context import STAGES, named_stages, other_stages, stages_of

THEN = {"calls": {"texts": "0.1", "mine": ""}, "attempts": {"mine": "2"}}
SAID = {STAGES: named_stages(THEN)}


def test_the_same_stages_are_no_difference() -> None:
    assert stages_of(SAID) == THEN
    assert other_stages(SAID, THEN) == {}
    assert other_stages({}, THEN) == {}, "a step that does not say"
    assert other_stages(SAID, {"calls": THEN["calls"]}) == {}, "attempts are made elsewhere now"


def test_each_difference_is_told_by_the_stages_name() -> None:
    assert other_stages(SAID, {"calls": {"texts": "0.2", "other": "3"}, "attempts": {}}) == {
        "calls": "'mine' (no version) is missing, 'other' (3) is new, 'texts' is 0.2 and was 0.1",
        "attempts": "'mine' (2) is missing",
    }
    assert other_stages(SAID, {"calls": {"mine": "", "texts": "0.1"}}) == {"calls": "their order is another"}
