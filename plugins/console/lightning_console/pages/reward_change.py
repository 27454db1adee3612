"""The part of a step's page that says why its reward differs from that of the step before, in sentences and two tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lightning_console.blocks import Block, Cell, Column, Link, Notice, Notices, Table, Tone
from lightning_console.pages.words import NONE, count, counted, inside, number, share, to, tone_of, written
from lightning_console.places import Located
from lightning_console.queries.reward_change import FAILED_TOOL, Difficulty, GroupReward, RewardChange

TITLE: Final = "Why the reward moved"
CHANCE: Final = 0.05
"""A difference that arises by chance more often than this cannot be told from chance."""
MOST_OF: Final = 0.7
"""A few groups make the change if they have this share of it, and are at most half of the groups."""
MOSTLY: Final = 0.5
"""A kind of rollouts may be the cause of a step's reward from this share of its rollouts on, ..."""
GROWN: Final = 0.25
"""... if its share has grown by this much since the step before."""
SHOWN: Final = 10
"""Groups that are listed."""
UNABLE: Final = "The tool may not be able to do these tasks"
SMALL: Final = 0.0005
"""Rewards that differ by less are the same on a page."""


def change_blocks(
    found: Located,
    change: RewardChange | str | None,
    untaught: Sequence[Notice] = (),
    same_since: int | None = None,
) -> tuple[Notices, list[Block]]:
    """Return the sentences that explain a step's reward, and the tables behind them. A text says why there is no explanation;
    None means that it is still being computed. `untaught` says that the step trained nothing, `same_since` after which step the
    weights have been the same ones (0: from the start), if both steps were sampled with the same weights."""
    if change is None:
        waits = Notice("the rewards of this step and the one before are compared …", "muted")
        return Notices([waits, *untaught], title=TITLE), []
    if isinstance(change, str):
        nothing = Notice("There is nothing to compare", "muted", detail=change)
        return Notices([nothing, *untaught], title=TITLE), []
    cause = _cause(found, change)
    notices = [_lead(found, change, same_since), *cause, *untaught]
    notices += [] if any(UNABLE in each.detail for each in cause) else [_tasks(change)]
    if change.open:
        going = (
            f"{counted(change.open, f'rollout of step {change.step} has', f'rollouts of step {change.step} have')} not "
            "ended: its reward is that of the others"
        )
        notices.insert(0, Notice(going, "warn"))
    if change.lost:
        notices.append(
            Notice(
                counted(
                    change.lost,
                    "rollout was lost to the infrastructure and is left out",
                    "rollouts were lost to the infrastructure and are left out",
                ),
                "warn",
            )
        )
    if abs(change.rest) >= SMALL and change.equal is None and change.equal_before is None:
        notices.append(_groups_notice(change))
    if change.unread:
        text = "Whether cut off answers or failed tools explain it is not known"
        notices.append(Notice(text, "muted", detail=change.unread))
    return Notices(notices, title=TITLE), [*_beside(change), _groups(found, change)]


def _cause(found: Located, change: RewardChange) -> list[Notice]:
    """Name the kind of rollouts whose share changed with the reward, where that explains much of it or all rollouts earned the
    same."""
    grown = [each for each in change.beside if each.now >= MOSTLY and each.now - each.before >= GROWN]
    explains = [each for each in grown if (each.accounts or 0.0) * change.difference > 0]
    likely = [
        each for each in explains if change.equal is not None or abs(each.accounts or 0.0) >= abs(change.difference) / 2
    ]
    equal = "" if change.equal is None else f"All rollouts of step {change.step} earned {number(change.equal)}. "
    if not likely and change.equal_before is not None:
        return _ended_cause(change)
    if not likely and change.difference >= 0:
        return [Notice(equal.rstrip(". "))] if equal else []
    if not likely:
        return [Notice(f"{equal}No kind of failure explains it", "warn")] if equal else []
    cause = max(likely, key=lambda each: abs(each.accounts or 0.0))
    text = (
        f"{equal}The most probable cause: {cause.name}, {share(cause.now)} of all ({share(cause.before)} in step "
        f"{change.earlier})"
    )
    error, times = change.tool_error
    if cause.name != FAILED_TOOL or not error:
        return [Notice(text, "warn")]
    fails = "" if not change.tool_arguments else f", if {change.tool_arguments}"
    cannot = f". {UNABLE}" if equal else ""
    if cannot and not change.same:
        harder = "whether they are harder otherwise is not known"
        cannot += f"; {harder if change.difficulty is None else _explains(change, change.difficulty)}"
    links = [Link("their tool runs", to("tools", found.key, split="train", step=change.step))]
    return [Notice(text, "warn", f"most often {error} ({counted(times, 'time')}){fails}{cannot}", links)]


def _ended_cause(change: RewardChange) -> list[Notice]:
    """Name the kind of rollouts that most of the step before were, where all of these earned the same and the step has far
    fewer."""
    gone = [each for each in change.beside if each.before >= MOSTLY and each.before - each.now >= GROWN]
    if not gone:
        return []
    most = max(gone, key=lambda each: each.before - each.now)
    return [
        Notice(
            f"All rollouts of step {change.earlier} earned {number(change.equal_before)}. The most probable cause: "
            f"{most.name}, {share(most.before)} of all ({share(most.now)} in step {change.step})"
        )
    ]


def _lead(found: Located, change: RewardChange, same_since: int | None) -> Notice:
    """Say by how much the reward moved, and first of all whether that can be told from chance."""
    links = [Link(f"step {change.earlier}", to("step", found.key, change.earlier))]
    means = f"from step {change.earlier} ({number(change.before)}) to step {change.step} ({number(change.now)})"
    if abs(change.difference) < SMALL:
        return Notice(f"The reward did not move {means}", links=links)
    fell = change.difference < 0
    text = f"{'fell' if fell else 'rose'} by {number(abs(change.difference))} {means}"
    if change.least > CHANCE:
        few = f"With {len(change.others)} and {len(change.groups)} groups no difference could be told from chance"
        return Notice(f"This may be chance: the reward {text}", "muted", detail=few, links=links)
    if change.p > CHANCE:
        return Notice(f"{_by_chance(change)}: the reward {text}", "muted", _deals(change), links, folded=True)
    tone: Tone = "warn" if fell else "good" if same_since is None else ""
    since = f"since step {same_since}" if same_since else "since the start"
    lead = "The reward" if same_since is None else f"The model did not change {since}: the reward"
    often = f"about {100 * change.p:.0f} of" if change.p >= 0.01 else "less than one of"
    beware = f"{_deals(change)}. Among 100 steps, {often} them would move so much by chance alone"
    return Notice(f"{lead} {text}, and chance alone hardly explains it", tone, beware, links, folded=True)


def _by_chance(change: RewardChange) -> str:
    """Say what may be chance: the change, or the part of it that the tasks do not explain."""
    known = change.difficulty
    if known is None or not known.is_sure:
        return "This may be chance"
    if known.explained * change.difference > 0 and abs(known.explained) >= abs(change.difference) / 2:
        return f"{_harder(known)} tasks explain it, and the rest may be chance"
    return "Apart from the tasks, this may be chance"


def _harder(known: Difficulty) -> str:
    return "Harder" if known.explained < 0 else "Easier"


def _deals(change: RewardChange) -> str:
    """Say in plain words what the p-value means."""
    many = f"{100 * change.p:.0f} of 100" if change.p >= 0.01 else f"{1000 * change.p:.0f} of 1000"
    if change.same:
        return (
            f"Both steps had the same {len(change.groups)} tasks. If each task's change were up or down at random, the mean "
            f"would move as much or more in {many} cases"
        )
    total = len(change.groups) + len(change.others)
    apart = "" if change.difficulty is None else ", each put right by the difficulty of its task,"
    return (
        f"Rollouts of one task resemble each other, so the test counts groups: {len(change.others)} and "
        f"{len(change.groups)}. If these {total} groups{apart} were dealt to the two steps at random, the means would differ "
        f"as much or more in {many} deals"
    )


def _tasks(change: RewardChange) -> Notice:
    """Say what the difficulty of the tasks explains."""
    if change.same:
        return Notice("The tasks explain nothing of it: both steps had the same ones")
    known = change.difficulty
    if known is None:
        return Notice("Whether the tasks were harder or easier is not known", "muted", _unknown(change), folded=True)
    return Notice(_explains(change, known), detail=_elsewhere(change, known), folded=True)


def _unknown(change: RewardChange) -> str:
    """Say why the difficulty of the tasks is not known, and what the groups of the step say instead."""
    many = f"Only {change.seen} of the tasks of both steps" if change.seen else "No task of either step"
    why = (
        f"{many} {'were' if change.seen > 1 else 'was'} given in another step or an evaluation of this run, and only the "
        "rewards of the same task elsewhere would tell. "
    )
    means = sorted(each.mean for each in change.groups)
    if len(means) < 2 or means[-1] - means[0] < SMALL:
        return f"{why}The groups of step {change.step} do not differ" if len(means) > 1 else why.strip()
    return (
        f"{why}Within step {change.step} alone the groups earned from {number(means[0])} to {number(means[-1])}: other tasks "
        "can move the mean of so few groups by much"
    )


def _explains(change: RewardChange, known: Difficulty) -> str:
    explained, fell, harder = known.explained, change.difference < 0, _harder(known)
    if not known.is_sure:
        return "The tasks of both steps were about equally hard, as far as other steps tell"
    if abs(change.difference) < SMALL:
        return f"{harder} tasks would have moved it by {explained:+.3f}"
    if (explained < 0) != fell:
        return f"The tasks do not explain it: they were {harder.lower()}, which alone would have moved it by {explained:+.3f}"
    if abs(explained) >= abs(change.difference):
        return f"{harder} tasks explain all of it: they alone would have moved it by {explained:+.3f}"
    return f"{harder} tasks explain about {number(abs(explained))} of it"


def _elsewhere(change: RewardChange, known: Difficulty) -> str:
    middle = "than the mean there" if "evaluation" in known.where else "than the steps around"

    def said(value: float) -> str:
        return f"{number(abs(value))} {'less' if value < 0 else 'more'} {middle}"

    many = f"{known.known_now} of {len(change.groups)} and {known.known_before} of {len(change.others)} tasks were seen there"
    return (
        f"{known.where.capitalize()}, the tasks of step {change.step} earned {said(known.now)}, and those of step "
        f"{change.earlier} {said(known.before)} (the difference is known to ±{number(2 * known.error)}; {many})"
    )


def _groups_notice(change: RewardChange) -> Notice:
    """Say whether a few groups make the change."""
    rest = (
        "" if change.difficulty is None else f"Without what the tasks explain, the reward moved by {change.rest:+.3f}. "
    )
    own, others = _same_way(change)
    total, back = sum(own), sum(others)
    spread = f"{rest}No few groups make the change: {len(own)} of {len(change.groups)} groups went this way"
    if not own:
        return Notice(spread)
    few = next(place for place in range(1, len(own) + 1) if sum(own[:place]) >= MOST_OF * total)
    gave = f"; the other way went {number(back)}" if back >= SMALL else ""
    if len(change.groups) == 1:
        return Notice("The step has one group, which makes all of it")
    if 2 * few > len(change.groups):
        return Notice(spread)
    groups = f"{few} of {len(change.groups)} groups {'makes' if few == 1 else 'make'}"
    text = f"{groups} {share(sum(own[:few]) / total)} of what went {'down' if change.rest < 0 else 'up'}"
    moved = f"They moved the step's mean by {number(sum(own[:few]))}, all groups that went this way by {number(total)}{gave}"
    return Notice(f"{rest}{text}", detail=moved)


def _same_way(change: RewardChange) -> tuple[list[float], list[float]]:
    """Return how much groups moved the mean in the direction of the change, and in the other, the strongest first."""
    sign = -1.0 if change.rest < 0 else 1.0
    moves = [sign * each.moved for each in change.groups]
    return sorted((each for each in moves if each > 0), reverse=True), [-each for each in moves if each < 0]


def _beside(change: RewardChange) -> list[Block]:
    """Return the table of failures, answers that were cut off and failed tools; none if there were none, or if all rollouts of
    one of the steps earned the same: then no kind of them earned less than the others."""
    if change.equal is not None or change.equal_before is not None:
        return []
    rows = [
        [
            Cell(each.name),
            Cell(share(each.before)),
            Cell(share(each.now)),
            Cell(number(each.earned)),
            Cell(number(each.others)),
            Cell(NONE if each.accounts is None else f"{each.accounts:+.3f}", tone=tone_of(each.accounts)),
        ]
        for each in change.beside
    ]
    both = f"steps {change.earlier} and {change.step}"
    columns = [
        Column("what"),
        Column(f"share in step {change.earlier}", "number"),
        Column(f"share in step {change.step}", "number"),
        Column(f"they earned in {both}", "number", "the mean of the two steps' means"),
        Column(f"the others earned in {both}", "number", "the mean of the two steps' means"),
        Column("moved the reward by", "number", "change of the share, times the difference of what they earned"),
    ]
    note = "these overlap with each other and with the difficulty of the tasks: do not add them up"
    return [Table(columns, rows, title="What else changed", note=note)] if rows else []


def _groups(found: Located, change: RewardChange) -> Table:
    own, _ = _same_way(change)
    total = sum(own)
    columns = [
        Column("group"),
        Column("task"),
        Column("earned", "number", "mean of its rollouts, failed ones as 0"),
        Column("rollouts", "number"),
        Column("moved the mean by", "number"),
        Column("share", "number", "of what all groups that went this way moved"),
    ]
    rows = [_row(found, each, change.rest, total) for each in change.groups[:SHOWN]]
    beside = "what the same task earned in the step before" if change.same else f"the mean of step {change.earlier}"
    note = f"the strongest first; beside {beside}" + (
        ", put right by what the same tasks earned elsewhere" if change.difficulty is not None else ""
    )
    if len(change.groups) > SHOWN:
        note += f"; {len(change.groups) - SHOWN} more groups moved it less"
    return Table(columns, rows, title="Groups that moved the reward", note=note)


def _row(found: Located, group: GroupReward, rest: float, total: float) -> list[Cell]:
    here = to("group", found.key, group.id)
    went = total > 0 and group.moved * rest > 0
    return [
        Cell(inside(found, group.id), here),
        Cell(written(group.task.input, 100) or group.task.id, here, hint=written(group.task.input, 2000)),
        Cell(number(group.mean)),
        Cell(count(group.rollouts)),
        Cell(f"{group.moved:+.3f}", tone=tone_of(group.moved)),
        Cell(share(abs(group.moved) / total) if went else NONE),
    ]
