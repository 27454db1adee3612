"""When what ran in a rollout: calls, tools, rewards and states on lanes, one for each agent and as many more as ran at a time.

The invariant: spans of one lane do not overlap, and what belongs to a call is on its side of it, though agents have clocks of
their own. Tools tell when they ended; they began at the earliest when the call that asked for them had its answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning.types import UNNAMED, StepReward, StepState, ToolEvent, Transition

Kind = Literal["agent", "call", "tool", "reward", "state"]


@dataclass(frozen=True, slots=True)
class Moment:
    """Something on a lane, in seconds since the beginning. `call` is the number of the call that it is or belongs to, 0 for
    none; `status` a word that says how it went."""

    lane: int
    kind: Kind
    name: str
    begin: float
    end: float
    call: int = 0
    status: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lanes' names, and what is on them. `seconds` is how long it took from the first of it to the last."""

    lanes: tuple[str, ...]
    moments: tuple[Moment, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class _Raw:
    lane: str
    kind: Kind
    name: str
    begin: float
    end: float
    call: int = 0
    status: str = ""
    detail: str = ""


def lanes_of(
    calls: Sequence[Transition],
    events: Sequence[ToolEvent],
    rewards: Sequence[StepReward],
    states: Sequence[StepState],
    reward: float | None,
) -> Lanes:
    """The lanes of an attempt. Calls whose times are not recorded stand at the beginning."""
    raw: list[_Raw] = []
    numbers = {call.id: number for number, call in reversed(list(enumerate(calls, 1)))}
    by_id = {call.id: call for call in reversed(calls)}
    for number, call in enumerate(calls, 1):
        if call.choice:
            continue
        end = max(call.ended_at, call.started_at)
        detail = f"{len(call.prompt_ids)} + {len(call.response_ids)} tokens"
        raw.append(
            _Raw(call.caller.name, "call", f"call {number}", call.started_at, end, number, str(call.status), detail)
        )
    raw += [_tool(event, calls, by_id, numbers) for event in events]
    for given in rewards:
        behind = by_id.get(given.response_id)
        at = max(given.at, behind.ended_at) if behind else given.at
        lane = behind.caller.name if behind else _anyone(calls)
        raw.append(_Raw(lane, "reward", f"{given.name} {given.value:+g}", at, at, numbers.get(given.response_id, 0)))
    for state in states:
        behind = by_id.get(state.response_id)
        at = min(state.at or behind.started_at, behind.started_at) if behind else state.at
        lane = behind.caller.name if behind else _anyone(calls)
        raw.append(_Raw(lane, "state", state.name, at, at, numbers.get(state.response_id, 0)))
    known = [each for each in raw if each.begin > 0]
    start = min((each.begin for each in known), default=0.0)
    last = max((each.end for each in known), default=start)
    if reward is not None and calls:
        raw.append(_Raw(calls[-1].caller.name, "reward", f"reward {reward:+g}", last, last, len(calls)))
    return _laid_out(raw, start, last)


def _anyone(calls: Sequence[Transition]) -> str:
    return calls[0].caller.name if calls else UNNAMED.name


def _tool(
    event: ToolEvent, calls: Sequence[Transition], by_id: Mapping[str, Transition], numbers: Mapping[str, int]
) -> _Raw:
    asked = next((call for call in calls if event.call_id and event.call_id in call.tool_calls), None)
    behind = asked or by_id.get(event.response_id)
    begin = behind.ended_at if behind else event.at
    end = max(event.at, begin)
    who = behind.caller.name if behind else event.caller.name if event.caller else _anyone(calls)
    detail = event.error or event.output
    number = numbers.get(behind.id, 0) if behind else 0
    return _Raw(f"{who} · tools", "tool", event.name, begin, end, number, event.status, detail[:200])


def _laid_out(raw: Sequence[_Raw], start: float, last: float) -> Lanes:
    """Each thing on the first lane of its name that is free then."""
    names = list(dict.fromkeys(each.lane for each in raw))
    agents = [name for name in names if not name.endswith(" · tools")]
    ordered = [lane for name in agents for lane in (name, f"{name} · tools") if lane in names]
    ordered += [name for name in names if name not in ordered]
    free: dict[str, list[float]] = {}
    placed: list[tuple[str, int, _Raw]] = []
    for each in sorted(raw, key=lambda one: (one.begin, one.end)):
        own = free.setdefault(each.lane, [])
        if each.kind in ("reward", "state"):
            place = 0  # a moment takes no time, and overlaps nothing
            if not own:
                own.append(each.begin)
        else:
            place = next((number for number, until in enumerate(own) if until <= each.begin), len(own))
            if place == len(own):
                own.append(each.end)
            own[place] = each.end
        placed.append((each.lane, place, each))
    lanes = [(name, place) for name in ordered for place in range(len(free.get(name, ())))]
    index = {lane: number for number, lane in enumerate(lanes)}
    moments = [
        Moment(
            index[lane, place],
            each.kind,
            each.name,
            max(0.0, each.begin - start),
            max(0.0, each.end - start),
            each.call,
            each.status,
            each.detail,
        )
        for lane, place, each in placed
    ]
    titles = tuple(f"{name} ({place + 1})" if place else name for name, place in lanes)
    return Lanes(titles, tuple(moments), max(0.0, last - start))
