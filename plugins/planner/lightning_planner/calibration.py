"""Costs from a recorded run: its measured times, separated from what else went on at the time.

The invariant: the effect of sharing is removed from the measured times. A call's seconds become server seconds for each token,
sequence and prompt. An agent's seconds become work, which takes longer the more agents work at once, and waiting, which does
not. Simulating the recorded run with these costs repeats its times as far as this model is right; `lightning plan` prints how
well it does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from lightning.errors import DataError

from lightning_planner.costs import Agent, Call, Costs, ServerCosts, Sharing, Team, TrainerCosts
from lightning_planner.recorded import Recorded, RecordedCall, RecordedGroup

Floats = npt.NDArray[np.float64]
ROUNDS = 8
"""How often the share of work in the agents' time is computed from the load that this work makes."""
STRETCH = 16
"""The number of interval ends in one stretch, and"""
STRETCHES = 8
"""the least number of such stretches for a conclusion."""
DIFFERENT = 1.2
"""The largest step must have this many times the tokens of the smallest, for a fixed cost of training to be fitted."""
CLEARLY = 0.8
"""A limit is accepted if the error with it is at most this share of the error without it."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The costs of a recorded run. `teams` are its groups as work, in the order they began; `steady` are those that began after
    the first step, in which processes start. `fit` is the share of the variance of the calls' durations that the costs
    explain."""

    costs: Costs
    teams: tuple[Team, ...]
    steady: tuple[Team, ...]
    fit: float


def calibrate(recorded: Recorded) -> Calibration:
    """Compute the costs of a recorded run, and its groups as work.

    The agents' machines are taken for one machine that does one second of agents' work per second (`Sharing.agents` is 1),
    unless agents did not slow each other down.

    Raises `DataError` for a run without a call that has response tokens.
    """
    rollouts = [rollout for rollout in recorded.rollouts if rollout.calls]
    calls = [call for rollout in rollouts for call in rollout.calls]
    if not any(call.response for call in calls):
        raise DataError(
            f"run {recorded.run!r} has no call with response tokens, so no plan can be made from it: name another "
            "recorded run"
        )
    rests = [(max(call.ended for call in rollout.calls), rollout.end) for rollout in rollouts]
    load = _Load(calls, rests, list(_between_rollouts(recorded)))
    server, fit = _server(calls)
    costs = Costs(
        server=server,
        trainer=_trainer(recorded),
        sharing=Sharing(agents=1.0 if load.shared else math.inf),
        dispatch=load.dispatch,
        turn=_turn(recorded),
    )
    work = dict(zip(map(id, [*calls, *rollouts]), load.work(), strict=True))
    teams = tuple(_team(group, work) for group in recorded.groups)
    first = min(group.step for group in recorded.groups)
    later = tuple(team for team, group in zip(teams, recorded.groups, strict=True) if group.step > first)
    return Calibration(costs, teams, later or teams, fit)


def _team(group: RecordedGroup, work: dict[int, tuple[float, float]]) -> Team:
    agents = tuple(
        Agent(
            tuple(
                Call(call.after, *work[id(call)], call.prompt, call.fresh, call.response, call.tools)
                for call in rollout.calls
            ),
            rollout.rows,
            *work.get(id(rollout), (0.0, 0.0)),
        )
        for rollout in group.rollouts
    )
    return Team(agents, group.teaches)


class _Load:
    """The number of agents that worked at each moment of a run, and so their speed: 1 / m for each of m agents, full speed for
    one.

    Where agents slowed each other down (`_is_limited`), the time between two calls is work. After a call that ran tools it is
    as much work as elsewhere, and the rest is waiting for the tools. Otherwise all of it is waiting. `rests` are the times from
    the end of a rollout's last call to the rollout's end; `between` are those from there to the next rollout on the same place,
    which are work, too.
    """

    def __init__(
        self,
        calls: Sequence[RecordedCall],
        rests: Sequence[tuple[float, float]],
        between: Sequence[tuple[float, float]],
    ) -> None:
        ready, started = _columns([*((call.ready, call.started) for call in calls), *rests])
        free, taken = _columns(between)
        self._start, self._end = np.concatenate([ready, free]), np.concatenate([started, taken])
        self._lasting = self._end - self._start
        self._calls, self._agents = len(calls), len(ready)
        some = self._lasting > 0.0
        self.shared = _is_limited(self._start[some], self._end[some])
        self._tools = np.append(np.array([call.tools > 0 for call in calls]), np.zeros(len(rests) + len(free), bool))
        self._shares = np.full(len(self._start), 1.0 if self.shared else 0.0)
        self._done = self._work_at_present()
        for _ in range(ROUNDS if self.shared and self._tools.any() else 0):
            self._share_out()
            self._done = self._work_at_present()

    @property
    def dispatch(self) -> float:
        """Mean work between two rollouts on a place, in seconds; 0 where none was recorded."""
        return float(self._done[self._agents :].mean()) if len(self._done) > self._agents else 0.0

    def work(self) -> list[tuple[float, float]]:
        """Return `(wait, work)` in seconds before each call, and then after each rollout's last call."""
        waits = self._lasting * (1.0 - self._shares)
        work = self._done * self._shares
        return list(zip(waits[: self._agents].tolist(), work[: self._agents].tolist(), strict=True))

    def _work_at_present(self) -> Floats:
        """Return the work done in each interval if all of it were work, at the speeds that follow from the present shares."""
        times, counts = _counts(self._start, self._end, self._shares)
        done = _cumulative(times, 1.0 / np.maximum(counts, 1.0))
        return _between(times, done, self._start, self._end)

    def _share_out(self) -> None:
        """Compute the share of work in the time after tools, at the speeds that follow from the present shares."""
        others = ~self._tools[: self._calls]
        each = float(self._done[: self._calls][others].mean()) if others.any() else float(self._done.mean())
        done, lasting = self._done[self._tools], self._lasting[self._tools]
        working = each * np.divide(lasting, done, out=np.ones_like(done), where=done > 0)
        wait = max(0.0, float((lasting - working).mean()))
        self._shares[self._tools] = working / (wait + working) if each else 0.0


def _is_limited(start: Floats, end: Floats) -> bool:
    """Whether agents slow each other down: whether intervals do not end faster when more of them are open.

    With a open intervals the mean time to the next end is max((wait + work) / a, work). This is fitted to stretches of
    `STRETCH` ends each. There is a limit if the fit without work is clearly worse.
    """
    if not len(start):
        return False
    times, counts = _counts(start, end, np.ones(len(start)))
    ends = np.sort(end)[::STRETCH]
    seconds = np.diff(np.interp(ends, times, _cumulative(times, (counts > 0).astype(np.float64))))
    open_ones = np.diff(np.interp(ends, times, _cumulative(times, counts)))
    some = seconds > 0
    if some.sum() < STRETCHES:
        return False
    every, open_ones = seconds[some] / STRETCH, open_ones[some] / seconds[some]
    works = np.append(0.0, np.geomspace(every.min() / 4.0, every.max(), 80))
    cycles = np.geomspace(every.min(), (every * open_ones).max(), 80)
    spacing = np.maximum(cycles[None, :, None] / open_ones, works[:, None, None])
    # In logarithms: a stretch that took twice as long counts as much as one that took half as long.
    errors = (np.square(np.log(spacing / every)).mean(axis=2)).min(axis=1)
    return float(errors.min()) < CLEARLY * float(errors[0])


def _columns(rows: Sequence[tuple[float, float]]) -> tuple[Floats, Floats]:
    table = np.array(rows, np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _counts(starts: Floats, ends: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Return the moments at which intervals begin or end, and the total weight of the open intervals between each two
    moments."""
    times, places = np.unique(np.concatenate([starts, ends]), return_inverse=True)
    change = np.bincount(places, weights=np.concatenate([weights, -weights]))
    return times, np.maximum(np.cumsum(change)[:-1], 0.0)


def _cumulative(times: Floats, values: Floats) -> Floats:
    """Return the integral of a step function up to each moment."""
    total: Floats = np.concatenate([[0.0], np.cumsum(values * np.diff(times))])
    return total


def _between(times: Floats, cumulative: Floats, start: Floats, end: Floats) -> Floats:
    """Return the growth of an integral over each interval."""
    grown: Floats = np.interp(end, times, cumulative) - np.interp(start, times, cumulative)
    return grown


def _server(calls: Sequence[RecordedCall]) -> tuple[ServerCosts, float]:
    """Fit a server's costs by least squares, from each call's own tokens and the server's other work during the call. Return
    the costs and the share of variance that they explain."""
    started, ended = _columns([(call.started, call.ended) for call in calls])
    responses, own = _columns([(call.response, call.fresh) for call in calls])
    seconds = ended - started
    times, in_flight = _counts(started, ended, np.ones(len(calls)))
    batch = _between(times, _cumulative(times, in_flight), started, ended)
    others = np.divide(batch, seconds, out=np.ones_like(batch), where=seconds > 0) - 1.0
    order = np.argsort(started)
    in_order = started[order]
    first, last = np.searchsorted(in_order, started, side="left"), np.searchsorted(in_order, ended, side="left")
    fresh = np.concatenate([[0.0], np.cumsum(own[order])])
    table = np.stack(
        [
            np.ones_like(seconds),
            1.0 + np.maximum(last - first - 1, 0),
            own + np.maximum(fresh[last] - fresh[first] - own, 0.0),
            responses,
            responses * (1.0 + np.maximum(others, 0.0)),
        ],
        axis=1,
    )
    found = _fit(table, seconds)
    spread = float(np.var(seconds))
    varies = spread > 1e-12 * float(seconds.mean()) ** 2  # not by rounding alone
    fit = 1.0 - float(np.var(seconds - table @ found)) / spread if varies else 1.0
    latency, request, prompt_token, token, per_call = (float(value) for value in found)
    return ServerCosts(token, per_call, request, prompt_token, latency), fit


def _fit(table: Floats, values: Floats) -> Floats:
    """Fit by least squares without negative coefficients: the most negative one is set to 0, until none is left."""
    scale = np.maximum(np.abs(table).max(axis=0), 1e-300)
    found, left = np.zeros(table.shape[1]), list(range(table.shape[1]))
    while left:
        solved = np.linalg.lstsq(table[:, left] / scale[left], values, rcond=None)[0]
        if solved.min() >= 0.0:
            found[left] = solved / scale[left]
            break
        del left[int(np.argmin(solved))]
    return found


def _trainer(recorded: Recorded) -> TrainerCosts:
    steady = recorded.steady
    trained = [one for one in steady if one.rows and "train" in one.seconds] or [
        one for one in recorded.steps if one.rows and "train" in one.seconds
    ]
    rows = np.array([step.rows for step in trained], np.float64)
    # Steps of similar size cannot separate the cost of a step from that of its tokens.
    fixed = float(len(rows) > 0 and rows.max() > DIFFERENT * rows.min())
    table = np.stack([np.full_like(rows, fixed), rows], axis=1)
    step, row_token = _fit(table, np.array([one.seconds["train"] for one in trained])) if trained else (0.0, 0.0)
    every = recorded.schedule.checkpoint_every
    checkpoints = [one.seconds.get("checkpoint", 0.0) for one in steady if one.step % every == 0]
    # Processes start and graphs are compiled in the first step; if sampling goes on meanwhile, the next step profits.
    begins = recorded.steps[0] if len(recorded.steps) > 1 else None
    first = begins.seconds.get("train", 0.0) - step - row_token * begins.rows if begins and begins.rows else 0.0
    updates = [one.seconds.get("update", 0.0) for one in steady]
    exports = [max(0.0, update - one.held) for one, update in zip(steady, updates, strict=True)]
    return TrainerCosts(
        step=float(step),
        row_token=float(row_token),
        checkpoint=statistics.median(checkpoints) if checkpoints else 0.0,
        update=statistics.median(updates),
        export=statistics.median(exports),
        first=max(0.0, float(first)),
    )


def _turn(recorded: Recorded) -> float:
    """Return the seconds of a step in turns besides its rollouts: the median over the steps without the first."""
    rollouts = _spans(recorded)
    beside = [
        step.seconds["rollout"] - max(end for _, end in times) + min(start for start, _ in times)
        for step in recorded.steady
        if (times := rollouts.get(step.step)) and "rollout" in step.seconds
    ]
    return max(0.0, statistics.median(beside)) if beside else 0.0


def _spans(recorded: Recorded) -> dict[int, list[tuple[float, float]]]:
    """Return the start and end of the rollouts of each step; empty for a run that does not sample in turns."""
    found: dict[int, list[tuple[float, float]]] = {}
    for group in recorded.groups if not recorded.schedule.max_staleness else ():
        found.setdefault(group.step, []).extend((one.start, one.end) for one in group.rollouts if one.calls)
    return found


def _between_rollouts(recorded: Recorded) -> Iterator[tuple[float, float]]:
    """Yield the times from the end of a rollout to the beginning of the next one on its place, for steps in turns with more
    rollouts than places. Empty where sampling goes on all the time, since a place may then be empty because no group may
    begin."""
    places = recorded.schedule.concurrency
    by_step = _spans(recorded)
    first = min(by_step, default=0)
    for step, times in by_step.items():
        if step > first or len(by_step) == 1:
            starts, ends = sorted(start for start, _ in times), sorted(end for _, end in times)
            pairs = zip(ends, starts[places:], strict=False)
            yield from ((end, start) for end, start in pairs if start > end)
