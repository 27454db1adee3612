"""What the record of some attempts says is wrong."""

from __future__ import annotations

from lightning.trainer.rules import Attempted, diagnose
from lightning.types import TOO_LONG, Caller, CallStatus, ToolEvent, Transition, logprobs, token_ids

WRITER = Caller("writer", ("crew", "writer"))


def call(status: CallStatus = CallStatus.OK, caller: Caller = WRITER, **fields: object) -> Transition:
    return Transition("r", 1, 0, "c", token_ids([1]), token_ids([2]), logprobs([-1.0]), caller, status=status, **fields)


def refused(error: str, code: str = "invalid_parameter") -> Transition:
    return call(CallStatus.REFUSED, finish_reason=code, error=error)


def test_refused_calls_are_one_finding_for_each_cause() -> None:
    calls = [
        refused("'n' must be at most 8, not 9."),
        refused("'n' must be at most 8, not 12."),
        refused("no", "other"),
    ]
    first, second = diagnose([Attempted(calls[:1], ()), Attempted(calls[1:], ())])
    assert first.text == "crew/writer: 2 refused calls (invalid_parameter): 'n' must be at most 8, not 9."
    assert second.text == "crew/writer: 1 refused call (other): no"
    assert first.serious
    assert first.cause != second.cause
    assert [each.cause for each in diagnose([Attempted(calls[1:2], ())])] == [first.cause], (
        "numbers make no other cause"
    )


def test_a_call_that_was_too_long_has_words_of_its_own() -> None:
    assert diagnose([Attempted([refused("no", TOO_LONG)], ())]) == []


def test_a_long_refusal_is_cut() -> None:
    (found,) = diagnose([Attempted([refused("x" * 5000)], ())])
    assert len(found.text) < 500


def test_tools_that_were_asked_for_and_never_reported() -> None:
    asked = call(tool_calls=("a", "b"))
    (found,) = diagnose([Attempted([asked], ()), Attempted([call()], ())])
    assert found.text.startswith("the model asked for 2 tool runs, and no tool run was reported")
    assert not found.serious
    assert diagnose([Attempted([asked], ()), Attempted([call()], (ToolEvent("add", "ok"),))]) == []
    assert diagnose([Attempted([call()], ())]) == []


def test_calls_without_a_name_beside_calls_with_one() -> None:
    (found,) = diagnose([Attempted([call(), call(), call(caller=Caller("agent"))], ())])
    assert found.text.startswith("1 of 3 calls have no agent's name, though others have one (crew/writer)")
    assert diagnose([Attempted([call(caller=Caller("agent"))] * 3, ())]) == [], (
        "an agent that names nothing has one agent"
    )


def test_several_models_are_listed_with_the_line_that_leaves_each_out() -> None:
    calls = [call(requested_model="big", started_at=at) for at in (1.0, 2.0)]
    judge = call(caller=Caller("judge"), requested_model="small", started_at=4.0)
    first, second = diagnose([Attempted([*calls, judge], (ToolEvent("add", "ok", at=3.0),))] * 2)
    assert first.text.startswith("4 calls asked for the model 'big': crew/writer (4). The policy answers them")
    assert "is it a judge? To leave them out of training: train_agents=['!model:small']" in second.text
    assert "judge?" not in first.text
    assert diagnose([Attempted(calls, ())]) == [], "one name is the agent's own business"


def test_a_model_that_is_asked_for_between_tools_is_no_judge() -> None:
    calls = [call(requested_model=name, started_at=at) for name, at in (("a", 1.0), ("b", 2.0), ("b", 4.0))]
    assert not any("judge" in found.text for found in diagnose([Attempted(calls, (ToolEvent("add", "ok", at=3.0),))]))


def test_an_answer_for_which_there_was_less_room() -> None:
    (found,) = diagnose([Attempted([call(max_tokens_asked=4096), call(max_tokens_asked=9), call()], ())])
    assert found.text.startswith("2 calls asked for more tokens (up to 4096) than policy_server.max_model_len leaves")
