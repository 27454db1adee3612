"""What each rollout did at each moment: calls, tools, its own code; and who had a moment that several share.

The invariant: intervals of one rollout come from recorded times alone. How a call's time divides into queue, prefill and
decode is not recorded by vLLM's API: the queue is counted where `--max-num-seqs` says how many calls run at once, and the
rest is divided as the planner's fit of all calls says.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from lightning.batch import is_trained
from lightning.errors import DataError
from lightning.store.protocol import Store
from lightning.trainer.training_data import is_trainable
from lightning.types import Json, Rollout
from lightning_planner.calibration import Calibration, calibrate
from lightning_planner.costs import ServerCosts
from lightning_planner.recorded import CHUNK, Recorded, RecordedCall, RecordedRollout

CALL = ("queue", "prefill", "decode")
"""States in which the policy server has something to do."""
NO_WORSE = 1.25
"""What a call costs is taken not to depend on the load where that leaves no more than so many times the error."""
MAX_CALLS = "--max-num-seqs"


@dataclass(frozen=True, slots=True)
class Interval:
    """A state, from `begin` to `end` in Unix seconds."""

    state: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Activity:
    """A rollout that made calls. `tools` are seconds by tool; `asked` says that the model called tools; `prompt` and `response`
    are tokens of all its calls, `trainable` those answered to agents that are trained; `gaps` is, for each call and then for
    what came after the last one, the share of the time before it that was a tool's."""

    rollout: str
    start: float
    end: float
    intervals: tuple[Interval, ...]
    tools: Mapping[str, float]
    gaps: tuple[float, ...]
    asked: bool
    prompt: int
    response: int
    recorded: RecordedRollout
    trainable: int = 0


async def activities(store: Store, rollouts: Sequence[Rollout], recorded: Recorded) -> list[Activity]:
    """What these rollouts did, without those that made no call."""
    timed: defaultdict[tuple[float, ...], list[RecordedRollout]] = defaultdict(list)
    for one in recorded.rollouts:
        timed[_when((call.started, call.ended) for call in one.calls)].append(one)
    costs = _server_costs(recorded)
    queued = admitted(recorded)
    named = recorded.config.get("train_agents")
    agents = [str(item) for item in named] if isinstance(named, list | tuple) else []
    found = []
    for at in range(0, len(rollouts), CHUNK):
        some = [(rollout.id, rollout.attempt) for rollout in rollouts[at : at + CHUNK]]
        calls = await store.transitions_of(some)
        attempts = await store.attempts_of(list(some))
        for (name, _), own, attempt in zip(some, calls, attempts, strict=True):
            when = _when((call.started_at, call.ended_at) for call in own if call.status.answered)
            if when and timed[when]:
                events = sorted((event.at, event.name) for event in attempt.tool_events if event.at)
                of_trained = sum(
                    len(call.response_ids)
                    for call in own
                    if is_trained(call, is_trainable(call.caller, agents, call.requested_model))
                )
                made = _activity(name, timed[when].pop(), events, costs, queued)
                found.append(replace(made, trainable=of_trained))
    return found


def _when(calls: Iterable[tuple[float, float]]) -> tuple[float, ...]:
    """What tells the calls of one rollout from those of others; where it does not, they took the same time."""
    return tuple(at for call in sorted(calls) for at in call)


def max_calls(recorded: Recorded) -> int | None:
    """How many calls vLLM runs at once, where its arguments say so."""
    args = policy_args(recorded)
    for place, argument in enumerate(args):
        name, _, value = argument.partition("=")
        if name == MAX_CALLS:
            value = value or (args[place + 1] if place + 1 < len(args) else "")
            return int(value) if value.isdecimal() and int(value) else None
    return None


def policy_args(recorded: Recorded) -> list[str]:
    """`policy_server.args` of the run."""
    value: Json = recorded.config.get("config")
    for key in ("policy_server", "args"):
        value = value.get(key) if isinstance(value, Mapping) else None
    return [str(item) for item in value] if isinstance(value, list) else []


def admitted(recorded: Recorded) -> dict[tuple[float, float], float]:
    """When each call left vLLM's queue, by its recorded times; empty where the size of vLLM's batch is not known."""
    most = max_calls(recorded)
    if most is None:
        return {}
    running: list[float] = []
    found = {}
    for call in sorted((call for one in recorded.rollouts for call in one.calls), key=_came):
        while running and running[0] <= call.started:
            heapq.heappop(running)
        begin = call.started
        while len(running) >= most:
            begin = max(begin, heapq.heappop(running))
        begin = min(begin, call.ended)
        heapq.heappush(running, call.ended)
        found[call.started, call.ended] = begin
    return found


def _came(call: RecordedCall) -> tuple[float, float]:
    return call.started, call.ended


def _server_costs(recorded: Recorded) -> ServerCosts | None:
    try:
        return server_costs(recorded, calibrate(recorded))
    except DataError:  # no call has tokens: a call is then one state
        return None


def server_costs(recorded: Recorded, calibration: Calibration) -> ServerCosts:
    """What calls cost; where vLLM's batch is known to be limited, without the time that calls waited for a place.

    Calls that take no longer the more of them run at once are taken to go on so: where load explains nothing, the planner's fit
    may still blame it, and a change of the load would be wrong by that.
    """
    most, begins = max_calls(recorded), admitted(recorded)
    alone = each_call(
        recorded, lambda call: replace(call, started=begins.get((call.started, call.ended), call.started))
    )
    loaded = calibration if most is None else calibrate(alone)
    calls = [call for one in alone.rollouts for call in one.calls]
    seconds = np.array([call.ended - call.started for call in calls])
    table = np.array([(1.0, call.response) for call in calls])
    latency, token = np.linalg.lstsq(table, seconds, rcond=None)[0]
    if min(latency, token) < 0.0:
        latency, token = (0.0, seconds.sum() / table[:, 1].sum()) if latency < 0.0 else (seconds.mean(), 0.0)
    unexplained = float(np.var(seconds - table @ (latency, token)))
    server = loaded.costs.server
    rounding = 1e-9 * float(seconds.mean()) ** 2
    if unexplained <= NO_WORSE * (1.0 - loaded.fit) * float(np.var(seconds)) + rounding:
        server = ServerCosts(token=float(token), latency=float(latency))
    return server if most is None else replace(server, max_calls=most)


def each_call(recorded: Recorded, change: Callable[[RecordedCall], RecordedCall]) -> Recorded:
    """The run with each of its calls changed."""
    groups = tuple(
        replace(
            group,
            rollouts=tuple(replace(one, calls=tuple(change(call) for call in one.calls)) for one in group.rollouts),
        )
        for group in recorded.groups
    )
    return replace(recorded, groups=groups)


def _activity(
    name: str,
    one: RecordedRollout,
    events: Sequence[tuple[float, str]],
    costs: ServerCosts | None,
    queued: Mapping[tuple[float, float], float],
) -> Activity:
    intervals: list[Interval] = []
    tools: defaultdict[str, float] = defaultdict(float)
    gaps = []
    last = max(call.ended for call in one.calls)
    between = [(call.ready, call.started, call.tools) for call in one.calls] + [(last, one.end, 0)]
    for begin, end, asked in between:
        share = 0.0
        for at, tool in ((at, tool) for at, tool in events if begin <= at <= end):
            done = begin + share
            tools[tool] += max(0.0, at - done)
            share = max(share, at - begin)
        if asked and not events:
            share = max(0.0, end - begin)
        if share:
            intervals.append(Interval("tools", begin, begin + share))
        if end > begin + share:
            intervals.append(Interval("agent_code", begin + share, end))
        gaps.append(share / (end - begin) if end > begin else 0.0)
    for call in one.calls:
        intervals += _of_call(call, costs, queued.get((call.started, call.ended), call.started))
    return Activity(
        rollout=name,
        start=one.start,
        end=one.end,
        intervals=tuple(intervals),
        tools=dict(tools),
        gaps=tuple(gaps),
        asked=any(call.tools for call in one.calls),
        prompt=sum(call.prompt for call in one.calls),
        response=sum(call.response for call in one.calls),
        recorded=one,
    )


def _of_call(call: RecordedCall, costs: ServerCosts | None, begin: float) -> list[Interval]:
    prompt = costs.latency + costs.request + costs.prompt_token * call.fresh if costs else 0.0
    decode = (costs.token + costs.token_per_call) * call.response if costs else 1.0
    middle = begin + (call.ended - begin) * (prompt / (prompt + decode) if prompt + decode else 0.0)
    found = [
        Interval("queue", call.started, begin),
        Interval("prefill", begin, middle),
        Interval("decode", middle, call.ended),
    ]
    return [interval for interval in found if interval.end > interval.begin]


def share_out(
    intervals: Sequence[Interval], windows: Sequence[tuple[float, float]]
) -> tuple[Mapping[str, float], float]:
    """Seconds of the windows by state, and those in which the policy server had no call. A moment with several intervals is
    divided equally; one without any is nobody's."""
    changes: list[tuple[float, int, str]] = []
    for interval in intervals:
        if interval.end > interval.begin:
            changes += [(interval.begin, 1, interval.state), (interval.end, -1, interval.state)]
    for begin, end in windows:
        changes += [(begin, 1, ""), (end, -1, "")]
    shares: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    served = waited = before = 0.0
    for at, change, state in sorted(changes):
        if counts[""] and at > before:
            waited += at - before
            working = sum(counts.values()) - counts[""]
            if any(counts[name] for name in CALL):
                served += at - before
            for name, count in counts.items():
                if name and count:
                    shares[name] += (at - before) * count / working
        counts[state] += change
        before = at
    return shares, waited - served
