"""What the model itself did wrong is told apart from the agent's code and the machines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.instrument import ActiveAttempt, by_type
from lightning.runner.attempt_completion import judge
from lightning.runner.outcomes import CAUSES, cause_of, generating_seconds, raised, read_cause
from lightning.types import (
    LLM,
    TOO_LONG,
    CallStatus,
    Fault,
    Outcome,
    Transition,
    logprobs,
    token_ids,
)


def call(seq: int = 0, started: float = 0.0, ended: float = 1.0, **fields: object) -> Transition:
    ids = {"prompt_ids": token_ids([1]), "response_ids": token_ids([2]), "logprobs": logprobs([-1.0])}
    return Transition("r", 1, seq, f"c{seq}", **ids, started_at=started, ended_at=ended, **fields)  # type: ignore[arg-type]


class LengthFinishReasonError(Exception):
    """Stands for the OpenAI client's."""


LengthFinishReasonError.__module__ = "openai._exceptions"


def raised_from() -> Exception:
    try:
        try:
            raise LengthFinishReasonError("cut")
        except LengthFinishReasonError as error:
            raise ValueError("no answer") from error
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (LengthFinishReasonError("cut"), "cut_off"),
        (raised_from(), "cut_off"),
        (ExceptionGroup("several", [KeyError("x"), LengthFinishReasonError("cut")]), "cut_off"),
        (KeyError("x"), ""),
    ],
)
def test_an_exception_is_asked_about_with_all_that_is_behind_it(error: Exception, cause: str) -> None:
    assert cause_of(error) == cause
    outcome = raised(error, ActiveAttempt(LLM("http://localhost", "key", "policy")), 1.0)
    assert outcome.fault is (Fault.POLICY if cause else Fault.AGENT)
    assert not cause or (
        outcome.error.startswith(f"cut_off ({CAUSES['cut_off']}): ") and read_cause(outcome.error) == cause
    )


def test_a_type_is_known_by_its_package_and_class_and_by_what_it_is_derived_from() -> None:
    class MineError(LengthFinishReasonError):
        pass

    assert by_type(MineError(), {"openai.LengthFinishReasonError": "yes"}) == "yes"
    assert by_type(KeyError(), {"builtins.LookupError": "yes"}) == "yes"
    assert by_type(KeyError(), {"openai.KeyError": "no"}) is None


AGENT = Outcome(fault=Fault.AGENT, error="ValueError: no JSON", seconds=10.0)
LATE = Outcome(fault=Fault.TIMEOUT, error="over 10 s", seconds=10.0)
REFUSED = {"status": CallStatus.REFUSED, "finish_reason": TOO_LONG}


@pytest.mark.parametrize(
    ("outcome", "calls", "cause"),
    [
        (AGENT, [call(0), call(1, finish_reason="length")], "cut_off"),
        (AGENT, [call(0, finish_reason="length"), call(1, finish_reason="stop")], ""),
        (replace(AGENT, error="ConnectionError: the grader is away"), [call(0, finish_reason="length")], ""),
        (AGENT, [call(0), call(1, **REFUSED)], "context_overflow"),
        (AGENT, [call(0, **REFUSED)], ""),
        (LATE, [call(0, 0.0, 5.0), call(1, 4.0, 9.1, status=CallStatus.ABORTED)], "slow_generation"),
        (LATE, [call(0, 0.0, 5.0), call(1, 0.0, 5.0)], ""),
        (LATE, [call(0, 0.0, 1.0), call(1, 1.0, 9.9, status=CallStatus.REFUSED)], ""),
        (LATE, [], ""),
    ],
)
def test_the_record_says_what_the_policy_did(outcome: Outcome, calls: list[Transition], cause: str) -> None:
    found = judge(outcome, calls)
    assert found.fault is (Fault.POLICY if cause else outcome.fault)
    assert read_cause(found.error) == (cause or "other")
    assert found.error.endswith(outcome.error)


def test_what_failed_at_the_policy_server_is_nobody_elses_fault() -> None:
    outcome = Outcome(fault=Fault.POLICY, error="max_turns (...): no end")
    assert judge(outcome, [call(0), call(1, status=CallStatus.ERROR)]).fault is Fault.INFRASTRUCTURE


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12))
def test_calls_that_run_side_by_side_count_once(spans: list[tuple[int, int]]) -> None:
    calls = [call(seq, float(start), float(start + length)) for seq, (start, length) in enumerate(spans)]
    covered = {second for start, length in spans for second in range(start, start + length)}
    assert generating_seconds(calls) == len(covered)
