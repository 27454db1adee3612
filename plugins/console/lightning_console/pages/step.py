"""The page of a step: which groups were trained on, which were not and why, and each rollout as a point of a chart."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from lightning.errors import ConfigError, DataError, UnavailableError
from lightning.store.protocol import Store
from lightning.trainer.context import read_epochs
from lightning.trainer.metrics import REASONS
from lightning.trainer.plan import TRAIN
from lightning.trainer.summary import is_idle, reason
from lightning.trainer.training_data import all_rollouts
from lightning.types import Rollout, Run, Status, StepRecord, by_key
from lightning_debug.profile import why_untaught

from lightning_console.blocks import (
    Block,
    Cell,
    Chart,
    Column,
    Control,
    Controls,
    Fact,
    Facts,
    Link,
    Notice,
    Notices,
    Page,
    Series,
    Table,
)
from lightning_console.pages.policies import policies_table
from lightning_console.pages.reward_change import change_blocks
from lightning_console.pages.tools import more_links
from lightning_console.pages.words import (
    NONE,
    count,
    counted,
    inside,
    located,
    mean_of,
    number,
    page_links,
    rollout_link,
    seconds,
    share,
    to,
    trail,
    when,
    written,
)
from lightning_console.places import Located, Places
from lightning_console.queries.curves import Curves, read_curves
from lightning_console.queries.reward_change import RewardChange, reward_change_of
from lightning_console.queries.runs import ODD, line_of, said_of
from lightning_console.queries.scan import scan_of
from lightning_console.queries.steps import REMOVED, StepProof, prove_step
from lightning_console.queries.tool_stats import failing_arguments, tool_lines, uses_of
from lightning_console.router import Address

GROUPS: Final = 50
"""Number of groups on a page."""
POINTS: Final = 2000
"""Most rollouts of each series in the scatter chart."""
FAULTS: Final = {
    "agent": "the agent's code is at fault",
    "policy": "the policy itself is at fault",
    "timeout": "it ran out of time",
    "infrastructure": "the infrastructure is at fault",
}
EXAMPLES: Final = 5
"""Rollouts that are linked for each reason why rollouts failed."""
OF_REWARDS: Final = {
    "other": "rewards do not tell why",
    "cancelled": "rollouts of it were cancelled, since the training loop wanted them no more",
}
"""What `why_untaught` says besides the trainer's reasons, in words."""
AGAINST: Final = {"tokens": "sampled tokens", "turns": "calls", "advantage": "advantage", "seconds": "seconds"}


@dataclass(frozen=True, slots=True)
class TaskGroup:
    """The rollouts of one task, branches last. `untaught` is the trainer's word for why none of them was trained on; empty if
    one was."""

    members: tuple[Rollout, ...]
    untaught: str = ""

    @property
    def id(self) -> str:
        """The group's id."""
        return self.members[0].group

    @property
    def rewards(self) -> list[float]:
        """The known rewards of the group's rollouts."""
        return [rollout.reward for rollout in self.members if rollout.reward is not None]

    @property
    def spread(self) -> float | None:
        """The standard deviation of the known rewards; None for fewer than two."""
        return statistics.pstdev(self.rewards) if len(self.rewards) > 1 else None

    @property
    def why(self) -> str:
        """Why the group was not trained on, in plain words."""
        return {**REASONS, **OF_REWARDS}.get(self.untaught, self.untaught)


@dataclass(frozen=True, slots=True)
class Step:
    """A step. For the step that is being sampled, `proof` has no record. `against` has, by rollout id, the values of each axis
    that the reward can be drawn against; None if not known. `last` is the newest committed step. `unread` says why calls are
    not known; empty if they are."""

    number: int
    proof: StepProof
    groups: Sequence[TaskGroup]
    against: Mapping[str, Mapping[str, float | None]]
    last: int | None
    unread: str = ""

    @property
    def record(self) -> StepRecord | None:
        """The step's committed record; None if it is not committed yet."""
        return self.proof.record

    @property
    def unknown(self) -> str:
        """Why advantages are not known; empty if they are."""
        return self.unread or self.proof.why


async def read_step(store: Store, run: Run, number: int) -> Step:
    """Read a step of a run. Raises `ConfigError` if the run has no such step."""
    found, last = await store.steps(run.id, after=number - 1, limit=1), await store.last_step(run.id)
    if found and found[0].step == number:
        proof = await prove_step(store, run, found[0], await read_epochs(store, run))
    else:
        rollouts = await all_rollouts(store, run.id, split=TRAIN, step=number)
        if not rollouts:
            has = f"has the steps 1 to {last.step}" if last else "has no step yet"
            raise ConfigError(f"there is no step {number}: the run {run.id} {has}")
        proof = StepProof(rollouts=tuple(rollouts), why="the step is not committed: nothing was trained yet")
    scored = any(rollout.status is Status.SUCCEEDED for rollout in proof.rollouts)
    lost = proof.why == REMOVED or (proof.members and not any(each.turns for each in proof.members.values()))
    return Step(
        number,
        proof,
        _task_groups(proof),
        {rollout.id: _against(rollout, proof) for rollout in proof.rollouts},
        last.step if last else None,
        "its calls were removed (lightning db prune)" if scored and lost else "",
    )


def _task_groups(proof: StepProof) -> list[TaskGroup]:
    branches_last = sorted(proof.rollouts, key=lambda each: each.parent is not None)
    groups = by_key(branches_last, lambda rollout: rollout.group)
    if proof.record is None or proof.epoch is None:
        return [TaskGroup(tuple(members)) for members in groups.values()]
    trained = {rollout for rollout, _ in proof.record.rollouts}
    fault = proof.epoch.policy_fault
    found = []
    for group, members in groups.items():
        untaught = ""
        if not any(each.id in trained for each in members):
            first = proof.skipped.get(group, "").partition(", ")[0]
            untaught = first if first in REASONS else why_untaught(members, fault)
        found.append(TaskGroup(tuple(members), untaught))
    return found


def _against(rollout: Rollout, proof: StepProof) -> dict[str, float | None]:
    """Return the values of a rollout on each axis of the scatter: sampled tokens, calls, mean advantage of trained tokens,
    seconds. None if not known."""
    member = proof.members.get(rollout.id)
    known: dict[str, float | None] = {"tokens": None, "turns": None, "advantage": None, "seconds": rollout.seconds}
    if member is not None and member.turns:
        known |= {"tokens": member.tokens, "turns": member.turns}
    if member is not None and proof.proved:
        known["advantage"] = member.advantage
    return known


async def page(places: Places, address: Address) -> Page:
    """Make the page `step/KEY/N?cursor=&x=tokens|turns|advantage|seconds`."""
    found = await located(places, address)
    if len(address.about) < 2 or not address.about[1].isdecimal():
        raise DataError(f"the address {str(address)!r} names no step: step/RUN/NUMBER, counted from 1")
    step = await read_step(found.store, found.run, int(address.about[1]))
    first = max(0, address.number("cursor", 0))
    axis = address.option("x") if address.option("x") in AGAINST else "tokens" if step.record else "seconds"
    goes_on = (await line_of(found.store, found.run, found.url)).state.name == "running"
    is_last = step.last is None or step.number >= step.last
    curves: Curves | None = None
    try:
        curves = await read_curves(found.store, found.run)
        change = await reward_change_of(found.store, found.run, step.proof, step.number, curves, places.patience)
    except UnavailableError:
        raise
    except ODD as error:
        change = said_of(error)
    if isinstance(change, RewardChange) and change.tool_error[0] and change.equal is not None:
        change = replace(change, tool_arguments=await _failing_arguments(found, step, places.patience))
    idle = await _idle_since(found, step)
    why, behind = change_blocks(found, change, _trained_nothing(step, curves), idle)
    return Page(
        str(address),
        f"Step {step.number}",
        [
            *_notices(step),
            _with_taught(found, step, why),
            _facts(step),
            *behind,
            *(
                policies_table(step.proof.epoch, step.record.metrics, step.record)
                if step.record and step.proof.epoch
                else ()
            ),
            _groups(found, step, address, first),
            Controls(str(address), [Control("x", "against", axis, list(AGAINST.items()))]),
            _scatter(found, step, axis),
            *_untaught(found, step),
            *_failures(found, step),
            more_links(found, step=step.number),
        ],
        trail(found),
        live=(step.record is None and goes_on) or change is None,
        partial=change is None,
        previous=to("step", found.key, step.number - 1) if step.number > 1 else "",
        next=to("step", found.key, step.number + 1) if not is_last or (step.record and goes_on) else "",
    )


def _notices(step: Step) -> list[Block]:
    notices = []
    if step.record is None:
        begun = "these are the rollouts that were begun for it up to now"
        notices.append(Notice("this step is not committed", "warn", detail=begun))
    if step.unread:
        notices.append(Notice(step.unread, "warn", detail="lengths, turns and advantages are not known; rewards are"))
    elif step.unknown and step.record is not None:
        notices.append(Notice("advantages are not known", "warn", detail=step.unknown))
    return [Notices(notices)] if notices else []


async def _failing_arguments(found: Located, step: Step, patience: float | None) -> str:
    """Return the property of the arguments with which the tool that failed most in a step failed; empty if none is known."""
    scan = await scan_of(found, step=step.number, patience=patience)
    mine = {each.id for each in step.proof.rollouts}
    lines = tool_lines(uses_of([each for each in list(scan.rollouts.values()) if each.id in mine]))
    telling = failing_arguments(lines[0].used).telling if lines else ()
    return telling[0].text if telling else ""


async def _idle_since(found: Located, step: Step) -> int | None:
    """Return the last step before this one that changed the weights, if the step before changed none and rollouts are never
    older than the weights; 0 if no step did. None otherwise."""
    if step.record is None or step.proof.epoch is None or step.proof.epoch.max_staleness:
        return None
    before = [each for each in await found.store.steps(found.run.id, brief=True) if each.step < step.number]
    if not before or not is_idle(before[-1].metrics):
        return None
    return next((each.step for each in reversed(before) if not is_idle(each.metrics)), 0)


def _trained_nothing(step: Step, curves: Curves | None) -> list[Notice]:
    """Say of a step that trained nothing that its weights are those before it, and what these earned in the next step."""
    record, epoch = step.record, step.proof.epoch
    if record is None or not is_idle(record.metrics):
        return []
    version = record.policy_version
    text = (
        f"This step did not make the model worse or better: it trained nothing, so v{version} has the weights of "
        f"v{version - 1}"
    )
    rewards = {} if curves is None else dict(zip(curves.steps, curves.named("reward_with_failures"), strict=True))
    following = rewards.get(step.number + 1)
    if following is not None and epoch is not None and not epoch.max_staleness:
        text += f". The same weights earned {number(following)} in step {step.number + 1}"
    return [Notice(text)]


def _facts(step: Step) -> Facts:
    record, rollouts = step.record, step.proof.rollouts
    metrics = record.metrics if record is not None else {}
    failed = sum(rollout.status is Status.FAILED for rollout in rollouts)
    cancelled = sum(rollout.status is Status.CANCELLED for rollout in rollouts)
    told = [f"{failed} failed", *([f"{cancelled} cancelled"] if cancelled else [])]
    mean = mean_of([rollout.reward for rollout in rollouts])
    facts = [
        Fact(
            "reward",
            number(metrics.get("reward_with_failures", mean)),
            f"{number(metrics.get('reward', mean))} of those that succeeded" if failed else "",
            hint="the larger figure counts failed rollouts as 0" if failed and record else "",
        ),
        Fact("rollouts", count(len(rollouts)), "; ".join(told), "warn" if failed > 0.1 * len(rollouts) else ""),
    ]
    if record is None or step.proof.epoch is None:
        ended = sum(rollout.status.ended for rollout in rollouts)
        return Facts([*facts, Fact("ended", f"{ended} of {len(rollouts)}")])
    made = (
        f"the weights of v{record.policy_version - 1}, unchanged" if is_idle(record.metrics) else "that this step made"
    )
    return Facts(
        [
            *facts,
            Fact("groups that taught", f"{sum(not group.untaught for group in step.groups)} of {len(step.groups)}"),
            Fact("trained tokens", count(metrics.get("tokens"))),
            Fact("entropy", number(metrics.get("entropy")), "nats"),
            Fact("mean |Δ logprob|", number(metrics.get("mean_logprob_gap")), "trainer to sampler, nats"),
            Fact("clipped", share(metrics.get("clip_fraction")), f"masked {share(metrics.get('masked_share'))}"),
            Fact("norm of the gradient", number(metrics.get("grad_norm"))),
            Fact("version", f"v{record.policy_version}", made),
            Fact("committed", when(record.at), f"config epoch {step.proof.epoch.number}"),
        ]
    )


def _with_taught(found: Located, step: Step, why: Notices) -> Notices:
    """Return the sentences on the reward, the first with a link to what the step pushed most if it trained something."""
    if step.record is None or is_idle(step.record.metrics):
        return why
    link = Link(f"calls and tokens that step {step.number} pushed most", to("pushed", found.key, step.number))
    first, *rest = why.notices
    return replace(why, notices=[replace(first, links=[*first.links, link]), *rest])


def _groups(found: Located, step: Step, address: Address, first: int) -> Table:
    ordered = sorted(step.groups, key=lambda group: (bool(group.untaught), -(group.spread or 0.0)))
    columns = [
        Column("group"),
        Column("task"),
        Column("rewards", hint="of its rollouts, in order; × failed, … not ended; behind | those of branches"),
        Column("mean", "number"),
        Column("spread", "number", "standard deviation: what there is to learn from"),
        Column("failed rollouts", "number"),
        Column("taught", hint="whether a rollout of it was trained"),
    ]
    if any(group.members[0].step != step.number for group in step.groups):
        columns.append(Column("begun in", "number", "the step that was next when it began"))
    pages = page_links(address, len(ordered), GROUPS)
    rows = [_row(found, step, group)[: len(columns)] for group in ordered[first : first + GROUPS]]
    note = "those that taught first, the largest spread first" if rows and step.record else ""
    return Table(columns, rows, title="Groups", empty="this step looked at no group", pages=pages, note=note)


def _row(found: Located, step: Step, group: TaskGroup) -> list[Cell]:
    here, task = to("group", found.key, group.id), group.members[0].task
    taught = "not yet" if step.record is None else "no" if group.untaught else "yes"
    told = [_reward(each) for each in group.members]
    if branches := sum(each.parent is not None for each in group.members):
        told.insert(len(told) - branches, "|")
    failed = sum(each.status is Status.FAILED for each in group.members)
    return [
        Cell(inside(found, group.id), here),
        Cell(written(task.input, 100) or task.id, here, hint=written(task.input, 2000)),
        Cell(" ".join(told[:24]) + (" …" if len(told) > 24 else ""), here),
        Cell(number(mean_of(group.rewards))),
        Cell(number(group.spread), tone="muted" if not group.spread else ""),
        Cell(str(failed), tone="warn" if failed else "muted"),
        Cell(taught, tone="muted" if group.untaught else "", hint=group.why),
        Cell(str(group.members[0].step)),
    ]


def _reward(rollout: Rollout) -> str:
    if rollout.reward is not None:
        return f"{rollout.reward:.3g}"
    return {Status.FAILED: "×", Status.CANCELLED: NONE}.get(rollout.status, "…")


def _scatter(found: Located, step: Step, axis: str) -> Chart:
    known = [
        (x, each)
        for each in step.proof.rollouts
        if (x := step.against[each.id][axis]) is not None and each.reward is not None
    ]
    taught = {group.id for group in step.groups if not group.untaught}
    clouds = {
        "taught": [pair for pair in known if pair[1].group in taught],
        "taught nothing": [pair for pair in known if pair[1].group not in taught],
    }
    if step.record is None:
        clouds = {"rollouts": known}
    series = [
        Series(
            name,
            [[float(x), each.reward] for x, each in own[:POINTS]],
            to=[to("rollout", found.key, each.id) for _, each in own[:POINTS]],
            hints=[_hint(found, step, each) for _, each in own[:POINTS]],
            tone="muted" if name == "taught nothing" else "",
        )
        for name, own in clouds.items()
        if own
    ]
    left = len(step.proof.rollouts) - len(known)
    return Chart(
        series,
        AGAINST[axis],
        "reward",
        kind="scatter",
        title=f"Reward against {AGAINST[axis]}",
        note=(f"{left} rollouts are not in it: they failed, or this is not known of them; " if left else "")
        + "a click opens the rollout",
        empty=step.unknown or "no rollout has both",
    )


def _hint(found: Located, step: Step, each: Rollout) -> str:
    known = step.against[each.id]
    parts = [inside(found, each.id)]
    parts += [counted(known["tokens"], "token"), counted(known["turns"], "call")] if known["turns"] is not None else []
    parts += [f"advantage {known['advantage']:+.3f}"] if known["advantage"] is not None else []
    return ", ".join([*parts, seconds(each.seconds)])


def _untaught(found: Located, step: Step) -> list[Block]:
    reasons = by_key((group for group in step.groups if group.untaught), lambda group: group.untaught)
    notices = [
        Notice(
            f"{len(own)} of {counted(len(step.groups), 'group')} taught nothing: {own[0].why}",
            "muted",
            detail=name,
            links=[Link(inside(found, group.id), to("group", found.key, group.id)) for group in own[:8]],
        )
        for name, own in sorted(reasons.items(), key=lambda each: -len(each[1]))
    ]
    return [Notices(notices, title="Groups that taught nothing")] if notices else []


def _failures(found: Located, step: Step) -> list[Block]:
    """Return the failed rollouts by fault and reason, the commonest first. Reasons that differ only in numbers are one."""

    def why(one: Rollout) -> tuple[str, str]:
        return one.fault.value if one.fault else "", re.sub(r"\d+", "N", str(reason(one.error)))

    reasons = by_key((one for one in step.proof.rollouts if one.status is Status.FAILED), why)
    notices = [
        Notice(
            f"{counted(len(own), 'rollout')}: {reason(own[0].error)}",
            "bad" if fault != "policy" else "warn",
            detail=FAULTS.get(fault, fault),
            links=[rollout_link(found, one.id) for one in own[:EXAMPLES]],
        )
        for (fault, _), own in sorted(reasons.items(), key=lambda each: -len(each[1]))
    ]
    return [Notices(notices, title="Failed rollouts")] if notices else []
