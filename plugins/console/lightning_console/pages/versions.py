"""The page that compares two held-out evaluations task by task, or lists the evaluations to choose from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from lightning.errors import DataError, LightningError
from lightning.store.pages import each_rollout
from lightning.trainer.plan import VAL, newest_generation, of_generation
from lightning.trainer.summary import Evaluation, evaluations
from lightning.types import Json, Rollout, Run, by_key
from lightning_debug.ab import DivergentCall, PairedTask, divergent_call, paired_tasks
from lightning_debug.statistics import SequentialTest, interval, p_flipped

from lightning_console.blocks import (
    Block,
    Cell,
    Column,
    Control,
    Controls,
    Fact,
    Facts,
    Link,
    Notice,
    Notices,
    Page,
    Table,
    Tone,
)
from lightning_console.pages.words import (
    NONE,
    cannot_read,
    count,
    counted,
    mean_of,
    number,
    page_links,
    to,
    tone_of,
    when,
    written,
)
from lightning_console.places import Located, Places, key_of
from lightning_console.queries.conversation import one_line, said_by, vocabulary_of
from lightning_console.queries.runs import ODD, said_of
from lightning_console.router import Address

MOST_RUNS: Final = 50
"""Most runs whose evaluations are listed: the newest."""
MOST_ROLLOUTS: Final = 50_000
"""Most held-out rollouts of one evaluation; a larger one is not compared."""
SHOWN: Final = 20
"""Most regressions that are shown with the first call that differs."""


@dataclass(frozen=True, slots=True)
class EvaluatedVersion:
    """A held-out evaluation that can be compared, and its run (which may lack its configuration) with its key."""

    key: str
    run: Run
    result: Evaluation

    @property
    def name(self) -> str:
        """The evaluation's name in addresses, `KEY@STEP`."""
        return f"{self.key}@{self.result.step}"


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two evaluations that are compared. `name` is its name in the address, `mean` its mean over the paired
    tasks."""

    name: str
    located: Located
    rollouts: int
    mean: float | None


@dataclass(frozen=True, slots=True)
class Regression:
    """A task on which B is worse than A. `call` is the first call that differs in the worst pair of rollouts; None if no call
    differs, or if calls could not be read, and then `unread` says why."""

    task: PairedTask
    input: Json
    call: DivergentCall | None
    unread: str = ""


@dataclass(frozen=True, slots=True)
class VersionComparison:
    """The comparison of B with A on the tasks that both were given. `difference` is the mean over tasks of B's reward minus
    A's. `interval` is its 95 % interval; None if rewards lie outside `bounds` or nothing was paired. `anytime` says that the
    interval is valid however often it was looked at, as an A/B test needs. `only_a` and `only_b` count the tasks that only one
    was given, `lost_pairs` the pairs that infrastructure faults lost."""

    a: Side
    b: Side
    wins: int
    losses: int
    ties: int
    difference: float | None
    interval: tuple[float, float] | None
    bounds: tuple[float, float]
    anytime: bool
    tasks: tuple[PairedTask, ...]
    regressions: tuple[Regression, ...]
    only_a: int
    only_b: int
    lost_pairs: int
    inputs: Mapping[str, Json] = field(default_factory=dict)
    """The input of each task, by the task's id."""


async def evaluated_versions(places: Places) -> tuple[list[EvaluatedVersion], dict[str, str]]:
    """Return the held-out evaluations of the newest runs at a place, and why stores or runs could not be read, by their
    name."""
    found: list[EvaluatedVersion] = []
    listed, unreadable = await places.ask(lambda store: store.list_runs(places.project, limit=MOST_RUNS, brief=True))
    runs = [(url, run) for url, own in listed.items() for run in own]
    names = Counter(run.id for _, run in runs)
    stores = await places.stores()
    for url, run in sorted(runs, key=lambda each: -each[1].created_at)[:MOST_RUNS]:
        key = key_of(run.id, url if names[run.id] > 1 else "")
        try:
            found += [EvaluatedVersion(key, run, each) for each in await evaluations(stores[url], run.id)]
        except ODD as error:
            unreadable[f"{run.id} in {url}"] = said_of(error)
    return found, unreadable


async def compare_versions(
    places: Places, one: str, other: str, bounds: tuple[float, float] = (0.0, 1.0), *, worst: int = 0
) -> VersionComparison:
    """Compare two evaluations, each named `KEY@STEP`, whose rewards lie within `bounds`. For the `worst` tasks the first call
    that differs is looked for. Raises `DataError` for a name without
    an evaluation and if they share no task, `ConfigError` for an unknown run."""
    (a, run_a), (b, run_b) = await _rollouts(places, one), await _rollouts(places, other)
    tasks_a, tasks_b = _by_task(run_a), _by_task(run_b)
    common = [task for task in tasks_a if task in tasks_b]
    if not common:
        raise DataError(f"{one} and {other} were not given one common task, so that there is nothing to compare")
    paired: list[PairedTask] = []
    lost = 0
    for task in common:
        n = min(len(tasks_a[task]), len(tasks_b[task]))
        for each, gone in paired_tasks(tasks_a[task][:n], tasks_b[task][:n], n, bounds[0]):
            lost += gone
            paired += [each] if each is not None else []
    differences = [each.difference for each in paired]
    anytime = "evaluates" in a.run.config and "evaluates" in b.run.config and a.run.id != b.run.id
    inputs = {task: rollouts[0].task.input for task, rollouts in tasks_a.items()}
    return VersionComparison(
        Side(one, a, len(run_a), mean_of([each.a for each in paired])),
        Side(other, b, len(run_b), mean_of([each.b for each in paired])),
        sum(each > 0 for each in differences),
        sum(each < 0 for each in differences),
        sum(each == 0 for each in differences),
        mean_of(differences),
        _interval(differences, [*run_a, *run_b], bounds, anytime=anytime),
        bounds,
        anytime,
        tuple(paired),
        tuple(await _regressions(a, b, paired, inputs, worst)),
        len(tasks_a) - len(common),
        len(tasks_b) - len(common),
        lost,
        inputs,
    )


async def _rollouts(places: Places, name: str) -> tuple[Located, list[Rollout]]:
    """Return the run of an evaluation named `KEY@STEP`, and its ended rollouts, of the latest try if it was repeated."""
    key, at, step = name.rpartition("@")
    if not at or not step.isdecimal():
        raise DataError(f"{name[:200]!r} names no evaluation: RUN@STEP, such as my-run@10")
    located = await places.find(key)
    found: list[Rollout] = []
    async for rollout in each_rollout(located.store, located.run.id, split=VAL, step=int(step)):
        found.append(rollout)
        if len(found) > MOST_ROLLOUTS:
            raise DataError(f"{name} has more than {MOST_ROLLOUTS} rollouts, which is too many for a page")
    ended = [rollout for rollout in of_generation(found, newest_generation(found)) if rollout.status.ended]
    if not ended:
        raise DataError(f"the run {located.run.id} has no held-out rollouts after {step} steps that have ended")
    return located, ended


def _by_task(rollouts: Sequence[Rollout]) -> dict[str, list[Rollout]]:
    found = by_key(rollouts, lambda rollout: rollout.task.id)
    return {task: sorted(own, key=lambda each: (each.index, each.id)) for task, own in found.items()}


def _interval(
    differences: Sequence[float], rollouts: Sequence[Rollout], bounds: tuple[float, float], *, anytime: bool
) -> tuple[float, float] | None:
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    width = bounds[1] - bounds[0]
    if (
        not differences
        or width <= 0
        or min(rewards, default=bounds[0]) < bounds[0]
        or max(rewards, default=0) > bounds[1]
    ):
        return None
    inside = np.clip(np.array(differences, dtype=np.float64), -width, width)  # rounding may put a mean outside
    if anytime:
        test = SequentialTest(-width, width)
        test.add(inside.tolist())
        return test.interval
    low, high = interval((inside / width + 1.0) / 2.0)
    return (2.0 * low - 1.0) * width, (2.0 * high - 1.0) * width


async def _regressions(
    a: Located, b: Located, paired: Sequence[PairedTask], inputs: Mapping[str, Json], worst: int
) -> list[Regression]:
    found = []
    for each in sorted((each for each in paired if each.difference < 0), key=lambda one: one.difference)[:worst]:
        try:
            call, unread = await divergent_call(a.store, each.rollout_a, each.rollout_b, b.store), ""
        except LightningError as error:
            call, unread = None, str(error)
        found.append(Regression(each, inputs[each.task], call, unread))
    return found


ABOVE = (Link("Runs", "runs"),)
MOST_ROWS: Final = 200
EACH: Final = 20
"""Tasks that one page shows with their last answers."""
ANSWER: Final = 100
"""Most characters of a last answer."""
CHANCE: Final = 0.05
"""A difference that arises by chance more often than this cannot be told from chance."""
ROUNDING: Final = 1e-9
"""A mean reward this much below the reward of a success is one, too."""
BETTER: Final = Column("B − A", "number", "the reward of B minus the reward of A: above 0 where B is better")


async def page(places: Places, address: Address) -> Page:
    """Make the page `versions?of=KEY@STEP,KEY@STEP&bounds=LOW,HIGH&task=&success=&cursor=`; with fewer than two
    names, the list of evaluations."""
    names = [name for name in address.option("of").split(",") if name]
    if len(names) < 2:
        return await _choices(places, address, names)
    if len(names) > 2:
        raise DataError(f"two versions are compared, and the address names {len(names)}: versions?of=RUN@STEP,RUN@STEP")
    found = await compare_versions(places, names[0], names[1], bounds_of(address), worst=SHOWN)
    made = await comparison_blocks(found, address)
    blocks = [made.verdict, made.filter, *made.solved, *made.details, _regression_table(found)]
    trail = (*ABOVE, Link("Versions", "versions"))
    return Page(str(address), f"{found.a.name} beside {found.b.name}", blocks, trail)


@dataclass(frozen=True, slots=True)
class ComparisonBlocks:
    """A comparison as blocks: its `verdict`, the tasks that one side alone solves (`solved`, none if there are none), and all
    figures and tasks (`details`)."""

    verdict: Notices
    filter: Controls
    solved: Sequence[Table]
    details: Sequence[Block]


async def comparison_blocks(found: VersionComparison, address: Address, sides: str = "") -> ComparisonBlocks:
    """Return the comparison as blocks. The option `success` of the address is the mean reward from which on a task is solved,
    by default the highest reward; of the tasks only those with the text `task` are shown. `sides` says what A and B are."""
    success = address.option("success")
    try:
        least = float(success) if success else found.bounds[1]
    except ValueError:
        raise DataError(f"success={success[:40]!r} in the address is no number") from None
    wanted = address.option("task").strip().casefold()
    shown = [each for each in found.tasks if wanted in written(found.inputs[each.task], 10_000).casefold()]
    text = Control("task", "tasks with this text, then Enter", address.option("task"))
    solved = _solved_by(found.tasks, least)
    return ComparisonBlocks(
        Notices([*_sides(found, solved, sides), *_verdict(found), *_words(found)]),
        Controls(str(address.having(cursor=None)), [text]),
        [await _solved(found, address, _solved_by(shown, least), solved, least)] if solved.a or solved.b else [],
        [_facts(found), _tasks(found, shown, folded=not wanted)],
    )


def bounds_of(address: Address) -> tuple[float, float]:
    """Return the least and the highest reward of an address, `bounds=LOW,HIGH`; 0 and 1 without. Raises `DataError`."""
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
            Cell(each.run.id, to("run", each.key)),
            Cell(str(each.result.step)),
            Cell(number(each.result.reward)),
            Cell(number(each.result.reward_with_failures)),
            Cell(count(each.result.rollouts)),
            Cell(count(each.result.failed), tone="bad" if each.result.failed else ""),
            Cell(when(each.run.created_at)),
        ]
        for each in versions
    ]
    columns = [
        Column("run"),
        Column("after steps", "number"),
        Column("reward", "number"),
        Column("failed as 0", "number"),
        Column("rollouts", "number"),
        Column("failed rollouts", "number"),
        Column("run began"),
    ]
    blocks = cannot_read(unreadable)
    if ready := _ready(versions):
        text = "or compare the two variants of an A/B, or the first and the last evaluation of a run"
        blocks.append(Notices([Notice(text, links=ready)]))
    evaluated = Table(
        columns,
        rows,
        keys=[each.name for each in versions],
        select="of",
        selected=marked,
        title="Held-out evaluations",
        note="mark two: the first that is marked is what the other is compared with",
        empty="no run here was evaluated on held-out tasks: give fit() `val` tasks, or use `lightning eval`",
    )
    return Page(str(address), "Compare versions", [*blocks, evaluated], ABOVE)


def _ready(versions: list[EvaluatedVersion]) -> list[Link]:
    """Return links to likely comparisons: the two variants of an A/B, or a run's first and last evaluation."""
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
    detail = f"on new tasks {given[0]:+.3f} to {given[1]:+.3f} ({how})" if given else "no interval"
    difference = NONE if found.difference is None else f"{found.difference:+.3f}"
    return Facts(
        [
            Fact("B − A", difference, detail, tone),
            Fact("wins", count(found.wins), "tasks on which B is better", "good" if found.wins else ""),
            Fact("losses", count(found.losses), "tasks on which A is better", "bad" if found.losses else ""),
            Fact("ties", count(found.ties), "tasks on which both are alike"),
            _side_fact("A", found.a),
            _side_fact("B", found.b),
        ]
    )


@dataclass(frozen=True, slots=True)
class SolvedBy:
    """Tasks by the sides that solve them."""

    a: Sequence[PairedTask]
    b: Sequence[PairedTask]
    both: int
    neither: int


def _solved_by(tasks: Sequence[PairedTask], success: float) -> SolvedBy:
    """Sort tasks by the sides whose mean reward is at least `success`, the largest difference first."""
    kinds: dict[tuple[bool, bool], list[PairedTask]] = {}
    for each in sorted(tasks, key=lambda one: -abs(one.difference)):
        kinds.setdefault((each.a >= success - ROUNDING, each.b >= success - ROUNDING), []).append(each)
    alone = kinds.get((True, False), []), kinds.get((False, True), [])
    return SolvedBy(*alone, len(kinds.get((True, True), [])), len(kinds.get((False, False), [])))


def _sides(found: VersionComparison, solved: SolvedBy, sides: str) -> list[Notice]:
    """Say how many tasks each side alone solves, if a task is solved; `sides` says what A and B are, on the page that compares
    runs."""
    where = to("versions", of=f"{found.a.name},{found.b.name}")
    links = [Link("where B is worst, and the first call that differs", where)] if sides else []
    if solved.a or solved.b or solved.both:
        alone = f"A alone solves {counted(len(solved.a), 'task')}, B alone {len(solved.b)}"
        text = f"{alone}; both {solved.both}, neither {solved.neither}"
        return [Notice(text, detail=sides, links=links)]
    return [Notice(sides, links=links)] if sides else []


def _verdict(found: VersionComparison) -> list[Notice]:
    """Say in one sentence which side is better on these tasks and whether that is chance, and in another how new tasks would
    fare."""
    p = 1.0 if found.anytime else p_flipped([each.difference for each in found.tasks])
    given, change = found.interval, found.difference or 0.0
    sure = given is not None and not given[0] <= 0.0 <= given[1]
    moved = f"{change:+.3f} on average: {counted(found.wins, 'task')} better, {found.losses} worse, {found.ties} equal"
    how = ""
    if p > CHANCE and not sure:
        text = f"A and B are not told apart from chance. B − A is {moved}"
        how = "More tasks, or more rollouts of each, tell smaller differences"
    else:
        better = "B" if change > 0 else "A"
        text = f"On these tasks {better} is better, and chance alone hardly explains it. B − A is {moved}"
        if not found.anytime:
            times = f"{1000 * p:.0f} of 1000 cases"
            how = f"If each task's difference were up or down at random, the mean would be as far off in {times}"
    tone: Tone = "" if p > CHANCE and not sure else "good" if change > 0 else "warn"
    said = [Notice(text, tone, how, folded=True)]
    if given is not None:
        new = "B − A is from" if sure else "it is not sure which is better:"
        text = f"On new tasks of this kind {new} {given[0]:+.3f} to {given[1]:+.3f} (95 %)"
        why = "The interval leaves room for rare tasks of another kind: more tasks make it narrower"
        said.append(Notice(text, "" if sure else "muted", why, folded=True))
    return said


def _side_fact(name: str, side: Side) -> Fact:
    detail = f"{side.name}, {counted(side.rollouts, 'rollout')}"
    return Fact(name, number(side.mean), detail, to=to("run", side.located.key))


def _words(found: VersionComparison) -> list[Notice]:
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
    if found.only_a or found.only_b:
        said.append(
            Notice(
                f"{counted(found.only_a, 'task was', 'tasks were')} given to A alone and {found.only_b} to B alone: "
                "they are in no figure"
            )
        )
    if found.lost_pairs:
        ends = ("was lost to the infrastructure and is", "were lost to the infrastructure and are")
        lost = counted(found.lost_pairs, f"pair {ends[0]}", f"pairs {ends[1]}")
        said.append(Notice(f"{lost} in no figure", "warn"))
    return said


def _regression_table(found: VersionComparison) -> Table:
    rows = [
        [
            Cell(written(each.input, 100), hint=each.task.task),
            *_rewards(found, each.task),
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
        BETTER,
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
    """Return the address of the differing call in A, or of the rollout in B if A has no such call."""
    if each.call is None or (each.call.where == "calls" and each.call.a == "no such call"):
        return to("rollout", found.b.located.key, each.task.rollout_b)
    return to("rollout", found.a.located.key, each.task.rollout_a, call=each.call.number)


async def _solved(
    found: VersionComparison, address: Address, shown: SolvedBy, every: SolvedBy, success: float
) -> Table:
    """Return the tasks that one side alone solves, with the last answers of both sides. `shown` are those that the page is
    asked for, of `every`."""
    apart = [*((each, True) for each in shown.a), *((each, False) for each in shown.b)]
    first = max(0, address.number("cursor", 0))
    page = apart[first : first + EACH]
    said_a = await _last_answers(found.a.located, [each.rollout_a for each, _ in page])
    said_b = await _last_answers(found.b.located, [each.rollout_b for each, _ in page])
    rows = [
        [
            Cell(written(found.inputs[each.task], 100) or each.task, hint=each.task),
            Cell("A alone" if by_a else "B alone"),
            *_rewards(found, each),
            Cell(said_a[each.rollout_a], to("rollout", found.a.located.key, each.rollout_a)),
            Cell(said_b[each.rollout_b], to("rollout", found.b.located.key, each.rollout_b)),
        ]
        for each, by_a in page
    ]
    columns = [
        Column("task"),
        Column("solved by"),
        Column("A", "number"),
        Column("B", "number"),
        BETTER,
        Column("A's last answer"),
        Column("B's last answer"),
    ]
    return Table(
        columns,
        rows,
        title=f"Solved by one alone (A {count(len(every.a))}, B {count(len(every.b))})",
        note=f"a task is solved if the mean reward of its rollouts is at least {success:g} (&success= in the address)",
        empty="no task with this text is solved by one alone"
        if len(shown.a) + len(shown.b) < len(every.a) + len(every.b)
        else "each task is solved by both or by neither",
        pages=page_links(address, len(apart), EACH),
    )


async def _last_answers(located: Located, rollouts: Sequence[str]) -> dict[str, str]:
    """Return the last answer of each rollout on one line; a dash where it is not stored."""
    vocabulary, found = vocabulary_of(located), {}
    for rollout in dict.fromkeys(rollouts):
        said = said_by(await located.store.transitions(rollout), vocabulary, None)
        found[rollout] = (one_line(said[-1].answer, ANSWER) if said else "") or NONE
    return found


def _rewards(found: VersionComparison, each: PairedTask) -> list[Cell]:
    """Return the cells of a task's two rewards, which open the pair of rollouts in which B is worst, and of the
    difference."""
    return [
        Cell(number(each.a), to("rollout", found.a.located.key, each.rollout_a)),
        Cell(number(each.b), to("rollout", found.b.located.key, each.rollout_b)),
        Cell(f"{each.difference:+.3f}", tone=tone_of(each.difference)),
    ]


def _tasks(found: VersionComparison, shown: Sequence[PairedTask], *, folded: bool) -> Table:
    largest = sorted(shown, key=lambda one: (-abs(one.difference), one.difference))[:MOST_ROWS]
    rows = [
        [Cell(written(found.inputs[each.task], 100) or each.task, hint=each.task), *_rewards(found, each)]
        for each in largest
    ]
    columns = [Column("task"), Column("A", "number"), Column("B", "number"), BETTER]
    more = len(shown) - len(rows)
    note = f"{MOST_ROWS} of {count(len(shown))} tasks: on the others the difference is smaller" if more > 0 else ""
    title = "Every task, the largest difference first"
    return Table(columns, rows, title=title, note=note, empty="no task has this text", folded=folded)
