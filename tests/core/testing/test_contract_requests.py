"""How the conformance kit compares the requests of two runs."""

from __future__ import annotations

import json
from typing import Any

from lightning.testing.contract_house import with_sorted_results

ASKED = {"role": "assistant", "tool_calls": [{"id": "a"}, {"id": "b"}]}


def told(call: str, text: str = "x") -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call}


def sent(*messages: dict[str, Any]) -> str:
    return with_sorted_results(json.dumps({"model": "m", "messages": messages}))


def test_results_of_tools_that_ran_at_once_may_come_in_any_order() -> None:
    assert sent(ASKED, told("b"), told("a")) == sent(ASKED, told("a"), told("b"))


def test_everything_else_is_compared_as_it_was_sent() -> None:
    assert sent(ASKED, told("a"), told("b")) != sent(ASKED, told("a", "y"), told("b"))
    assert sent(ASKED, told("a"), ASKED, told("b")) != sent(ASKED, told("b"), ASKED, told("a"))
    assert json.loads(with_sorted_results('{"input": "hi"}')) == {"input": "hi"}
