"""JSON text for what is nested inside a noun, and back: callers, tool events, step rewards and states, labels.

The invariant: what is read back equals what was written (tuples of JSON become lists), and text survives whatever an agent put
into it, because it is escaped to ASCII.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from lightning.errors import DataError, StoreError
from lightning.types import POLICY, Caller, Json, StepReward, StepState, ToolEvent, VersionRun

_encode = json.JSONEncoder(separators=(",", ":")).encode


def dump(value: Json, what: str = "a value") -> str:
    """Compact ASCII JSON. Raises `DataError` naming `what` when the value is not JSON."""
    try:
        return _encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{what} is not JSON ({error}): use only None, bool, numbers, text, lists and dicts") from error


def load(text: str, what: str = "a value") -> Json:
    """Parse what `dump` wrote. Raises `StoreError` naming `what` when the stored text was damaged."""
    try:
        value: Json = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"{what} is corrupt in the database: {error}. Restore the database from a backup") from error
    return value


def as_list(text: str, what: str) -> list[Any]:
    """`load` of a list. Raises `StoreError` for anything else."""
    value = load(text, what)
    if not isinstance(value, list):
        raise StoreError(f"{what} is corrupt in the database: expected a list. Restore the database from a backup")
    return value


def as_mapping(text: str, what: str) -> Mapping[str, Any]:
    """`load` of an object. Raises `StoreError` for anything else."""
    value = load(text, what)
    if not isinstance(value, dict):
        raise StoreError(f"{what} is corrupt in the database: expected an object. Restore the database from a backup")
    return value


def plain_text(text: str) -> str:
    """Text that any database takes: lone surrogates and NUL, which agents' error messages may hold, are escaped."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def finite(value: float, what: str) -> float:
    """`value` as a float. Raises `DataError` when it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{what} is {value!r}: it must be a finite number")
    return float(value)


def plain_json(value: object) -> object:
    """A value as the standard library writes it where orjson refuses: a number that JSON does not have is null here, too."""
    if isinstance(value, array):
        return plain_json(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item) for item in value]
    return value


def caller_to_json(caller: Caller) -> Json:
    """`[agent, path, span, parent, framework]` without the empty tail: most calls have only an agent."""
    parts: list[Json] = [caller.agent, list(caller.path), caller.span_id, caller.parent_id, caller.framework]
    while len(parts) > 1 and not parts[-1]:
        parts.pop()
    return parts


def caller_from_text(text: str) -> Caller:
    """The caller of a transition, from the text of `caller_to_json`."""
    return _caller_from_json(as_list(text, "the caller of a transition"))


def _caller_from_json(parts: Sequence[Any]) -> Caller:
    agent, *rest = parts
    path, *names = rest or [()]
    return Caller(agent, tuple(path), *names)


def tool_events_to_text(events: Sequence[ToolEvent]) -> str:
    """All tool events of an attempt. One without a response id reads as it did before events had any."""
    rows: list[Json] = [
        [
            event.name,
            event.status,
            event.call_id,
            event.arguments,
            event.output,
            event.error,
            None if event.caller is None else caller_to_json(event.caller),
            event.at,
            *_later(event),
        ]
        for event in events
    ]
    return dump(rows, "a tool event")


def _later(event: ToolEvent) -> list[Json]:
    """What came after an event's first fields, without the empty tail."""
    parts: list[Json] = [event.response_id, event.result, event.incomplete, event.kind]
    while parts and not parts[-1]:
        parts.pop()
    return parts


def tool_events_from_text(text: str) -> list[ToolEvent]:
    """What `tool_events_to_text` wrote."""
    return [
        ToolEvent(
            name,
            status,
            call_id,
            arguments,
            output,
            error,
            None if caller is None else _caller_from_json(caller),
            at,
            *later,
        )
        for name, status, call_id, arguments, output, error, caller, at, *later in as_list(
            text, "the tool events of an attempt"
        )
    ]


def step_rewards_to_text(rewards: Sequence[StepReward]) -> str:
    """All step rewards of an attempt. Raises `DataError` for a NaN or infinite value."""
    return dump(
        [[finite(r.value, f"step reward {r.name!r}"), r.name, r.response_id, r.at] for r in rewards], "a step reward"
    )


def step_rewards_from_text(text: str) -> list[StepReward]:
    """What `step_rewards_to_text` wrote."""
    return [StepReward(*row) for row in as_list(text, "the step rewards of an attempt")]


def step_states_to_text(states: Sequence[StepState]) -> str:
    """All states of an attempt."""
    return dump([[state.values, state.name, state.response_id, state.at] for state in states], "a state")


def step_states_from_text(text: str) -> list[StepState]:
    """What `step_states_to_text` wrote."""
    return [StepState(*row) for row in as_list(text, "the states of an attempt")]


def labels_to_text(labels: Mapping[str, Caller]) -> str:
    """All labels of an attempt, in the order of their response ids: who said them in which order does not matter."""
    return dump({response: caller_to_json(labels[response]) for response in sorted(labels)}, "a label")


def labels_from_text(text: str) -> dict[str, Caller]:
    """What `labels_to_text` wrote."""
    found = as_mapping(text, "the labels of an attempt")
    return {response: _caller_from_json(parts) for response, parts in found.items()}


@lru_cache(maxsize=256)
def versions_to_text(versions: tuple[VersionRun, ...]) -> str:
    """Which version of which policy sampled from which response token on. The name `POLICY` is left out: most have it."""
    return dump(
        [[v.start, v.version, *([] if v.policy == POLICY else [v.policy])] for v in versions], "a policy version"
    )


@lru_cache(maxsize=256)
def versions_from_text(text: str) -> tuple[VersionRun, ...]:
    """What `versions_to_text` wrote."""
    return tuple(VersionRun(*row) for row in as_list(text, "the policy versions of a transition"))
