"""The page that compares runs: their curves, their held-out rewards, two of them task by task, and the settings that differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from lightning.errors import LightningError
from lightning.trainer.gains import margin
from lightning.types import by_key

from lightning_console.blocks import (
    Block,
    Cell,
    Chart,
    Column,
    Control,
    Controls,
    Link,
    Notice,
    Notices,
    Page,
    Series,
    Table,
)
from lightning_console.pages.versions import bounds_of, compare_versions, comparison_blocks
from lightning_console.pages.words import NONE, change, count, counted, name_of, number, seconds, to, written
from lightning_console.places import Located, Places
from lightning_console.queries.curves import (
    AXES,
    Axis,
    Curves,
    different_settings,
    gain_of,
    held_out_points,
    mean_and_spread,
    read_curves,
    total,
)
from lightning_console.queries.runs import points_of
from lightning_console.router import Address

MOST: Final = 24
"""Most runs that one page compares."""
MOST_CHOICES: Final = 200
"""Most evaluations that can be chosen for the comparison task by task."""
MEASURES: Final[Mapping[str, str]] = {
    "reward_with_failures": "reward, failed rollouts as 0",
    "reward": "reward of those that succeeded",
    "entropy": "entropy (nats)",
    "mean_logprob_gap": "trainer to sampler, mean |Δ logprob| (nats)",
    "approx_kl": "KL to the sampling policy (nats)",
    "clip_fraction": "share of clipped tokens",
    "grad_norm": "norm of the gradient",
    "failed": "failed rollouts",
    "tokens": "trained tokens of a step",
    "tokens_per_second": "sampled tokens per second",
    "staleness_mean": "age of the trained tokens (steps)",
}


@dataclass(frozen=True, slots=True)
class Compared:
    """A run to compare: its key in addresses, its name on the page, and its curves."""

    key: str
    name: str
    curves: Curves


async def page(places: Places, address: Address) -> Page:
    """Make the page `compare?runs=KEY,KEY&x=step|tokens|time&measure=&a=KEY@STEP&b=KEY@STEP&bounds=&success=`."""
    keys = list(dict.fromkeys(key for key in address.option("runs").split(",") if key))
    asked = address.option("x", "step")
    axis: Axis = "tokens" if asked == "tokens" else "time" if asked == "time" else "step"
    blocks: list[Block] = []
    read: list[tuple[Located, Curves]] = []
    for key in keys[:MOST]:
        try:
            found = await places.find(key)
            read.append((found, await read_curves(found.store, found.run)))
        except LightningError as error:
            blocks.append(Notices([Notice(f"{key} is left out", "bad", detail=str(error))]))
    ids = Counter(found.run.id for found, _ in read)
    runs = [Compared(found.key, name_of(found.run.id, found.url, ids[found.run.id] > 1), each) for found, each in read]
    if len(keys) > MOST:
        blocks.append(Notices([Notice(f"{MOST} of {len(keys)} runs are compared, the first ones", "warn")]))
    above = (Link("Runs", to("runs", runs=",".join(keys)) if keys else "runs"),)
    if not runs:
        say = Notice("no run is marked", detail="mark runs in the list, two or more", links=[Link("all runs", "runs")])
        return Page(str(address), "Compare", [*blocks, Notices([say])], above)
    curves = [each.curves for each in runs]
    groups = _by_seed(runs)
    measure = address.option("measure", "reward_with_failures")
    tasks, every = await _task_by_task(places, address, runs)
    blocks += [
        *tasks,
        _runs(groups),
        _controls(address, curves, axis, measure),
        _chart(groups, axis, measure),
        _held_out(groups, axis),
        *every,
        _settings(runs),
    ]
    title = f"Compare {counted(len(runs), 'run')}"
    return Page(str(address), title, blocks, above)


def _by_seed(runs: list[Compared]) -> dict[str, list[Compared]]:
    """Group the runs that differ only in their seed, by the name of the group; a single run keeps its own name."""
    alike = by_key(runs, lambda run: run.curves.about.alike)
    named = {}
    for place, own in enumerate(alike.values(), 1):
        seeds = {run.curves.about.seed for run in own}
        several = f"{len(own)} {'seeds of' if len(seeds) == len(own) else 'runs like'} {own[0].name}"
        named[own[0].name if len(own) == 1 else f"{place}: {several}"] = own
    return named


def _controls(address: Address, runs: list[Curves], axis: Axis, measure: str) -> Controls:
    there = {name for run in runs for name in run.names}
    known = [(name, label) for name, label in MEASURES.items() if name in there]
    other = sorted(name for name in there - MEASURES.keys() if name.startswith("reward/"))
    rest = sorted(there - MEASURES.keys() - set(other))
    choices = [
        *known,
        *((name, f"part {name.removeprefix('reward/')}") for name in other),
        *((name, name) for name in rest),
    ]
    return Controls(
        str(address),
        [
            Control("x", "over", axis, [(name, label) for name, label in AXES.items()]),
            Control("measure", "measure", measure, choices),
        ],
    )


def _runs(groups: Mapping[str, list[Compared]]) -> Table:
    columns = [
        Column("alike", hint="runs with one number differ in nothing but their seed, or in nothing at all"),
        Column("run"),
        Column("seed", "number"),
        Column("steps", "number"),
        Column("held-out", "number", "the first evaluation and the last, failed rollouts as 0"),
        Column("± (95 %)", "number", "of the last evaluation"),
        Column("last reward", "number", "of training, failed rollouts as 0"),
        Column("80 % of the gain", "number", "after so many steps and seconds of training"),
        Column("trained tokens", "number"),
    ]
    rows = []
    for name, group in groups.items():
        for each in group:
            run = each.curves
            held_out, gain = run.evaluations, gain_of(run)
            last = held_out[-1] if held_out else None
            reward = run.named("reward_with_failures")
            seed = run.about.seed
            rows.append(
                [
                    Cell(name.partition(":")[0] if len(group) > 1 else NONE, tone="muted"),
                    Cell(each.name, to("run", each.key)),
                    Cell(NONE if seed is None else str(seed)),
                    Cell(str(len(run.steps))),
                    Cell(
                        change(held_out[0].score, last.score if last and len(held_out) > 1 else None)
                        if held_out
                        else "none"
                    ),
                    Cell(number(margin(last) if last else None)),
                    Cell(number(reward[-1] if reward else None)),
                    Cell(
                        f"{counted(gain.steps, 'step')}, {seconds(gain.seconds)}" if gain else NONE,
                        hint=gain.measure if gain else "",
                    ),
                    Cell(count(total(run.named("tokens")))),
                ]
            )
    return Table(columns, rows, title="Runs")


def _chart(groups: Mapping[str, list[Compared]], axis: Axis, measure: str) -> Chart:
    series = []
    for name, own in groups.items():
        if len(own) > 1:
            points = mean_and_spread([(run.x(axis), run.named(measure)) for run in (each.curves for each in own)])
            series.append(Series(name, points))
        else:
            key, run = own[0].key, own[0].curves
            points, places = points_of(run.x(axis), run.named(measure))
            series.append(Series(name, points, to=[to("step", key, run.steps[place]) for place in places]))
    several = any(len(group) > 1 for group in groups.values())
    return Chart(
        [each for each in series if any(point[1] is not None for point in each.points)],
        AXES[axis],
        MEASURES.get(measure, measure),
        whole=axis == "step",
        title=MEASURES.get(measure, measure),
        note="of several runs with the same settings: their mean, with the least and the most of them"
        if several
        else "",
        empty="none of these runs has this measure",
    )


def _held_out(groups: Mapping[str, list[Compared]], axis: Axis) -> Chart:
    series = []
    for name, group in groups.items():
        own = [held_out_points(each.curves, axis) for each in group]
        if len(own) == 1:
            series.append(Series(name, own[0]))
        else:
            pairs = [
                ([x for point in each if (x := point[0]) is not None], [point[1] for point in each]) for each in own
            ]
            series.append(Series(name, mean_and_spread(pairs)))
    several = any(len(group) > 1 for group in groups.values())
    return Chart(
        [each for each in series if each.points],
        AXES[axis],
        "held-out reward",
        whole=axis == "step",
        title="Held-out tasks",
        note="with the interval of 95 %; failed rollouts count as 0"
        + ("; of several runs with the same settings the mean, with the least and the most of them" if several else ""),
        empty="none of these runs has held-out tasks, or none was evaluated yet",
    )


async def _task_by_task(places: Places, address: Address, runs: list[Compared]) -> tuple[list[Block], Sequence[Block]]:
    """Compare two held-out evaluations of these runs task by task: those that the address names as `a` and `b`, by default the
    last ones of the first two runs, or the first and the last one of a single run. Return the verdict with the tasks that one
    of them alone solves, and the details."""
    evaluated = [each for each in runs if each.curves.evaluations]
    names = {
        f"{run.key}@{each.step}": f"{run.name} after {counted(each.step, 'step')}"
        for run in evaluated
        for each in run.curves.evaluations
    }
    blocks: list[Block] = []
    if missing := [each.name for each in runs if each not in evaluated]:
        text = f"no held-out evaluation of {', '.join(missing)}: its tasks cannot be compared one by one"
        blocks.append(Notices([Notice(text, "muted", "give fit() `val` tasks, or use `lightning eval`")]))
    if len(names) < 2:
        return blocks, []
    usual = [next(iter(names)), next(reversed(names))]
    if len(evaluated) > 1:
        usual = [f"{each.key}@{each.curves.evaluations[-1].step}" for each in evaluated[:2]]
    a, b = address.option("a", usual[0]), address.option("b", usual[1])
    choices = list(names.items())[:MOST_CHOICES]
    sides = Controls(str(address.having(cursor=None)), [Control("a", "A", a, choices), Control("b", "B", b, choices)])
    try:
        found = await compare_versions(places, a, b, bounds_of(address))
    except LightningError as error:
        why = Notice("these two cannot be compared", "warn", str(error))
        return [*blocks, sides, Notices([why], title="Task by task")], []
    made = await comparison_blocks(found, address, f"A is {names.get(a, a)}, B is {names.get(b, b)}")
    controls = replace(sides, controls=[*made.filter.controls, *sides.controls])
    return [made.verdict, *blocks, controls, *made.solved], made.details


def _settings(runs: list[Compared]) -> Table:
    different = different_settings([each.curves for each in runs])
    return Table(
        [Column("setting"), *(Column(each.name) for each in runs)],
        [
            [
                Cell(name),
                *(Cell(NONE if value is None else written(value, 80), hint=written(value, 1000)) for value in values),
            ]
            for name, values in different.items()
        ],
        title="Settings that differ",
        folded=True,
        empty="these runs have the same settings" if len(runs) > 1 else "mark another run to compare settings",
        note="settings that change how a run is done and not what it learns are left out (ports, trackers, checkpoints, ...); "
        "of a run that changed its settings on the way the last ones are shown",
    )
