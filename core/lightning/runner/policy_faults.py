"""What the model itself did wrong, so that an attempt came to no reward: told apart from the agent's code and the machines.

The invariant: an attempt that failed so is not made again. What says so is an adapter, which knows the exceptions of its
framework (`lightning_policy_fault`), or the record of the model calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from lightning.plugins import plugins
from lightning.types import TOO_LONG, CallStatus, Fault, Outcome, Transition

CAUSES: Final = {
    "max_turns": "it did not come to an end within the turns that the agent allows",
    "invented_tool": "it called a tool that there is not",
    "malformed_output": "its answer has not the form that the agent asked for",
    "cut_off": "its last answer was cut off at the limit of tokens",
    "context_overflow": "its conversation became longer than the context",
    "slow_generation": "the time was over while it generated",
}
"""What a policy can do wrong, by the word that is counted."""
GENERATING: Final = 0.9
"""The share of an attempt's time from which on a timeout is the policy's own: neither tools nor the agent's code took it."""
UNREADABLE: Final = re.compile(
    r"^[\w.]*(?:JSONDecodeError|ValidationError|Pars(?:er?|ing)(?:Error|Exception)|ValueError|SyntaxError|LengthFinishReasonError"
    r"|IncompleteOutputException)\b",
    re.MULTILINE,
)
"""In an error: an answer could not be read. Any other error after an answer that was cut off is not known to come of that."""
DEEPEST: Final = 16
"""Exceptions behind one another that are looked at."""


def cause_of(error: BaseException) -> str:
    """Which of `CAUSES` an exception tells of, or what it was raised from or groups; empty for any other."""
    for each in _chain(error):
        found = plugins().hook.lightning_policy_fault(error=each)
        if found in CAUSES:
            return str(found)
    return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    waiting, seen = [error], 0
    while waiting and seen < DEEPEST:
        seen += 1
        found = waiting.pop(0)
        yield found
        waiting += found.exceptions if isinstance(found, BaseExceptionGroup) else ()
        waiting += [found.__cause__] if found.__cause__ is not None else []


def cause_in_record(outcome: Outcome, calls: Sequence[Transition]) -> str:
    """Which of `CAUSES` the model calls of an attempt tell of that has failed; empty for none."""
    answered = [call for call in calls if call.status.answered]
    if outcome.fault is Fault.TIMEOUT:
        slow = outcome.seconds > 0 and generating_seconds(calls) >= GENERATING * outcome.seconds
        return "slow_generation" if slow else ""
    if outcome.fault is not Fault.AGENT or not answered:
        return ""
    last = max(calls, key=lambda call: call.seq)
    if last.status is CallStatus.REFUSED and last.finish_reason == TOO_LONG:
        return "context_overflow"
    return "cut_off" if last.finish_reason == "length" and UNREADABLE.search(outcome.error) else ""


def generating_seconds(calls: Sequence[Transition]) -> float:
    """How long at least one call was under way that was answered, or ended with the attempt."""
    total, until = 0.0, float("-inf")
    generating = [call for call in calls if call.status.answered or call.status is CallStatus.ABORTED]
    for call in sorted(generating, key=lambda each: each.started_at):
        total += max(0.0, call.ended_at - max(until, call.started_at))
        until = max(until, call.ended_at)
    return total


def described(cause: str, error: str) -> str:
    """The error of an attempt that failed so; `read_cause` finds the cause in it."""
    return f"{cause} ({CAUSES[cause]}): {error}"


def read_cause(error: str) -> str:
    """The cause in the error of an attempt that the policy failed; `other` for one that another release or client wrote."""
    word = error.partition(" ")[0]
    return word if word in CAUSES else "other"
