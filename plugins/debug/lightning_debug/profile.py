"""Profile how a run spent its wall time and tokens, from its store.

The invariant: the parts of the time always add up to the wall time of the profiled steps; time without any recorded cause is
the part `idle`. While a step waits for rollouts, each moment is divided equally among the states of the rollouts that run then.
So a part says what the step waited for, not how long agents did it in sum.

Intervals of one rollout come from recorded times alone. vLLM's API does not record how a call's time divides into queue,
prefill and decode: the queue is derived if `--max-num-seqs` says how many calls run at once, and the rest is divided by the
planner's fit of all calls.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

import numpy as np
from lightning.batch import is_trained
from lightning.errors import ConfigError, DataError
from lightning.store.protocol import MetricPoint, Store
from lightning.trainer.context import PolicyFault
from lightning.trainer.plan import TRAIN
from lightning.trainer.training_data import all_rollouts, is_of_interest
from lightning.types import Fault, Rollout, Status, StepRecord, by_key
from lightning_planner.calibration import Calibration, calibrate
from lightning_planner.costs import ServerCosts
from lightning_planner.recorded import (
    CHUNK,
    Recorded,
    RecordedCall,
    RecordedRollout,
    read_run,
    recorded_config,
    strings,
)

CALL = ("queue", "prefill", "decode")
"""States of a rollout in which a call is at the policy server."""
NO_WORSE = 1.25
"""A call's cost is assumed not to depend on the load if the error of that model is at most this many times the other's."""
MAX_CALLS = "--max-num-seqs"


@dataclass(frozen=True, slots=True)
class Interval:
    """The time from `begin` to `end` (Unix seconds) that a rollout was in one state."""

    state: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Activity:
    """How a rollout that made calls spent its time. `tools` are seconds by tool; `asked` says that the model called tools.
    `prompt` and `response` count the tokens of all its calls, `trainable` the answered tokens that can be trained on. `gaps`
    has, for each call, the share of tools in the time before it, and last that share in the time after the last call."""

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
    """Return how these rollouts spent their time; rollouts without a call are left out."""
    timed: defaultdict[tuple[float, ...], list[RecordedRollout]] = defaultdict(list)
    for one in recorded.rollouts:
        timed[_when((call.started, call.ended) for call in one.calls)].append(one)
    costs = _server_costs(recorded)
    queued = admitted(recorded)
    agents = strings(recorded.config.get("train_agents"))
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
                    len(call.response_ids) for call in own if is_trained(call, is_of_interest(call, agents))
                )
                made = _activity(name, timed[when].pop(), events, costs, queued)
                found.append(replace(made, trainable=of_trained))
    return found


def _when(calls: Iterable[tuple[float, float]]) -> tuple[float, ...]:
    """Return the start and end times of a rollout's calls, as a key that identifies the rollout. Rollouts with equal keys took
    the same time, so that mixing them up does no harm."""
    return tuple(at for call in sorted(calls) for at in call)


def max_calls(recorded: Recorded) -> int | None:
    """Return how many calls vLLM runs at once by its arguments; None if they do not say."""
    args = policy_args(recorded)
    for place, argument in enumerate(args):
        name, _, value = argument.partition("=")
        if name == MAX_CALLS:
            value = value or (args[place + 1] if place + 1 < len(args) else "")
            return int(value) if value.isdecimal() and int(value) else None
    return None


def policy_args(recorded: Recorded) -> list[str]:
    """Return the setting `policy_server.args` of the run."""
    return list(recorded_config(recorded.config).policy_server.args)


def admitted(recorded: Recorded) -> dict[tuple[float, float], float]:
    """Return when each call left vLLM's queue (Unix seconds), by its (start, end); empty if the limit of vLLM's batch is not
    known."""
    most = max_calls(recorded)
    if most is None:
        return {}
    running: list[float] = []
    found = {}
    for call in sorted((call for one in recorded.rollouts for call in one.calls), key=attrgetter("started", "ended")):
        while running and running[0] <= call.started:
            heapq.heappop(running)
        begin = call.started
        while len(running) >= most:
            begin = max(begin, heapq.heappop(running))
        begin = min(begin, call.ended)
        heapq.heappush(running, call.ended)
        found[call.started, call.ended] = begin
    return found


def _server_costs(recorded: Recorded) -> ServerCosts | None:
    try:
        return server_costs(recorded, calibrate(recorded))
    except DataError:  # no call has tokens: a call is then one state
        return None


def server_costs(recorded: Recorded, calibration: Calibration) -> ServerCosts:
    """Estimate the cost of calls. If the limit of vLLM's batch is known, the time that calls waited in the queue is left out.

    If the load explains the times hardly better than a fixed cost for each call and token, the fixed costs are returned: the
    planner's fit might blame the load by chance, and a simulated change of the load would then be wrong.
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
    """Return the recorded run with `change` applied to each of its calls."""
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
    """Return the seconds within the windows by state, and the seconds in which the policy server had no call. A moment with
    several intervals is divided equally among them; one without any counts for no state."""
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


ROLLOUT_PARTS = ("queue", "prefill", "decode", "tools", "agent_code", "agent_start")
"""The parts of the time in which a step waits for rollouts."""
PHASES = {"train": "training", "update": "update", "checkpoint": "checkpoint", "eval": "evaluation", "start": "start"}
"""The other parts of a step, by the name of the trainer's phase that measured each."""
PARTS = (*ROLLOUT_PARTS, *PHASES.values(), "idle")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of one step: `wall` seconds from the end of the step before to its own end, `seconds` of each phase that the
    trainer measured, and when it `waited` for rollouts, as (begin, end) in Unix seconds."""

    step: int
    wall: float
    seconds: Mapping[str, float]
    waited: tuple[float, float]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Counts of tokens: `prompt` in prompts, `cached` of these found in vLLM's prefix cache (None if it did not say), `sampled`
    in answers, `trained` of these used for training. The others of these are each in one count at most: `failed` are those of
    failed rollouts, `cancelled` those of cancelled ones, `untaught` those of further rollouts whose groups were not trained on,
    by reason."""

    prompt: int = 0
    cached: int | None = None
    sampled: int = 0
    trained: int = 0
    untaught: Mapping[str, int] = field(default_factory=dict)
    failed: int = 0
    cancelled: int = 0

    @property
    def useful(self) -> float | None:
        """The share of the sampled tokens that was trained on; None if none was sampled."""
        return self.trained / self.sampled if self.sampled else None


@dataclass(frozen=True, slots=True)
class Profile:
    """The profile of a run's `steps`. `parts` are seconds by part and add up to `seconds`. `server_idle` are the seconds of
    waiting for rollouts without any call, and `places_idle` the share of `runner.concurrency` that ran no rollout meanwhile.
    `tools` are seconds over all rollouts, by tool. `notes` are sentences about what is not known, and why."""

    run: str
    steps: tuple[StepTimes, ...]
    seconds: float
    parts: Mapping[str, float]
    tokens: Tokens
    server_idle: float
    places_idle: float
    tools: Mapping[str, float]
    notes: tuple[str, ...]
    recorded: Recorded
    activities: tuple[Activity, ...]
    rollouts: tuple[Rollout, ...]
    records: tuple[StepRecord, ...]

    @property
    def waiting(self) -> float:
        """The seconds in which the steps waited for rollouts."""
        return sum(step.waited[1] - step.waited[0] for step in self.steps)


async def read_profile(store: Store, run: str, first: int | None = None, end: int | None = None) -> Profile:
    """Profile the steps from `first` up to but without `end`. None for `first` means the second step if there is one, because
    processes start in the first; None for `end` means all.

    Raises `DataError` for a run without committed steps, stored calls or recorded times, and `ConfigError` if the run has none
    of these steps.
    """
    recorded = await read_run(store, run)
    records = await store.steps(run)
    points = {point.step: point for point in await store.metrics(run)}
    stored = await store.get_run(run)
    start = 1 + (len(records) > 1) if first is None else first
    chosen = [record for record in records if start <= record.step and (end is None or record.step < end)]
    if not chosen:
        raise ConfigError(f"the run {run!r} has the steps 1 to {records[-1].step}: none of them is in --steps")
    times = _times(chosen, points, 0.0 if stored is None else stored.created_at)
    rollouts = [one for one in await all_rollouts(store, run, split=TRAIN) if one.status.ended]
    took = _taken_by(records, rollouts, {time.step for time in times})
    found = await activities(store, took, recorded)
    parts, server_idle, places_idle = _parts(recorded, times, found)
    tools: defaultdict[str, float] = defaultdict(float)
    for activity in found:
        for name, seconds in activity.tools.items():
            tools[name] += seconds
    return Profile(
        run=run,
        steps=tuple(times),
        seconds=sum(time.wall for time in times),
        parts=parts,
        tokens=_tokens(took, records, times, found, recorded_config(recorded.config).trainer.policy_fault),
        server_idle=server_idle,
        places_idle=places_idle,
        tools=dict(sorted(tools.items(), key=lambda one: -one[1])),
        notes=tuple(_notes(recorded, times, found, parts, len(took))),
        recorded=recorded,
        activities=tuple(found),
        rollouts=tuple(took),
        records=tuple(records),
    )


def _times(records: Sequence[StepRecord], points: Mapping[int, MetricPoint], created: float) -> list[StepTimes]:
    """Return the times of the steps that have any. Raises `DataError` if none has."""
    times = []
    for record in records:
        point = points.get(record.step)
        if point is None or "seconds/rollout" not in point.values:
            continue  # the run ended between this step's commit and its metrics, or the user's own loop took it
        seconds = {name.partition("/")[2]: value for name, value in point.values.items() if name.startswith("seconds/")}
        before = points.get(record.step - 1)
        began = created if before is None else before.at
        measured = sum(seconds.values())
        wall = max(measured, point.at - began) if began else measured
        ended = record.at - seconds.get("train", 0.0) - seconds.get("checkpoint", 0.0)
        waited = (ended - seconds["rollout"], ended)
        times.append(StepTimes(record.step, wall, seconds, waited, point.values))
    if not times:
        raise DataError(
            "the steps have no recorded times, so nothing can be said of where they went: the run was stopped before "
            "the end of its first step"
        )
    return times


def _taken_by(records: Sequence[StepRecord], rollouts: Iterable[Rollout], steps: set[int]) -> list[Rollout]:
    """Return the rollouts that these steps used."""
    by_group = {group: record.step for record in records for group in record.groups}
    return [rollout for rollout in rollouts if by_group.get(rollout.group, rollout.step) in steps]


def _parts(
    recorded: Recorded, times: Sequence[StepTimes], found: Sequence[Activity]
) -> tuple[dict[str, float], float, float]:
    parts = dict.fromkeys(PARTS, 0.0)
    intervals = [interval for activity in found for interval in activity.intervals]
    if not recorded.schedule.max_staleness:
        intervals += _starting(recorded, times, found)
    windows = [time.waited for time in times]
    shares, server_idle = share_out(intervals, windows)
    for state, seconds in shares.items():
        parts[state] += seconds
    for time in times:
        for phase, part in PHASES.items():
            parts[part] += time.seconds.get(phase, 0.0)
    parts["idle"] += sum(time.wall for time in times) - sum(parts.values())
    if parts["idle"] < 0.0:  # clocks that disagree by less than a rounding
        parts["idle"] = 0.0
    waited = sum(end - begin for begin, end in windows)
    ran = sum(
        max(0.0, min(end, activity.end) - max(begin, activity.start)) for activity in found for begin, end in windows
    )
    places = recorded.schedule.concurrency * waited
    return parts, server_idle, max(0.0, 1.0 - ran / places) if places else 0.0


def _starting(recorded: Recorded, times: Sequence[StepTimes], found: Sequence[Activity]) -> list[Interval]:
    """Return the intervals in which places for agents were free although rollouts waited: their processes were starting. Only
    for runs in which sampling and training take turns."""
    intervals = []
    for time in times:
        begin, end = time.waited
        own = [one for one in found if begin - 1.0 <= one.start <= end]
        starts, ends = sorted(one.start for one in own), sorted(one.end for one in own)
        freed = [begin] * recorded.schedule.concurrency + ends
        for free, start in zip(freed, starts, strict=False):
            if start > free:
                intervals.append(Interval("agent_start", free, start))
    return intervals


def _tokens(
    took: Sequence[Rollout],
    records: Sequence[StepRecord],
    times: Sequence[StepTimes],
    found: Sequence[Activity],
    fault: PolicyFault,
) -> Tokens:
    made = {activity.rollout: activity for activity in found}
    trained = {key for record in records for key in record.rollouts}
    untaught, of_status = Counter[str](), Counter[Status]()
    for members in by_key(took, lambda rollout: rollout.group).values():
        others = [rollout for rollout in members if (rollout.id, rollout.attempt) not in trained]
        for rollout in others:
            sampled = made[rollout.id].response if rollout.id in made else 0
            if rollout.status is not Status.SUCCEEDED:
                of_status[rollout.status] += sampled
            elif sampled and len(others) == len(members):
                untaught[why_untaught(members, fault)] += sampled
    shares = [(time.step, time.metrics.get("prefix_hit_share")) for time in times]
    prompt = sum(activity.prompt for activity in found)
    known = [share for _, share in shares if share is not None]
    return Tokens(
        prompt=prompt,
        cached=round(prompt * sum(known) / len(known)) if known else None,
        sampled=sum(activity.response for activity in found),
        trained=sum(made[one.id].trainable for one in took if (one.id, one.attempt) in trained and one.id in made),
        untaught=dict(untaught.most_common()),
        failed=of_status[Status.FAILED],
        cancelled=of_status[Status.CANCELLED],
    )


def why_untaught(members: Sequence[Rollout], fault: PolicyFault) -> str:
    """Return why a group was not trained on, as in the names of the metrics `skipped/...`; `other` if its rewards do not show
    it, and `cancelled` if too few are left to compare because others were cancelled. `fault` is the setting
    `trainer.policy_fault`."""
    counted = 0.0 if fault == "mask" else None if fault == "exclude" else fault
    given = [counted if rollout.fault is Fault.POLICY else rollout.reward for rollout in members]
    rewards = [reward for reward in given if reward is not None]
    if len(rewards) < 2 and any(rollout.status is Status.CANCELLED for rollout in members):
        return "cancelled"
    if not rewards:
        return "too_few_succeeded"
    return "all_rewards_equal" if len({*rewards}) == 1 else "other"


def _notes(
    recorded: Recorded, times: Sequence[StepTimes], found: Sequence[Activity], parts: Mapping[str, float], took: int
) -> list[str]:
    notes = []
    waited = sum(time.waited[1] - time.waited[0] for time in times)
    if sum(parts[name] for name in ROLLOUT_PARTS) < waited / 10 and not recorded.schedule.max_staleness:
        notes.append(
            "hardly any call lies within the waiting for rollouts: the clocks of the store and of the gateway disagree, or "
            "these steps were resumed. Most of the waiting counts as idle"
        )
    if recorded.schedule.max_staleness:
        notes.append(
            "rollouts continue while the engine trains (trainer.max_staleness): the parts are what the trainer waited for, and "
            "agents worked beside its training as well"
        )
    without = took - len(found)
    if without:
        notes.append(
            f"{without} of {took} rollouts have no answered call in the store: how long they ran is in no part of the waiting"
        )
    if not any(activity.tools for activity in found) and any(activity.asked for activity in found):
        notes.append("no tool reported when it ended: all that followed a tool call counts as the tool's time")
    if not all("prefix_hit_share" in time.metrics for time in times):
        notes.append("vLLM did not say how many tokens of prompts it found in its prefix cache")
    return notes
