"""Which plugins stood in the line of calls, as a step's record says it."""

from __future__ import annotations

from lightning.trainer.context import STAGES, other_stages, stages_of

SAID = {STAGES: [["texts", "0.1"], ["mine", ""]]}


def test_the_same_stages_are_no_difference() -> None:
    assert stages_of(SAID) == {"texts": "0.1", "mine": ""}
    assert other_stages(SAID, {"texts": "0.1", "mine": ""}) == ""


def test_each_difference_is_told_by_the_stages_name() -> None:
    assert other_stages(SAID, {"texts": "0.2", "other": "3"}) == (
        "'mine' (no version) is missing, 'other' (3) is new, 'texts' is 0.2 and was 0.1"
    )
    assert other_stages(SAID, {"mine": "", "texts": "0.1"}) == "their order is another"
