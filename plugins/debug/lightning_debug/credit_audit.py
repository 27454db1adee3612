"""The audit of credit: execute alternatives at recorded decisions, and compare the advantages of credit functions with them.

The invariant: the value of a state and the worth of a recorded answer are means over continuations that were sampled for the
audit, by the weights that made the decision; the recorded return stands for the worth of an answer only where the answer ended
its rollout. A branch that is void or has no reward is counted, and in no figure; one that
failed by the policy's own fault has the reward that training gives it. The audited run does not change: the branches
are a run of their own in its store, whose state keeps the result.

So the values of states are estimated as in VinePPO (arXiv 2410.01679). The branches at a call serve twice: they give the value
of its state, and the worth of the answer before it.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Final, cast

import numpy as np
from lightning.algorithms.intake import one_per_call, per_call
from lightning.batch import Group, Trajectory, branched_at
from lightning.credit import Credit, rloo, rollout_return
from lightning.errors import ConfigError, DataError, RunnerError
from lightning.plugins import plugins
from lightning.safe_text import counted
from lightning.store.protocol import Store
from lightning.trainer.context import PolicyFault
from lightning.trainer.summary import Reporter
from lightning.trainer.training_data import all_rollouts, load_groups, scored
from lightning.types import Json, Rollout, Run, Status, Task, Transition
from lightning_branching.branching import SPLIT, Answering, run_branches
from lightning_branching.recorded import CHANGES, is_void
from pydantic import TypeAdapter, ValidationError

from lightning_debug.credit_choice import Choice, Decision, Recorded
from lightning_debug.credit_estimates import (
    Agreement,
    Executed,
    agreement,
    ceiling,
    executed,
    share_that_mattered,
    that_mattered,
)
from lightning_debug.judge import Judge
from lightning_debug.statistics import Estimate

KEPT: Final = "credit_audit"
"""The key in the state of an audit's run that keeps its result."""
JUDGE, LOGPROB = "judge", "logprob"
"""The names of two columns that are no credit functions: the score of a judge alone, less the mean of the others in the group;
and the mean logprob of an answer's tokens."""

FEW: Final = 10
"""Tasks below which intervals over tasks are rough."""

Key = tuple[str, int, int]
"""The key of a call: rollout, attempt, sequence number."""


@dataclass(frozen=True, slots=True)
class AuditedCall:
    """A recorded decision as it was executed. `number` counts the calls of its rollout from 1. `state` and `answer` are the
    numbers of continuations that count; 0 for the `answer` of a `last` call, whose `worth` is the recorded return, one sample.
    `interval` is that of the advantage, None if it is not known. `credits` has the advantage that each credit function gives
    the call."""

    rollout: str
    attempt: int
    seq: int
    number: int
    agent: str
    task: str
    last: bool
    state: int
    answer: int
    value: float
    worth: float
    advantage: float
    interval: tuple[float, float] | None
    p_value: float | None
    mattered: bool
    credits: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class CreditAudit:
    """The result of an audit. `share` is the share of decisions that mattered, `alone` the number of those whose interval
    excludes 0 without the correction for their number. `ceiling` is the correlation that the true advantages would have with
    the executed ones. `agreements` are by credit; `own` is the run's credit. `states` were branched at, `n` times each.
    `tokens` were sampled in `rollouts` branches, in `seconds`. Of these branches those that are `void` or `failed` are in no
    figure, and `faults` failed by the policy's own fault and are worth what the run's `trainer.policy_fault` says. `left_out`
    counts recorded calls and rollouts that could not be executed, by reason."""

    run: str
    step: int
    held_out: bool
    branches: str
    weights: str
    own: str
    n: int
    states: int
    audited: int
    calls: tuple[AuditedCall, ...]
    share: Estimate | None
    alone: int
    ceiling: float | None
    bounds: tuple[float, float]
    agreements: Mapping[str, Agreement]
    rollouts: int
    void: int
    failed: int
    faults: int
    tokens: int
    seconds: float
    left_out: Mapping[str, int]
    warnings: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Plan:
    """An audit that is ready to be executed. `credits` are those to compare, by name; `how` says what answers the branches;
    `bounds` are the lowest and the highest return that can be, None for those that are seen."""

    recorded: Recorded
    choice: Choice
    held_out: bool
    n: int
    credits: Mapping[str, Credit]
    how: Answering
    agent_name: str
    bounds: tuple[float, float] | None
    warnings: tuple[str, ...] = ()

    @property
    def states(self) -> dict[Key, Task]:
        """The calls to branch at, each with its task: every decision's own call, and the one after it."""
        tasks = {each.rollout.id: each.rollout.task for group in self.recorded.groups for each in group.trajectories}
        calls = (
            call.transition
            for decision in self.choice.decisions
            for call in (decision.call, decision.after)
            if call is not None
        )
        return {call.key: tasks[call.rollout] for call in calls}


def credits_of(
    recorded: Recorded, names: Sequence[str], judge: Judge | None
) -> tuple[dict[str, Credit], tuple[str, ...]]:
    """Return the credit functions to compare, and warnings: those with these names, or else all registered ones that these
    groups can be given; and the run's own with its settings, if it can be called. Raises `ConfigError` for a name that is
    unknown or needs what the groups do not have."""
    known = plugins().names("credits")
    found: dict[str, Credit] = {}
    for name in names or known:
        if name not in known:
            plugins().credit(name)  # raises: says which there are, or which plugin brings it
        credit = plugins().credit(name)
        why = _why_not(name, credit, recorded)
        if why and names:
            raise ConfigError(f"--credit {name}: {why}")
        if not why:
            found[name] = credit
    own, of_run, why = own_credit(recorded)
    if of_run is not None:
        found.setdefault(own, of_run)
    if judge is not None:
        found[JUDGE] = _Scores(judge)
    return found, (f"the run's own credit, {own}, is not compared: {why}",) if why else ()


def own_credit(recorded: Recorded) -> tuple[str, Credit | None, str]:
    """Return the name of the credit that the run trained with, the function, and why it cannot be called; all empty for a run
    without one. A credit with settings of its own has the name of its type."""
    if recorded.algorithm is None:
        said = recorded.described_credit
        name = said if isinstance(said, str) else "a function" if said else ""
        return name, None, "only your own code can make the run's algorithm again" if name else ""
    credit = getattr(recorded.algorithm, "credit", None)
    if not credit:
        return "", None, ""
    name = credit if isinstance(credit, str) else type(credit).__name__
    if isinstance(credit, str):
        if credit not in plugins().names("credits"):
            return name, None, "no plugin that is installed here registers it"
        credit = plugins().credit(credit)
    why = _why_not(name, credit, recorded)
    return name, None if why else credit, why


def _why_not(name: str, credit: Credit, recorded: Recorded) -> str:
    """Say why a credit function cannot be called with these groups; empty if it can."""
    if getattr(credit, "rewards", False):
        return "it has rewards of its own: give a judge with --judge MODULE:JUDGE"
    if name == LOGPROB:
        return "this name means the logprobs of answers"
    if getattr(credit, "head", ""):
        return "" if recorded.has_values else "it needs the values of a critic, and this step was trained without one"
    branched = any(branched_at(group.trajectories) for group in recorded.groups)  # by a parent in their own group
    if getattr(credit, "knows_branches", False) and not branched:
        return "these groups have no branches, so that it would be rloo"
    return ""


@dataclass(frozen=True, slots=True)
class _Scores:
    """A credit: the score of a judge alone, without the rewards that the agents returned."""

    judge: Judge

    def __call__(self, group: Group, advantage: object) -> list[np.ndarray[tuple[int], np.dtype[np.float64]]]:
        """Return the advantages of the scores."""
        members = (replace(each, rollout=replace(each.rollout, reward=0.0)) for each in group.trajectories)
        bare = tuple(replace(each, step_rewards=()) for each in members)
        return [np.asarray(part, dtype=np.float64) for part in self.judge(Group(group.id, bare), rloo)]

    def prefetch(self, groups: Sequence[Group]) -> None:
        """Judge all groups at the same time."""
        self.judge.prefetch(groups)


async def execute(store: Store, plan: Plan, reporter: Reporter) -> CreditAudit:
    """Run the branches of an audit, and keep and return its result. Raises `RunnerError` if no decision can be told because all
    its branches are void or failed."""
    began = time.monotonic()
    _check_bounds(plan.bounds, [rollout_return(each) for group in plan.recorded.groups for each in group.trajectories])
    given = _given(plan)  # a credit function that fails, or a judge that is silent, costs no branches
    run = await _new_run(store, plan)
    states = list(plan.states.items())
    rollouts = [
        rollout for place, (key, task) in enumerate(states) for rollout in _branches(plan, run.id, place, key, task)
    ]
    await run_branches(store, run, rollouts, replace(plan.how, folder=plan.how.folder / run.id), reporter)
    ended = await all_rollouts(store, run.id)
    recorded = plan.recorded
    groups = await load_groups(store, ended, recorded.train_agents, recorded.policy_fault)
    returns = {
        states[int(group.id.rpartition("/")[2])][0]: [
            rollout_return(member) for member in recorded.rewarded_branches(group).trajectories
        ]
        for group in groups
    }
    calls = await store.transitions_of([(rollout.id, rollout.attempt) for rollout in ended])
    result = report(
        plan,
        run.id,
        given,
        returns,
        ended,
        sum(len(call.response_ids) for own in calls for call in own),
        time.monotonic() - began,
    )
    await store.put_state(run.id, KEPT, cast("Json", asdict(result)), once=None)
    return result


def kept_audit(value: Json) -> CreditAudit | None:
    """Read a kept result from the state of an audit's run; None for one of another release, and if there is none."""
    try:
        return None if value is None else _reader().validate_python(value)
    except ValidationError:
        return None


@functools.cache
def _reader() -> TypeAdapter[CreditAudit]:
    return TypeAdapter(CreditAudit)


async def _new_run(store: Store, plan: Plan) -> Run:
    """Return a new run for the branches. Its configuration names the audited run, step and rollouts."""
    recorded, first = plan.recorded, plan.choice.decisions[0].call
    base = f"{recorded.run.id}-credit{recorded.step}"
    known = {run.id for run in await store.list_runs(brief=True)}
    numbered = (f"{base}-{number}" if number > 1 else base for number in itertools.count(1))
    name = next(name for name in numbered if name not in known)
    parents = list(dict.fromkeys(each.call.transition.rollout for each in plan.choice.decisions))
    described: dict[str, Json] = {
        CHANGES: {
            "rollout": parents[0],
            "attempt": first.transition.attempt,
            "at": first.number,
            "weights": plan.how.model.name,
            "audit": f"{recorded.run.id}@{recorded.step}",
            "rollouts": parents,
        },
        "model": str(plan.how.model.folder),
        "evaluates": plan.how.model.name,
        "agent": plan.agent_name,
        "samples": plan.n,
        "seed": plan.how.config.trainer.seed,
        "config": plan.how.config.model_dump(mode="json"),
        "tasks": {"train": [], "val": []},
    }
    return Run(name, name, described, time.time(), recorded.run.project)


def _branches(plan: Plan, run: str, place: int, key: Key, task: Task) -> list[Rollout]:
    attempts = plan.how.config.runner.max_attempts
    group = f"{run}/{place}"
    return [
        Rollout(f"{group}/{index}", run, task, group, split=SPLIT, index=index, max_attempts=attempts, parent=key)
        for index in range(plan.n)
    ]


def _given(plan: Plan) -> dict[str, dict[Key, float]]:
    """Return the advantage of each call of the audited groups, by credit; of a credit by token its mean over the call. Raises
    `DataError` for a credit function that does not give a finite number for each call."""
    wanted = {decision.group for decision in plan.choice.decisions}
    groups = [group for group in plan.recorded.groups if group.id in wanted]
    found: dict[str, dict[Key, float]] = {}
    for name, credit in plan.credits.items():
        if (prefetch := getattr(credit, "prefetch", None)) is not None:
            prefetch(groups)
        found[name] = {}
        for group in groups:
            parts = per_call(group, credit(group, rloo), repr(name), "finite advantage")
            given = [one_per_call(own) for own in parts]
            if not all(np.isfinite(value) for own in given for value in own):
                raise DataError(
                    f"the credit {name!r} does not give one finite advantage for each call of group {group.id}"
                )
            for member, part in zip(group.trajectories, given, strict=True):
                found[name] |= {call.key: value for call, value in zip(member.transitions, part, strict=True)}
    calls = [call for group in groups for member in group.trajectories for call in member.transitions]
    answers = {call.key: np.asarray(call.logprobs, dtype=np.float64) for call in calls if len(call.logprobs)}
    found[LOGPROB] = {key: float(values.mean()) for key, values in answers.items()}
    return found


def report(
    plan: Plan,
    run: str,
    given: Mapping[str, Mapping[Key, float]],
    returns: Mapping[Key, Sequence[float]],
    ended: Sequence[Rollout],
    tokens: int,
    seconds: float,
) -> CreditAudit:
    """Make the report of an audit from the `returns` of its branches by the call at which they begin, and the advantages that
    were `given` by credit and call. Raises `RunnerError` if no decision can be told."""
    members = {each.rollout.id: each for group in plan.recorded.groups for each in group.trajectories}
    seen = [value for values in returns.values() for value in values]
    seen += [rollout_return(member) for member in members.values()]
    _check_bounds(plan.bounds, seen, f"; the branches are kept as the run {run}")
    bounds = plan.bounds or (min(seen), max(seen))
    left_out, told = dict(plan.choice.left_out), []
    for decision in plan.choice.decisions:
        found = _executed(decision, members, returns, bounds)
        if found is None:
            reason = "calls with fewer than 2 branches that count"
            left_out[reason] = left_out.get(reason, 0) + 1
        else:
            told.append((decision, found))
    void, failed, faults = fates(ended, plan.recorded.policy_fault)
    cancelled = [rollout for rollout in ended if rollout.status is Status.CANCELLED]
    if not told:
        why = next((rollout.error for rollout in (*void, *failed, *cancelled)), "")
        raise RunnerError(
            f"no decision could be executed: {len(void)} of {counted(len(ended), 'branch', 'branches')} are void, "
            f"{len(failed)} failed, and {len(cancelled)} were cancelled. The first: {why}"
        )
    results = [found for _, found in told]
    mattered = that_mattered([found.p_value for found in results])
    calls = tuple(
        _audited(decision, found, members, returns, given, mattered=judged)
        for (decision, found), judged in zip(told, mattered, strict=True)
    )
    recorded = plan.recorded
    credit_name = own_credit(recorded)[0]
    return CreditAudit(
        recorded.run.id,
        recorded.step,
        plan.held_out,
        run,
        plan.how.model.name,
        credit_name,
        plan.n,
        len(plan.states),
        len({call.rollout for call in calls}),
        calls,
        share_that_mattered(mattered, [call.task for call in calls]),
        sum(each.interval is not None and not each.interval[0] <= 0.0 <= each.interval[1] for each in calls),
        ceiling(results),
        bounds,
        {name: _agreement(name, calls, credit_name) for name in given if any(name in call.credits for call in calls)},
        len(ended),
        len(void),
        len(failed),
        len(faults),
        tokens,
        seconds,
        left_out,
        (*plan.warnings, *_remarks(calls, void, failed, cancelled, bounds)),
    )


def fates(ended: Sequence[Rollout], policy_fault: PolicyFault) -> tuple[list[Rollout], list[Rollout], list[Rollout]]:
    """Return of ended branches those that are void, those that failed and have no reward, and those that failed by the policy's
    own fault and have one. Cancelled branches are none of these."""
    void = [rollout for rollout in ended if is_void(rollout)]
    lost = [rollout for rollout in ended if rollout.status is Status.FAILED and not is_void(rollout)]
    failed = [rollout for rollout in lost if scored(rollout, policy_fault) is None]
    return void, failed, [rollout for rollout in lost if scored(rollout, policy_fault) is not None]


def _check_bounds(bounds: tuple[float, float] | None, seen: Sequence[float], kept: str = "") -> None:
    """Raise `ConfigError` if returns are outside the bounds, whose intervals would then be wrong. `kept` ends the message."""
    if bounds is not None and seen and not bounds[0] <= min(seen) <= max(seen) <= bounds[1]:
        raise ConfigError(
            f"--bounds {bounds[0]:g},{bounds[1]:g}: there are returns from {min(seen):g} to {max(seen):g}. A return is the "
            f"reward with all step rewards, and with what the algorithm's rules add: give bounds that no return exceeds{kept}"
        )


def _executed(
    decision: Decision,
    members: Mapping[str, Trajectory],
    returns: Mapping[Key, Sequence[float]],
    bounds: tuple[float, float],
) -> Executed | None:
    """Return a decision as it was executed; None if fewer than two branches count where branches are needed."""
    state = returns.get(decision.call.transition.key, ())
    if len(state) < 2:
        return None
    if decision.after is None:
        return executed(state, rollout_return(members[decision.call.transition.rollout]), bounds)
    answer = returns.get(decision.after.transition.key, ())
    return None if len(answer) < 2 else executed(state, answer, bounds)


def _audited(
    decision: Decision,
    found: Executed,
    members: Mapping[str, Trajectory],
    returns: Mapping[Key, Sequence[float]],
    given: Mapping[str, Mapping[Key, float]],
    *,
    mattered: bool,
) -> AuditedCall:
    call: Transition = decision.call.transition
    after = decision.after
    return AuditedCall(
        call.rollout,
        call.attempt,
        call.seq,
        decision.call.number,
        call.caller.name,
        members[call.rollout].rollout.task.id,
        after is None,
        len(returns[call.key]),
        0 if after is None else len(returns[after.transition.key]),
        found.value,
        found.worth,
        found.advantage,
        found.interval,
        found.p_value,
        mattered,
        {name: values[call.key] for name, values in given.items() if call.key in values},
    )


def _agreement(name: str, calls: Sequence[AuditedCall], own: str) -> Agreement:
    """Return the agreement of a credit with the executed advantages, over the calls to which it gives a number. `own` is the
    run's credit."""
    having = [call for call in calls if name in call.credits]
    return agreement(
        [call.credits[name] for call in having],
        [call.advantage for call in having],
        mattered=[call.mattered and name != LOGPROB for call in having],  # a logprob has no sign to compare
        last=[call.last for call in having],
        tasks=[call.task for call in having],
        own=[call.credits[own] for call in having]
        if name != own and all(own in call.credits for call in having)
        else (),
    )


def _remarks(
    calls: Sequence[AuditedCall],
    void: Sequence[Rollout],
    failed: Sequence[Rollout],
    cancelled: Sequence[Rollout],
    bounds: tuple[float, float],
) -> list[str]:
    """Return what a reader of the figures must know."""
    found = []
    reasons = ("did not begin as their parent did", "have no reward", "were cancelled")
    for those, began in zip((void, failed, cancelled), reasons, strict=True):
        if those:
            found.append(f"{counted(len(those), 'branch', 'branches')} {began}, and are in no figure: {those[0].error}")
    if bounds[0] == bounds[1]:
        found.append(f"all returns are {bounds[0]:g}: no decision can be told apart from another one")
    if last := sum(call.last for call in calls):
        found.append(
            f"{counted(last, 'decision')} ended a rollout: the worth of the answer is the recorded return, one sample, and is "
            "taken as exact"
        )
    if (tasks := len({call.task for call in calls})) == 1:
        found.append("all decisions are of one task: figures over decisions have no interval (--rollouts)")
    elif tasks < FEW:
        found.append(f"the decisions are of {tasks} tasks: intervals over tasks are rough (--rollouts)")
    return found
