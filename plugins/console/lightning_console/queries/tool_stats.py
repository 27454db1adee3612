"""Statistics of tool runs: how often each tool failed for each agent, with which arguments, and the reward beside it.

The invariant: tasks are the independent draws, since rollouts of one task are alike. A share or a difference has an interval
or a reason why there is none. Of the many values of arguments that are tried, one is only named if that many tries do not
explain it by chance.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

import numpy as np
from lightning.types import Json, by_key
from lightning_debug import statistics

from lightning_console.queries.scan import Scanned, ToolRun

MOST_RUNS: Final = 2_000
"""Most runs of a tool whose arguments are compared, evenly over all."""
MOST_WORDS: Final = 40
"""Most words of an argument's text that are looked at."""
MOST_TRIED: Final = 2_000
"""Most values of arguments that are tried: those of the most runs."""
LIKELY: Final = 0.05
"""A value tells failed runs from others if chance has at most this probability, after correction for all that were tried."""
NAMED: Final = 5
NUMBER: Final = re.compile(r"(?<![\w.])\d{1,15}(?:\.\d{1,15})?(?![\w.]*\w)")
"""A number inside a text; a minus before it may be an operator, and is not read."""
LARGEST: Final = 1e15
"""Larger numbers are not compared with limits."""
ANSWER: Final = "the answer"
"""The name under which an answer is looked at where arguments are not recorded."""

Used = tuple[Scanned, ToolRun]
"""A tool run and its rollout."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A property of a tool run's arguments, as a text, and how many of the runs with it failed. Runs of one task with equal
    arguments and the same end count once; `times` counts all failed runs with it."""

    text: str
    failed: int
    runs: int
    times: int


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a tool's failed runs. `frequent` are the commonest ones with the number of their failed runs; `telling`
    are the features with which failures are commoner than chance explains; `unknown` counts the failed runs whose arguments are
    not recorded; if all are, the answers that led to the runs were looked at. `said` says what can be concluded."""

    frequent: tuple[tuple[str, int], ...]
    telling: tuple[Feature, ...]
    unknown: int
    said: str


@dataclass(frozen=True, slots=True)
class ToolLine:
    """A tool as one agent used it. `share` is the share of `failed` runs among those known to have failed or not (`known`),
    with its `interval` (None for fewer than two tasks). `unreported` counts runs of which only the result is known. `errors`
    are the reasons with their numbers, the commonest first; `rollouts` counts those with a failed run."""

    tool: str
    agent: str
    runs: int
    known: int
    failed: int
    blocked: int
    unreported: int
    share: float | None
    interval: tuple[float, float] | None
    errors: tuple[tuple[int, str], ...]
    rollouts: int
    used: tuple[Used, ...]


def uses_of(rollouts: Sequence[Scanned]) -> list[Used]:
    """Return all tool runs with their rollouts."""
    return [(rollout, run) for rollout in rollouts for run in rollout.runs]


def tool_lines(used: Sequence[Used]) -> list[ToolLine]:
    """Return a line for each tool and agent, the one with the most failed runs first."""
    lines = [
        _line(tool, agent, own)
        for (tool, agent), own in by_key(used, lambda each: (each[1].tool, each[1].agent)).items()
    ]
    return sorted(lines, key=lambda line: (-line.failed, -line.runs, line.tool, line.agent))


def _line(tool: str, agent: str, used: Sequence[Used]) -> ToolLine:
    status = Counter(run.status for _, run in used)
    failed = [(rollout, run) for rollout, run in used if run.failed]
    tasks = by_key((each for each in used if each[1].known), lambda each: each[0].task)
    pairs = [(sum(run.failed for _, run in own), len(own)) for own in tasks.values()]
    known = sum(runs for _, runs in pairs)
    return ToolLine(
        tool,
        agent,
        len(used),
        known,
        len(failed),
        status["blocked"],
        status["unreported"],
        len(failed) / known if known else None,
        share_interval(pairs),
        tuple(_kinds_of(Counter(run.error for _, run in failed))),
        len({rollout.id for rollout, _ in failed}),
        tuple(used),
    )


def _kinds_of(errors: Mapping[str, int]) -> list[tuple[int, str]]:
    """Return the numbers of the errors, the commonest first; errors that differ only in numbers are one, in the words of the
    first."""
    found: dict[str, tuple[int, str]] = {}
    for error, times in errors.items():
        kind = re.sub(r"\d+", "N", error)
        count, first = found.get(kind, (0, error))
        found[kind] = (count + times, first)
    return sorted(found.values(), key=lambda each: -each[0])


def share_interval(pairs: Sequence[tuple[int, int]]) -> tuple[float, float] | None:
    """Return the 95 % interval of a share from `(failed, runs)` of each task; None for fewer than two tasks.

    It is the interval for the number of independent runs that has the variance between the tasks; where no run failed, or all
    did, the tasks are counted.
    """
    runs, tasks = sum(count for _, count in pairs), len(pairs)
    if tasks < 2:
        return None
    value = sum(failed for failed, _ in pairs) / runs
    spread = math.fsum((failed - value * count) ** 2 for failed, count in pairs) * tasks / (tasks - 1) / runs**2
    even = value * (1 - value)
    size = min(float(runs), even / spread) if spread and even else float(tasks if not even else runs)
    return statistics.share_interval(value, size)


# arguments ------------------------------------------------------------------------------------------------------------------
def failing_arguments(used: Sequence[Used]) -> Arguments:
    """Return which arguments the failed runs of a tool have, and which tell them from the runs that succeeded. If failed runs
    have no recorded arguments, the answers that led to the runs are taken in their place."""
    failed = [run for _, run in used if run.failed]
    if not failed:
        return Arguments((), (), 0, "no run failed")
    unknown = sum(run.arguments is None for run in failed)
    answers = unknown == len(failed) and any(run.said for run in failed)
    ended = [(rollout, run, _given(run, answers)) for rollout, run in used if run.known]
    known = [(rollout, run, given) for rollout, run, given in ended if given is not None]
    frequent = tuple(Counter(as_text(given) for _, run, given in known if run.failed).most_common(NAMED))
    if not frequent:
        return Arguments((), (), unknown, "the arguments of its failed runs are not recorded")
    chosen = [known[round(at)] for at in np.linspace(0, len(known) - 1, min(len(known), MOST_RUNS))]
    different = {(rollout.task, as_text(given), run.failed): given for rollout, run, given in chosen}
    times = Counter((rollout.task, as_text(given), run.failed) for rollout, run, given in chosen)
    runs = [(given, key[2], times[key]) for key, given in different.items()]
    bad = sum(failed for _, failed, _ in runs)
    if bad == len(runs):
        return Arguments(
            frequent, (), unknown, "every run with known arguments failed, so no argument tells them apart"
        )
    telling = _telling(runs, bad)
    said = (
        "" if telling else f"no value of an argument tells the failed runs from the others ({len(runs)} different runs)"
    )
    return Arguments(frequent, telling, unknown, said)


def _given(run: ToolRun, answers: bool) -> Mapping[str, Json] | None:
    """Return the arguments of a run, or the answer that led to it; None if they are not known."""
    if answers:
        return {ANSWER: run.said} if run.said else None
    return run.arguments


def as_text(arguments: Mapping[str, Json] | None) -> str:
    """Return arguments as one line: JSON, or the value alone where it has no name."""
    if arguments is None:
        return ""
    given: Json = next(iter(arguments.values())) if list(arguments) in ([""], [ANSWER]) else arguments
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, sort_keys=True, default=str)


Ended = tuple[Mapping[str, Json], bool, int]
"""The arguments of a different run, whether it failed, and how many runs were like it."""


def _telling(runs: Sequence[Ended], bad: int) -> tuple[Feature, ...]:
    """Return the features with which more runs failed than chance explains, the surest first; of features that the same runs
    have, only one."""
    seen, wrong, times = Counter[str](), Counter[str](), Counter[str]()
    names = {name for given, *_ in runs for name in given}
    for given, failed, alike in runs:
        found = list(dict.fromkeys(_features(given, names)))
        seen.update(found)
        wrong.update(found if failed else ())
        times.update(dict.fromkeys(found, alike) if failed else {})
    tried = [
        (text, wrong[text], count, times[text]) for text, count in seen.most_common(MOST_TRIED) if count < len(runs)
    ]
    limits = list(_limits(runs, bad))
    many = len(tried) + sum(limit[-1] for limit in limits)
    surest: dict[tuple[float, int, int, int], str] = {}
    for text, failures, count, alike in [*tried, *(limit[:4] for limit in limits)]:
        if failures * len(runs) > bad * count:
            chance = by_chance(failures, count, bad, len(runs)) * many
            if chance <= LIKELY:
                surest.setdefault((chance, failures, count, alike), text)
    return tuple(
        Feature(text, failed, count, alike) for (_, failed, count, alike), text in sorted(surest.items())[:NAMED]
    )


def _limits(runs: Sequence[Ended], bad: int) -> Iterator[tuple[str, int, int, int, int]]:
    """Yield for each argument with numbers the limit above which most runs failed beyond the usual share, and the limit below
    which they did: a feature's text, its failed runs, its runs, all failed runs with it, and how many limits were tried."""
    sides: dict[tuple[str, int], list[tuple[float, bool, int]]] = {}
    for given, failed, alike in runs:
        for name, value in given.items():
            if numbers := _numbers(value):
                has = f"{name or 'it'} {'has a number' if isinstance(value, str) else 'is'}"
                sides.setdefault((f"{has} above", 1), []).append((max(numbers), failed, alike))
                sides.setdefault((f"{has} below", -1), []).append((-min(numbers), failed, alike))
    for (text, sign), own in sides.items():
        own.sort(reverse=True)
        failures, times, found = 0, 0, list[tuple[int, int, int, float, int]]()
        for count, ((value, failed, alike), (following, *_)) in enumerate(itertools.pairwise(own), 1):
            failures, times = failures + failed, times + failed * alike
            if following < value:
                found.append((failures * len(runs) - bad * count, failures, count, following, times))
        if found:
            _, failures, count, limit, times = max(found)
            yield f"{text} {sign * limit + 0.0:.15g}", failures, count, times, len(found)


def _numbers(value: Json) -> list[float]:
    """Return the numbers in an argument: its value, or those in its text."""
    if isinstance(value, str):
        return [float(found) for found in NUMBER.findall(value)]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return []
    return [float(value)] if abs(value) < LARGEST else []


def _features(arguments: Mapping[str, Json], names: set[str]) -> Iterator[str]:
    yield from (f"{name or 'it'} is missing" for name in names if name not in arguments)
    for name, value in arguments.items():
        called = name or "it"
        if isinstance(value, bool) or value is None:
            yield f"{called} is {json.dumps(value)}"
        elif isinstance(value, int | float):
            yield f"{called} is a number"
            yield f"{called} is {value if isinstance(value, int) else format(value, 'g')}"
            if value < 0:
                yield f"{called} is below 0"
        else:
            text = str(value)
            yield f"{called} is {text!r}" if text else f"{called} is empty"
            yield from (f"{called} has {word!r}" for word in text.split()[:MOST_WORDS])


def by_chance(failed: int, count: int, bad: int, total: int) -> float:
    """Return the probability that `count` of `total` runs, drawn by chance, have at least `failed` of the `bad` ones (Fisher's
    exact test)."""

    def log_choose(of: int, some: int) -> float:
        return math.lgamma(of + 1) - math.lgamma(some + 1) - math.lgamma(of - some + 1)

    whole = log_choose(total, count)
    most = min(count, bad)
    logs = [
        log_choose(bad, wrong) + log_choose(total - bad, count - wrong) - whole
        for wrong in range(failed, most + 1)
        if count - wrong <= total - bad
    ]
    return min(1.0, math.fsum(math.exp(each) for each in logs))


# rewards --------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class RewardBeside:
    """The rewards of some rollouts (`with_`) and of the others (`without`): numbers and means. `difference` is the mean
    over the `tasks` with a group that has both, of the mean reward with minus that without; None if there is no such group, or
    if all rewards are `equal`. Its `interval` is None for fewer than two such tasks."""

    with_: int
    without: int
    mean_with: float | None
    mean_without: float | None
    tasks: int
    difference: float | None
    interval: tuple[float, float] | None
    equal: bool = False

    @property
    def told_apart(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.interval is not None and not self.interval[0] <= 0.0 <= self.interval[1]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def reward_beside(rollouts: Sequence[Scanned], some: AbstractSet[str]) -> RewardBeside:
    """Compare the rewards of rollouts with these ids and of the others, within each group, which has one task and one
    version of the policy. A failed rollout counts as 0; one that was lost to the infrastructure, or has not ended, is left
    out, and so is a branch, which begins where somebody chose."""
    begun = [each for each in rollouts if not each.is_branch]
    scored = [(each, score, each.id in some) for each in begun if (score := each.score) is not None]
    kinds = by_key(scored, lambda each: each[2])
    sides = {kind: [score for _, score, _ in kinds.get(kind, ())] for kind in (True, False)}
    scores = [score for _, score, _ in scored]
    if len(scores) > 1 and min(scores) == max(scores):
        one, other = _mean(sides[True]), _mean(sides[False])
        return RewardBeside(len(sides[True]), len(sides[False]), one, other, 0, None, None, equal=True)
    by_task: dict[str, list[float]] = {}
    for own in by_key(scored, lambda each: each[0].group).values():
        one, other = (_mean([score for _, score, kind in own if kind is side]) for side in (True, False))
        if one is not None and other is not None:
            by_task.setdefault(own[0][0].task, []).append(one - other)
    differences = [math.fsum(own) / len(own) for own in by_task.values()]
    width = max([1.0, *scores]) - min([0.0, *scores])
    found = None
    if len(differences) > 1:
        low, high = statistics.interval((np.array(differences, dtype=np.float64) / width + 1.0) / 2.0)
        found = ((2.0 * low - 1.0) * width, (2.0 * high - 1.0) * width)
    return RewardBeside(
        len(sides[True]),
        len(sides[False]),
        _mean(sides[True]),
        _mean(sides[False]),
        len(differences),
        _mean(differences),
        found,
    )
