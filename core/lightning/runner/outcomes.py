"""Turns what an agent did (returned, raised) into the outcome of its attempt, and outcomes into JSON bytes and back. Tells
failures that the model caused from those of the agent's code and the machines.

The invariant: whatever an agent returns, the outcome is well formed: finite numbers, printable text, and exactly one of reward
and fault. Both runners go through the same bytes, and bytes from a worker are only ever parsed as JSON. An attempt that the
model failed is not retried. Two sources blame the model: an adapter, which knows the exceptions of its framework
(`lightning_policy_fault`), and the record of the model calls.
"""

from __future__ import annotations

import json
import logging
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final, cast

from lightning.errors import DataError
from lightning.instrument import ActiveAttempt
from lightning.instrument.texts import CURE, number
from lightning.memory_budget import json_values
from lightning.plugins import plugins
from lightning.runner.socket_framing import LONGEST_REPLY, MOST_VALUES
from lightning.types import (
    LLM,
    TOO_LONG,
    Caller,
    CallStatus,
    Fault,
    Json,
    Outcome,
    StepReward,
    StepState,
    Task,
    ToolEvent,
    Transition,
    read_reason,
)

CAUSES: Final = {
    "max_turns": "it did not come to an end within the turns that the agent allows",
    "invented_tool": "it called a tool that does not exist",
    "malformed_output": "its answer does not have the form that the agent asked for",
    "cut_off": "its last answer was cut off at the limit of tokens",
    "context_overflow": "its conversation became longer than the context",
    "slow_generation": "the time ran out while it generated",
}
"""The faults of a policy: the word under which each is counted, and its description."""
GENERATING: Final = 0.9
"""The share of an attempt's time that its calls must have taken for a timeout to be the policy's fault."""
UNREADABLE: Final = re.compile(
    r"^[\w.]*(?:JSONDecodeError|ValidationError|Pars(?:er?|ing)(?:Error|Exception)|ValueError|SyntaxError|LengthFinishReasonError"
    r"|IncompleteOutputException)\b",
    re.MULTILINE,
)
"""Matches an error about an answer that could not be read. After an answer that was cut off, only such an error is the policy's
fault."""
DEEPEST: Final = 16
"""The most exceptions that are searched along the causes and groups of one exception."""


def cause_of(error: BaseException) -> str:
    """Return the word of `CAUSES` for an exception, an exception in its group or one that it was raised from; "" for none."""
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
    """Return the word of `CAUSES` that the model calls of a failed attempt show; "" for none."""
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
    """Return the seconds during which at least one call was under way. Calls count that were answered or ended with the
    attempt."""
    total, until = 0.0, float("-inf")
    generating = [call for call in calls if call.status.answered or call.status is CallStatus.ABORTED]
    for call in sorted(generating, key=lambda each: each.started_at):
        total += max(0.0, call.ended_at - max(until, call.started_at))
        until = max(until, call.ended_at)
    return total


def described(cause: str, error: str) -> str:
    """Return the error text of an attempt that failed by this cause; `read_cause` finds the cause in it."""
    return f"{cause} ({CAUSES[cause]}): {error}"


def read_cause(error: str) -> str:
    """Return the cause in the error of an attempt that the policy failed; `other` if another release or client wrote the
    error."""
    word = error.partition(" ")[0]
    return word if word in CAUSES else "other"


logger = logging.getLogger(__name__)

LOOPS = ("Event loop is closed", "attached to a different loop", "bound to a different event loop")
"""Parts of asyncio's errors for an object that is used on another event loop than the one in which it was made."""

ONE_LOOP = (
    "if the agent calls asyncio.run: make it `async def` and await instead. HTTP clients are kept between rollouts, by "
    "frameworks too, and belong to the event loop they began in"
)

MAX_ERROR = 4000
"""The most characters that are kept of an agent's traceback: its end, which has the cause."""
LONGEST_CAUSE = 120
"""Characters that are kept free before the traceback for the cause of a fault of the policy."""


def score(value: object) -> tuple[float, dict[str, float]]:
    """Return what an agent returned as `(reward, named parts)`.

    A dict's key `reward` is the total and the other keys are kept beside it; without that key the total is the sum of the
    parts. Raises `DataError` for a value that is no reward.
    """
    if not isinstance(value, Mapping):
        return number(value, "the agent's reward"), {}
    parts = {str(name): number(part, f"the agent's reward {name!r}") for name, part in value.items()}
    if not parts:
        raise DataError(f"the agent's reward is an empty dict: {CURE}")
    return parts["reward"] if "reward" in parts else number(
        sum(parts.values()), "the sum of the agent's rewards"
    ), parts


def returned(value: object, attempt: ActiveAttempt, seconds: float) -> Outcome:
    """Return the outcome of an agent that returned `value`; a fault of the agent if that is no reward."""
    try:
        reward, rewards = score(value)
    except DataError as error:
        return failed(Fault.AGENT, str(error), attempt, seconds)
    return Outcome(
        reward=reward,
        rewards=rewards,
        seconds=seconds,
        tool_events=attempt.tool_events,
        step_rewards=attempt.step_rewards,
        labels=attempt.labels,
        step_states=attempt.step_states,
        untrained=attempt.untrained,
    )


def raised(error: BaseException, attempt: ActiveAttempt, seconds: float) -> Outcome:
    """Return the outcome of an agent that raised: a fault, with the end of its traceback, without the API key."""
    try:
        text = "".join(traceback.format_exception(error)).rstrip()
    except Exception as broken:  # noqa: BLE001 — isolates the user's exception classes
        text = f"{type(error).__name__}, whose traceback cannot be written: {type(broken).__name__}"
    if any(words in text for words in LOOPS):
        text += f"\n({ONE_LOOP})"
    text = text.replace(attempt.llm.api_key or "\0", "<api key>")
    if cause := cause_of(error):
        return failed(Fault.POLICY, described(cause, _end(text, MAX_ERROR - LONGEST_CAUSE)), attempt, seconds)
    return failed(Fault.AGENT, text, attempt, seconds)


def failed(fault: Fault, error: str, attempt: ActiveAttempt | None = None, seconds: float = 0.0) -> Outcome:
    """Return an outcome with a fault and no reward. From `attempt` it takes what the agent has reported so far."""
    outcome = Outcome(fault=fault, error=_end(error, MAX_ERROR), seconds=seconds)
    if attempt is None:
        return outcome
    return replace(
        outcome,
        tool_events=attempt.tool_events,
        step_rewards=attempt.step_rewards,
        labels=attempt.labels,
        step_states=attempt.step_states,
        untrained=attempt.untrained,
    )


def _end(text: str, length: int) -> str:
    return text if len(text) <= length else "…" + text[-length:]


def encode_request(task: Task, llm: LLM) -> bytes:
    """Encode one attempt to run as JSON."""
    fields = {"input": task.input, "expected": task.expected, "metadata": dict(task.metadata), "id": task.id}
    call = [llm.base_url, llm.api_key, llm.model, dict(llm.prompts), llm.seed, dict(llm.extras)]
    return _dump({"task": fields, "llm": call})


def decode_request(data: bytes) -> tuple[Task, LLM]:
    """Decode the task and the `llm` of an attempt that `encode_request` encoded."""
    request = json.loads(data)
    return Task(**request["task"]), LLM(*request["llm"])


def encode_outcome(outcome: Outcome, notes: Mapping[str, Json] | None = None) -> bytes:
    """Encode an outcome as JSON of at most `LONGEST_REPLY` bytes and `MOST_VALUES` values. Text that is not Unicode is made so.

    `notes` come from stages (`AttemptStage.noted`); `notes_in` reads them. If JSON cannot express a value, or the text is too
    long, tool arguments are left out first, then everything that the agent reported; never the reward. Extras do not travel,
    because an agent's process must not speak for a plugin.
    """
    silent = Outcome(reward=outcome.reward, fault=outcome.fault, error=outcome.error, seconds=outcome.seconds)
    for candidate in (outcome, without_arguments(outcome), replace(silent, rewards=outcome.rewards)):
        data = _try_dump(candidate, notes)
        if data is not None and len(data) <= LONGEST_REPLY and json_values(data) <= MOST_VALUES:
            break
    else:
        candidate, data = silent, _dump(asdict(silent))
    if candidate is not outcome:
        kept = "the reward alone" if candidate is silent else "the reward and what it is made of"
        kept = "everything but tool arguments and results" if candidate.tool_events else kept
        logger.warning("not all that an agent reported can be sent: keeping %s", kept)
    return data


def without_arguments(outcome: Outcome) -> Outcome:
    """Return the outcome without the arguments and the results of its tool events, which may be of any length."""
    events = tuple(
        replace(event, arguments=None, result="", incomplete=event.incomplete or bool(event.result))
        for event in outcome.tool_events
    )
    return replace(outcome, tool_events=events)


def sanitized(outcome: Outcome) -> Outcome:
    """Return the outcome as it would arrive from another process; a fault of the agent if it could not arrive."""
    try:
        return decode_outcome(encode_outcome(outcome))
    except ValueError as error:
        return failed(Fault.AGENT, f"what the agent reported cannot be used: {error}", seconds=outcome.seconds)


def decode_outcome(data: bytes) -> Outcome:
    """The inverse of `encode_outcome`. Raises `ValueError` for anything that is not a well-formed outcome."""
    try:
        fields = cast("dict[str, Any]", json.loads(data))
        outcome = Outcome(
            reward=None if fields["reward"] is None else number(fields["reward"], "the reward"),
            rewards={str(name): number(part, name) for name, part in fields["rewards"].items()},
            fault=None if fields["fault"] is None else Fault(fields["fault"]),
            error=str(fields["error"]),
            seconds=float(fields["seconds"]),
            tool_events=tuple(read_tool_event(event) for event in fields["tool_events"]),
            step_rewards=tuple(
                StepReward(
                    number(step["value"], "a step reward"),
                    str(step["name"]),
                    str(step["response_id"]),
                    float(step["at"]),
                )
                for step in fields["step_rewards"]
            ),
            labels={str(response): _caller(caller) for response, caller in fields["labels"].items()},
            step_states=tuple(
                StepState(
                    cast("Json", state["values"]), str(state["name"]), str(state["response_id"]), float(state["at"])
                )
                for state in fields["step_states"]
            ),
            untrained={str(call): read_reason(reason, "a reason") for call, reason in fields["untrained"].items()},
        )
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not an outcome: {error!r}") from error
    if (outcome.reward is None) == (outcome.fault is None):
        raise ValueError("not an outcome: exactly one of reward and fault must be set")
    return outcome


def read_tool_event(fields: dict[str, Any]) -> ToolEvent:
    """Read a tool event from its JSON fields. Raises `KeyError`, `TypeError` or `AttributeError` for fields of anything
    else."""
    caller = fields["caller"]
    return ToolEvent(
        name=str(fields["name"]),
        status=str(fields["status"]),
        call_id=str(fields["call_id"]),
        arguments=cast("Json", fields["arguments"]),
        output=str(fields["output"]),
        error=str(fields["error"]),
        caller=None if caller is None else _caller(caller),
        at=float(fields["at"]),
        response_id=str(fields["response_id"]),
        result=str(fields["result"]),
        incomplete=bool(fields["incomplete"]),
        kind=str(fields["kind"]),
    )


def _caller(fields: dict[str, Any]) -> Caller:
    names = ("agent", "span_id", "parent_id", "framework")
    text = {name: str(fields[name]) for name in names}
    return Caller(**text, path=tuple(str(name) for name in fields["path"]))


def notes_in(data: bytes) -> dict[str, Json]:
    """Return the notes of stages in an encoded outcome, by the stages' names."""
    if b'"notes": {' not in data:  # nearly always, and the outcome is parsed already
        return {}
    found = json.loads(data).get("notes")
    return found if isinstance(found, dict) else {}


def _try_dump(outcome: Outcome, notes: Mapping[str, Json] | None) -> bytes | None:
    try:
        return _dump({**asdict(outcome), "notes": notes} if notes else asdict(outcome))
    except Exception:  # noqa: BLE001 — isolates the user's objects, which may be anywhere in an adapter's event
        return None


def _dump(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, default=repr).encode("utf-8", "replace")
