"""The same held-out tasks under two versions side by side; without two, which there are."""

from __future__ import annotations

from lightning.errors import DataError

from lightning_console.blocks import Block, Cell, Column, Fact, Facts, Link, Notice, Notices, Page, Table, Tone
from lightning_console.pages.words import NONE, count, number, to, tone_of, when, written
from lightning_console.places import Places
from lightning_console.queries.versions import (
    EvaluatedVersion,
    Regression,
    Side,
    VersionComparison,
    compare_versions,
    evaluated_versions,
)
from lightning_console.router import Address

ABOVE = (Link("Runs", "runs"),)
MOST_ROWS = 200


async def page(places: Places, address: Address) -> Page:
    """The comparison that an address names, or what can be compared."""
    names = [name for name in address.option("of").split(",") if name]
    if len(names) < 2:
        return await _choices(places, address, names)
    if len(names) > 2:
        raise DataError(f"two versions are compared, and the address names {len(names)}: versions?of=RUN@STEP,RUN@STEP")
    found = await compare_versions(places, names[0], names[1], _bounds(address))
    blocks: list[Block] = [_facts(found), *_words(found), _regressions(found), _tasks(found)]
    trail = (*ABOVE, Link("Versions", "versions"))
    return Page(str(address), f"{found.a.name} beside {found.b.name}", blocks, trail)


def _bounds(address: Address) -> tuple[float, float]:
    low, _, high = address.option("bounds", "0,1").partition(",")
    try:
        found = float(low), float(high)
    except ValueError:
        raise DataError("bounds in the address are two numbers: bounds=0,1") from None
    if not found[0] < found[1]:
        raise DataError(f"no reward lies from {found[0]:g} to {found[1]:g}: bounds=LOW,HIGH")
    return found


async def _choices(places: Places, address: Address, marked: list[str]) -> Page:
    versions, unreadable = await evaluated_versions(places)
    rows = [
        [
            Cell(each.run, to("run", each.key)),
            Cell(str(each.result.step)),
            Cell(number(each.result.reward)),
            Cell(number(each.result.reward_with_failures)),
            Cell(count(each.result.rollouts)),
            Cell(count(each.result.failed), tone="bad" if each.result.failed else ""),
            Cell(when(each.created_at)),
        ]
        for each in versions
    ]
    columns = [
        Column("run"),
        Column("after steps", "number"),
        Column("reward", "number"),
        Column("failed as 0", "number"),
        Column("rollouts", "number"),
        Column("failed", "number"),
        Column("run began"),
    ]
    blocks: list[Block] = [
        Table(
            columns,
            rows,
            keys=[each.name for each in versions],
            select="of",
            selected=marked,
            title="Held-out evaluations",
            note="mark two: the first that is marked is what the other is compared with",
            empty="no run here was evaluated on held-out tasks: give fit() `val` tasks, or use `lightning eval`",
        )
    ]
    if ready := _ready(versions):
        notice = Notice(
            "or compare the two variants of an A/B, or the first and the last evaluation of a run", links=ready
        )
        blocks.insert(0, Notices([notice]))
    if unreadable:
        blocks.insert(0, Notices([Notice(f"{url} cannot be read", "bad", why) for url, why in unreadable.items()]))
    return Page(str(address), "Compare versions", blocks, ABOVE)


def _ready(versions: list[EvaluatedVersion]) -> list[Link]:
    """Pairs that one would want to compare."""
    names = {each.name for each in versions}
    links = []
    for key in dict.fromkeys(each.key for each in versions):
        own = [each for each in versions if each.key == key]
        other = f"{key.removesuffix('.a')}.b@0"
        if key.endswith(".a") and other in names:
            links.append(Link(f"{own[0].name} and {other}", to("versions", of=f"{own[0].name},{other}")))
        elif len(own) > 1:
            links.append(Link(f"{key}: first and last", to("versions", of=f"{own[0].name},{own[-1].name}")))
    return links[:20]


def _facts(found: VersionComparison) -> Facts:
    given = found.interval
    tone: Tone = "" if given is None or given[0] <= 0 <= given[1] else "good" if given[0] > 0 else "bad"
    how = "95 %, holds at any time" if found.anytime else "95 %"
    detail = f"{given[0]:+.3f} to {given[1]:+.3f} ({how})" if given else "no interval"
    difference = NONE if found.difference is None else f"{found.difference:+.3f}"
    return Facts(
        [
            Fact("B less A", difference, detail, tone),
            Fact("wins", count(found.wins), "tasks on which B is better", "good" if found.wins else ""),
            Fact("losses", count(found.losses), "tasks on which A is better", "bad" if found.losses else ""),
            Fact("ties", count(found.ties), "tasks on which both are alike"),
            _side("A", found.a),
            _side("B", found.b),
        ]
    )


def _side(name: str, side: Side) -> Fact:
    detail = f"{side.name}, {count(side.rollouts)} rollouts"
    return Fact(name, number(side.mean), detail, to=to("run", side.located.key))


def _words(found: VersionComparison) -> list[Block]:
    said = []
    if found.interval is None:
        low, high = found.bounds
        said.append(
            Notice(
                f"there is no interval: rewards lie outside of {low:g} to {high:g}",
                "warn",
                "say in the address what rewards can be: &bounds=LOW,HIGH",
            )
        )
    elif found.interval[0] <= 0 <= found.interval[1]:
        said.append(
            Notice("A and B are not told apart: more tasks, or more rollouts of each, tell smaller differences")
        )
    if found.only_a or found.only_b:
        said.append(
            Notice(f"{found.only_a} tasks were given to A alone and {found.only_b} to B alone: they are in no figure")
        )
    if found.lost_pairs:
        said.append(Notice(f"{found.lost_pairs} pairs were lost to the infrastructure and are in no figure", "warn"))
    return [Notices(said)] if said else []


def _regressions(found: VersionComparison) -> Table:
    rows = [
        [
            Cell(written(each.input, 100), hint=each.task.task),
            Cell(number(each.task.a), to("rollout", found.a.located.key, each.task.rollout_a)),
            Cell(number(each.task.b), to("rollout", found.b.located.key, each.task.rollout_b)),
            Cell(f"{each.task.difference:+.3f}", tone="bad"),
            Cell(_where(each), _call(found, each)),
            Cell(each.call.a if each.call else ""),
            Cell(each.call.b if each.call else ""),
        ]
        for each in found.regressions
    ]
    columns = [
        Column("task"),
        Column("A", "number"),
        Column("B", "number"),
        Column("B less A", "number"),
        Column("first call that differs"),
        Column("in A"),
        Column("in B"),
    ]
    title = f"Worst regressions ({len(rows)} of {found.losses})"
    return Table(columns, rows, title=title, empty="B is worse on no task")


def _where(each: Regression) -> str:
    if each.unread:
        return f"cannot be read: {each.unread}"
    if each.call is None:
        return "no call differs: the agent's own code or its tools gave another reward"
    return f"call {each.call.number} ({each.call.caller}), in {each.call.where}"


def _call(found: VersionComparison, each: Regression) -> str:
    """The page of the call in A; of the rollout in B where only that made it."""
    if each.call is None or (each.call.where == "calls" and each.call.a == "no such call"):
        return to("rollout", found.b.located.key, each.task.rollout_b)
    return to("rollout", found.a.located.key, each.task.rollout_a, call=each.call.number)


def _tasks(found: VersionComparison) -> Table:
    rows = [
        [
            Cell(written(found.inputs[each.task], 100) or each.task, hint=each.task),
            Cell(number(each.a), to("rollout", found.a.located.key, each.rollout_a)),
            Cell(number(each.b), to("rollout", found.b.located.key, each.rollout_b)),
            Cell(f"{each.difference:+.3f}", tone=tone_of(each.difference)),
        ]
        for each in sorted(found.tasks, key=lambda one: one.difference)[:MOST_ROWS]
    ]
    columns = [Column("task"), Column("A", "number"), Column("B", "number"), Column("B less A", "number")]
    more = len(found.tasks) - len(rows)
    note = f"the worst {MOST_ROWS} of {count(len(found.tasks))} tasks: on the others B does better" if more > 0 else ""
    return Table(columns, rows, title="Every task, the worst first", note=note)
