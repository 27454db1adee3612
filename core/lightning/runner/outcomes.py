"""From what an agent did (returned, raised) to the outcome of its attempt, and outcomes as JSON bytes.

The invariant: whatever an agent returns, the outcome is well formed: finite numbers, printable text, and exactly one of
reward and fault. Both runners go through the same bytes, and bytes from a worker are only ever parsed as JSON.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, cast

from lightning.errors import DataError
from lightning.instrument import Session
from lightning.types import LLM, Caller, Fault, Json, Outcome, StepReward, Task, ToolEvent

MAX_FLOAT32 = 3.4028234663852886e38
"""Rewards are trained as float32."""
MAX_ERROR = 4000
"""Characters kept of an agent's traceback: its end, where the cause is."""

CURE = "return the reward as a finite number, or as a dict of them such as {'reward': 1.0, 'format': 0.5}"


def number(value: object, what: str) -> float:
    """A Python, numpy or 0-d tensor number as a float. Raises `DataError` for anything else, NaN and infinity."""
    if isinstance(value, str | bytes | bytearray) or not hasattr(value, "__float__"):
        raise DataError(f"{what} is {_short(value)}, not a number: {CURE}")
    try:
        result = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise DataError(f"{what} is {_short(value)}, not a number ({error}): {CURE}") from error
    if not abs(result) <= MAX_FLOAT32:
        raise DataError(f"{what} is {result}, which cannot be trained on: {CURE}")
    return result


def score(value: object) -> tuple[float, dict[str, float]]:
    """What an agent returned as `(reward, named parts)`.

    A dict's key `reward` is the total and the other keys are kept beside it; without that key the total is the sum of
    the parts. Raises `DataError` when it is no reward.
    """
    if not isinstance(value, Mapping):
        return number(value, "the agent's reward"), {}
    parts = {str(name): number(part, f"the agent's reward {name!r}") for name, part in value.items()}
    if not parts:
        raise DataError(f"the agent's reward is an empty dict: {CURE}")
    return parts["reward"] if "reward" in parts else number(
        sum(parts.values()), "the sum of the agent's rewards"
    ), parts


def returned(value: object, session: Session, seconds: float) -> Outcome:
    """The outcome of an agent that returned."""
    try:
        reward, rewards = score(value)
    except DataError as error:
        return failed(Fault.AGENT, str(error), session, seconds)
    return Outcome(
        reward=reward,
        rewards=rewards,
        seconds=seconds,
        tool_events=session.tool_events,
        step_rewards=session.step_rewards,
        labels=session.labels,
    )


def raised(error: BaseException, session: Session, seconds: float) -> Outcome:
    """The outcome of an agent that raised: the end of its traceback, without the API key."""
    lines = traceback.format_exception(error)
    text = "".join(lines).rstrip().replace(session.llm.api_key or "\0", "<api key>")
    return failed(Fault.AGENT, text, session, seconds)


def failed(fault: Fault, error: str, session: Session | None = None, seconds: float = 0.0) -> Outcome:
    """An outcome without a reward."""
    text = error if len(error) <= MAX_ERROR else "…" + error[-MAX_ERROR:]
    outcome = Outcome(fault=fault, error=text, seconds=seconds)
    if session is None:
        return outcome
    return replace(outcome, tool_events=session.tool_events, step_rewards=session.step_rewards, labels=session.labels)


def encode_request(task: Task, llm: LLM) -> bytes:
    """One attempt to run, as JSON."""
    fields = {"input": task.input, "expected": task.expected, "metadata": dict(task.metadata), "id": task.id}
    return _dump({"task": fields, "llm": [llm.base_url, llm.api_key, llm.model]})


def decode_request(data: bytes) -> tuple[Task, LLM]:
    """The inverse of `encode_request`."""
    request = json.loads(data)
    return Task(**request["task"]), LLM(*request["llm"])


def encode_outcome(outcome: Outcome) -> bytes:
    """An outcome as JSON. Text that is not Unicode is made so; tool arguments that JSON cannot say are left out."""
    try:
        return _dump(asdict(outcome))
    except (TypeError, ValueError, RecursionError):
        bare = tuple(replace(event, arguments=None) for event in outcome.tool_events)
        return _dump(asdict(replace(outcome, tool_events=bare)))


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
            tool_events=tuple(_tool_event(event) for event in fields["tool_events"]),
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
        )
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not an outcome: {error!r}") from error
    if (outcome.reward is None) == (outcome.fault is None):
        raise ValueError("not an outcome: exactly one of reward and fault must be set")
    return outcome


def _tool_event(fields: dict[str, Any]) -> ToolEvent:
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
    )


def _caller(fields: dict[str, Any]) -> Caller:
    names = ("agent", "span_id", "parent_id", "framework")
    text = {name: str(fields[name]) for name in names}
    return Caller(**text, path=tuple(str(name) for name in fields["path"]))


def _dump(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, default=repr).encode("utf-8", "replace")


def _short(value: object) -> str:
    text = f"{type(value).__name__} {value!r}" if value is not None else "None"
    return text if len(text) <= 200 else text[:199] + "…"
