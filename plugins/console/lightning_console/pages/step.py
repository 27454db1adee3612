"""One step: which groups taught, which did not and why, and each rollout as a point."""

from __future__ import annotations

from typing import Final

from lightning.errors import DataError
from lightning.types import Status

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
from lightning_console.pages.words import count, located, number, seconds, share, to, trail, when, written
from lightning_console.places import Located, Places
from lightning_console.queries.runs import line_of
from lightning_console.queries.steps import GroupLine, RolloutPoint, Step, read_step
from lightning_console.router import Address

GROUPS: Final = 50
"""Groups on a page."""
POINTS: Final = 2000
"""Rollouts in a scatter."""
FAULTS: Final = {
    "agent": "the agent's code is at fault",
    "policy": "the policy itself is at fault",
    "timeout": "it ran out of time",
    "infrastructure": "the infrastructure is at fault",
}
AGAINST: Final = {"tokens": "sampled tokens", "turns": "calls", "advantage": "advantage", "seconds": "seconds"}


async def page(places: Places, address: Address) -> Page:
    """`step/KEY/N?cursor=&x=tokens|turns|advantage|seconds`."""
    found = await located(places, address)
    if len(address.about) < 2 or not address.about[1].isdecimal():
        raise DataError(f"the address {str(address)!r} names no step: step/RUN/NUMBER, counted from 0")
    step = await read_step(found.store, found.run, int(address.about[1]))
    first = max(0, address.number("cursor", 0))
    axis = address.option("x") if address.option("x") in AGAINST else "tokens" if step.committed else "seconds"
    blocks: list[Block] = [*_notices(step), _facts(step), _groups(found, step, address, first)]
    blocks += [
        Controls(str(address), [Control("x", "against", axis, list(AGAINST.items()))]),
        _scatter(found, step, axis),
    ]
    blocks += _untaught(found, step)
    blocks += _failures(found, step)
    goes_on = await _goes_on(found)
    is_last = step.last is None or step.step >= step.last
    return Page(
        str(address),
        f"Step {step.step}",
        blocks,
        trail(found),
        live=not step.committed and goes_on,
        previous=to("step", found.key, step.step - 1) if step.step else "",
        next=to("step", found.key, step.step + 1) if not is_last or (step.committed and goes_on) else "",
    )


async def _goes_on(found: Located) -> bool:
    return (await line_of(found.store, found.run, found.url)).state.name == "running"


def _notices(step: Step) -> list[Block]:
    notices = []
    if not step.committed:
        notices.append(
            Notice(
                "this step is not committed", "warn", detail="these are the rollouts that were begun for it up to now"
            )
        )
    if step.unread:
        notices.append(Notice(step.unread, "warn", detail="lengths, turns and advantages are not known; rewards are"))
    elif step.unknown and step.committed:
        notices.append(Notice("advantages are not known", "warn", detail=step.unknown))
    return [Notices(notices)] if notices else []


def _facts(step: Step) -> Facts:
    metrics = step.metrics
    failed = sum(rollout.status.value == "failed" for rollout in step.rollouts)
    rewards = [rollout.reward for rollout in step.rollouts if rollout.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    facts = [
        Fact(
            "reward",
            number(metrics.get("reward_with_failures", mean)),
            f"{number(metrics.get('reward', mean))} of those that succeeded" if failed else "",
            hint="the larger figure counts failed rollouts as 0" if failed and step.committed else "",
        ),
        Fact(
            "rollouts",
            count(len(step.rollouts)),
            f"{failed} failed",
            "warn" if failed > 0.1 * len(step.rollouts) else "",
        ),
    ]
    if not step.committed:
        ended = sum(rollout.status.ended for rollout in step.rollouts)
        return Facts([*facts, Fact("ended", f"{ended} of {len(step.rollouts)}")])
    return Facts(
        [
            *facts,
            Fact("groups that taught", f"{sum(not group.untaught for group in step.groups)} of {len(step.groups)}"),
            Fact("trained tokens", count(metrics.get("tokens"))),
            Fact("entropy", number(metrics.get("entropy")), "nats"),
            Fact("mean |Δ logprob|", number(metrics.get("mean_logprob_gap")), "trainer to sampler, nats"),
            Fact("clipped", share(metrics.get("clip_fraction")), f"masked {share(metrics.get('masked_share'))}"),
            Fact("norm of the gradient", number(metrics.get("grad_norm"))),
            Fact("version", f"v{step.policy_version}", "that this step made"),
            Fact("committed", when(step.at), f"config epoch {step.epoch}"),
        ]
    )


def _groups(found: Located, step: Step, address: Address, first: int) -> Table:
    ordered = sorted(step.groups, key=lambda group: (bool(group.untaught), -(group.spread or 0.0)))
    shown = ordered[first : first + GROUPS]
    columns = [
        Column("task"),
        Column("rewards", hint="of its rollouts, in order; × failed, … not ended; behind | those of branches"),
        Column("mean", "number"),
        Column("spread", "number", "standard deviation: what there is to learn from"),
        Column("failed", "number"),
        Column("taught", hint="whether a rollout of it was trained"),
    ]
    if any(group.step != step.step for group in step.groups):
        columns.append(Column("begun in", "number", "the step whose policy it was begun with"))
    pages = [
        Link(f"{start + 1}–{min(start + GROUPS, len(ordered))}", str(address.having(cursor=start or None)))
        for start in range(0, len(ordered), GROUPS)
        if len(ordered) > GROUPS
    ]
    rows = [_row(found, step, group)[: len(columns)] for group in shown]
    note = "those that taught first, the largest spread first" if step.committed else ""
    return Table(
        columns, rows, title="Groups", empty="this step looked at no group", pages=pages, note=note if rows else ""
    )


def _row(found: Located, step: Step, group: GroupLine) -> list[Cell]:
    here = to("group", found.key, group.group)
    taught = "not yet" if not step.committed else "no" if group.untaught else "yes"
    told = [_reward(reward, state) for reward, state in zip(group.rewards, group.states, strict=True)]
    if group.branches:
        told.insert(len(told) - group.branches, "|")
    rewards = " ".join(told[:24])
    return [
        Cell(written(group.task, 100) or group.task_id, here, hint=written(group.task, 2000)),
        Cell(rewards + (" …" if len(told) > 24 else ""), here),
        Cell(number(group.mean)),
        Cell(number(group.spread), tone="muted" if not group.spread else ""),
        Cell(str(group.failed), tone="warn" if group.failed else "muted"),
        Cell(taught, tone="muted" if group.untaught else "", hint=group.why),
        Cell(str(group.step)),
    ]


def _reward(reward: float | None, state: Status) -> str:
    return "×" if state is Status.FAILED else "…" if reward is None else f"{reward:.3g}"


def _scatter(found: Located, step: Step, axis: str) -> Chart:
    known = [(x, each) for each in step.rollouts if (x := getattr(each, axis)) is not None and each.reward is not None]
    taught = {group.group for group in step.groups if not group.untaught}
    clouds = {
        "taught": [pair for pair in known if pair[1].group in taught],
        "taught nothing": [pair for pair in known if pair[1].group not in taught],
    }
    if not step.committed:
        clouds = {"rollouts": known}
    series = [
        Series(
            name,
            [[float(x), each.reward] for x, each in own[:POINTS]],
            to=[to("rollout", found.key, each.rollout) for _, each in own[:POINTS]],
            hints=[_hint(found, each) for _, each in own[:POINTS]],
            tone="muted" if name == "taught nothing" else "",
        )
        for name, own in clouds.items()
        if own
    ]
    left = len(step.rollouts) - len(known)
    return Chart(
        series,
        AGAINST[axis],
        "reward",
        kind="scatter",
        title=f"Reward against {AGAINST[axis]}",
        note=(f"{left} rollouts are not in it: they failed, or this is not known of them; " if left else "")
        + "a click opens the rollout",
        empty=step.unread or step.unknown or "no rollout has both",
    )


def _hint(found: Located, each: RolloutPoint) -> str:
    parts = [each.rollout.removeprefix(f"{found.run.id}/")]
    parts += [f"{each.tokens} tokens"] if each.tokens is not None else []
    parts += [f"{each.turns} calls"] if each.turns is not None else []
    parts += [f"advantage {each.advantage:+.3f}"] if each.advantage is not None else []
    return ", ".join([*parts, seconds(each.seconds)])


def _untaught(found: Located, step: Step) -> list[Block]:
    reasons: dict[str, list[GroupLine]] = {}
    for group in step.groups:
        if group.untaught:
            reasons.setdefault(group.untaught, []).append(group)
    if not reasons:
        return []
    notices = [
        Notice(
            f"{len(own)} of {len(step.groups)} groups taught nothing: {own[0].why}",
            "muted",
            detail=name,
            links=[
                Link(group.group.removeprefix(f"{found.run.id}/"), to("group", found.key, group.group))
                for group in own[:8]
            ],
        )
        for name, own in sorted(reasons.items(), key=lambda each: -len(each[1]))
    ]
    return [Notices(notices, title="Groups that taught nothing")]


def _failures(found: Located, step: Step) -> list[Block]:
    if not step.failures:
        return []
    notices = [
        Notice(
            f"{each.count} {'rollout' if each.count == 1 else 'rollouts'}: {each.why}",
            "bad" if each.fault != "policy" else "warn",
            detail=FAULTS.get(each.fault, each.fault),
            links=[Link(one.removeprefix(f"{found.run.id}/"), to("rollout", found.key, one)) for one in each.rollouts],
        )
        for each in step.failures
    ]
    return [Notices(notices, title="Failed rollouts")]
