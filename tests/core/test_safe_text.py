"""Values of stores as JSON takes them."""

from __future__ import annotations

import json

from lightning.safe_text import counted, plain_json
from lightning.types import logprobs


def test_a_value_that_json_does_not_have_becomes_one_that_it_has() -> None:
    value = {1: logprobs([0.5, float("nan")]), "text": "\ud800", "many": (2**70, float("inf"), None)}
    plain = {"1": [0.5, None], "text": "\ud800", "many": [2**70, None, None]}
    assert plain_json(value) == plain
    assert json.loads(json.dumps(plain_json(value), allow_nan=False)) == plain


def test_a_count_agrees_with_its_noun() -> None:
    assert [counted(count, "step") for count in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    assert [counted(count, "call was", "calls were") for count in (1, 2)] == ["1 call was", "2 calls were"]
    assert counted(1200, "row", shown="1 200") == "1 200 rows"
