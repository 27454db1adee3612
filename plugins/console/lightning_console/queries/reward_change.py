"""Why a step's mean reward differs from that of the step before: other tasks, failures, a few groups, or chance.

The invariant: the group is the unit of every test, because the rollouts of one task are not independent. What cannot be known
is None, and never 0: how hard a task is comes only from rewards that the same task earned elsewhere in the run.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from lightning.store.protocol import Store
from lightning.trainer.context import read_epochs
from lightning.trainer.plan import TRAIN, VAL, newest_generation, of_generation
from lightning.trainer.training_data import all_rollouts
from lightning.types import Rollout, Run, Status, Task, by_key
from lightning_debug.ab import earned
from lightning_debug.statistics import p_flipped, p_regrouped

from lightning_console.queries.curves import Curves
from lightning_console.queries.memo import Memo, apart, stamp_of
from lightning_console.queries.steps import MemberCredit, StepProof, prove_step

FAILED_TOOL: Final = "rollouts with a failed tool run"
AROUND: Final = 2
"""What a task earned in a step is compared with the mean reward of that step and this many on either side."""
ENOUGH: Final = 3
"""The search for what a task earned elsewhere ends once every task was seen so often."""
MOST_ROLLOUTS: Final = 20_000
"""Most rollouts of other steps and evaluations that this search reads."""
LEAST_KNOWN: Final = 0.5
"""The difficulty of a step's tasks is known if it is known for at least this share of them."""


@dataclass(frozen=True, slots=True)
class GroupReward:
    """What the rollouts of a task earned in a step: their number, and their mean with failed ones as 0. `moved` is how much
    the group moved the step's mean, beside the step before and the difficulty of the task where that is known."""

    id: str
    task: Task
    mean: float
    rollouts: int
    moved: float = 0.0


@dataclass(frozen=True, slots=True)
class Difficulty:
    """What the tasks of two steps earned elsewhere in the run, less the mean reward around there. `before` and `now` are the
    means over the tasks of each step that were seen elsewhere (`known_before`, `known_now`); `error` is the standard error of
    their difference. `where` names the source."""

    before: float
    now: float
    error: float
    known_before: int
    known_now: int
    where: str

    @property
    def explained(self) -> float:
        """The change of the reward that the difficulty of the tasks explains."""
        return self.now - self.before

    @property
    def is_sure(self) -> bool:
        """Whether the two steps' tasks differ by more than what a measurement of so few rollouts may be wrong."""
        return abs(self.explained) > 2.0 * self.error


@dataclass(frozen=True, slots=True)
class Beside:
    """A kind of rollout, such as failed ones: its share of the rollouts in each step, its mean reward, and that of the others
    in both steps. None if unknown, or for a mean over none."""

    name: str
    before: float
    now: float
    earned: float | None
    others: float | None

    @property
    def accounts(self) -> float | None:
        """The change of the reward that comes with the change of the share: its product with the difference of the means."""
        if self.earned is None or self.others is None:
            return None
        return (self.now - self.before) * (self.earned - self.others)


@dataclass(frozen=True, slots=True)
class RewardChange:
    """The mean rewards of two steps, failed rollouts as 0, and what explains their difference. `groups` are those of the later
    step, `others` those of the earlier one. `p` is the p-value of the difference of the group means; with a known difficulty
    (`difficulty`) of the rest of it, and if both steps were given the `same` tasks of the differences task by task. `least` is
    the smallest p-value that so few groups can have. `seen` counts the tasks of both steps that were seen elsewhere, `open` the
    rollouts of the later step that have not ended, `lost` those of both that were lost to the infrastructure and are left out.
    `equal` is the reward of all rollouts of the later step, `equal_before` that of the earlier one; None if they differ.
    `tool_error` is the commonest error of its tools, with the tool and how often it came, `tool_arguments` the property of the
    arguments with which they failed (empty if not known). `unread` says why calls are not known; empty if they are."""

    step: int
    earlier: int
    before: float
    now: float
    groups: tuple[GroupReward, ...]
    others: tuple[GroupReward, ...]
    p: float
    least: float
    same: bool = False
    difficulty: Difficulty | None = None
    seen: int = 0
    beside: tuple[Beside, ...] = ()
    open: int = 0
    lost: int = 0
    equal: float | None = None
    equal_before: float | None = None
    tool_error: tuple[str, int] = ("", 0)
    tool_arguments: str = ""
    unread: str = ""

    @property
    def difference(self) -> float:
        """The later mean minus the earlier one."""
        return self.now - self.before

    @property
    def rest(self) -> float:
        """The difference without the part that the difficulty of the tasks explains."""
        return self.difference - (self.difficulty.explained if self.difficulty is not None else 0.0)


_changes: Memo[RewardChange | str] = Memo()


async def reward_change_of(
    store: Store, run: Run, proof: StepProof, step: int, curves: Curves, patience: float | None
) -> RewardChange | str | None:
    """Explain the mean reward of a step beside that of the step before. A text says why that cannot be; None means that the
    answer is not ready within `patience` seconds. Raises `StoreError`."""
    earlier = max((number for number in curves.steps if number < step), default=0)
    if not earlier:
        return "no step of this run came before it, so that there is nothing to compare its reward with"

    async def make() -> RewardChange | str:
        (record,) = await store.steps(run.id, after=earlier - 1, limit=1)
        before = await prove_step(store, run, record, await read_epochs(store, run))
        return await _explained(store, run, before, earlier, proof, step, curves)

    ended = sum(each.status.ended for each in proof.rollouts)
    stamp = (await stamp_of(store, run.id), ended)
    return await _changes.soon(store, (run.id, run.created_at, step), stamp, lambda: apart(make), patience)


async def _explained(
    store: Store, run: Run, before: StepProof, earlier: int, now: StepProof, step: int, curves: Curves
) -> RewardChange | str:
    others, groups = group_rewards(before.rollouts), group_rewards(now.rollouts)
    for number, found in ((earlier, others), (step, groups)):
        if not found:
            return f"no rollout of step {number} has a reward, so that there is nothing to compare"
    tasks = {each.task.id for each in (*others, *groups)}
    rewards = dict(zip(curves.steps, curves.named("reward_with_failures"), strict=True))
    mine = frozenset(each.id for each in (*others, *groups))
    seen = await _seen_elsewhere(store, run, tasks, (earlier, step), mine, rewards, curves)
    change = compare_steps(earlier, others, step, groups, *seen)
    beside, unread = _beside(before, now)
    going = sum(not each.status.ended for each in now.rollouts)
    errors = Counter(error for member in now.members.values() for error in member.tool_errors)
    return replace(
        change,
        beside=beside,
        unread=unread,
        open=going,
        lost=sum(bool(each.fault and each.fault.is_loss) for proof in (before, now) for each in proof.rollouts),
        equal=_equal(now),
        equal_before=_equal(before),
        tool_error=next(iter(errors.most_common(1)), ("", 0)),
    )


def _equal(proof: StepProof) -> float | None:
    """Return the reward of all rollouts of a step; None if they differ."""
    found = {reward for each in proof.rollouts if each.parent is None and (reward := earned(each)) is not None}
    return found.pop() if len(found) == 1 else None


def group_rewards(rollouts: Sequence[Rollout]) -> list[GroupReward]:
    """Return what each group earned, in order: of its rollouts that ended and are no branches, with failed ones as 0. Rollouts
    that were lost to the infrastructure are left out."""
    counted = [each for each in rollouts if each.parent is None and earned(each) is not None]
    return [
        GroupReward(group, own[0].task, statistics.fmean(earned(each) or 0.0 for each in own), len(own))
        for group, own in by_key(counted, lambda each: each.group).items()
    ]


@dataclass(frozen=True, slots=True)
class Seen:
    """What a task earned at one other place of the run, less the mean there, and the variance of that measurement."""

    reward: float
    variance: float


def compare_steps(
    earlier: int,
    others: Sequence[GroupReward],
    step: int,
    groups: Sequence[GroupReward],
    seen: Mapping[str, Sequence[Seen]] | None = None,
    where: str = "",
) -> RewardChange:
    """Compare the groups of two steps, at least one each. `seen` has what tasks earned elsewhere (`where`), by task."""
    before, now = _mean(others), _mean(groups)
    then, later = ({each.task.id: each.mean for each in own} for own in (others, groups))
    if then.keys() == later.keys() and len(then) == len(others) == len(later) == len(groups):
        pairs = [later[task] - then[task] for task in later]
        moved = _moved(groups, lambda each: then[each.task.id])
        least = 2.0 / 2 ** len(pairs)
        return RewardChange(step, earlier, before, now, moved, tuple(others), p_flipped(pairs), least, same=True)
    difficulty, known = _difficulty(others, groups, seen or {}, where)
    if difficulty is None:
        moved = _moved(groups, lambda _: before)
        p = p_regrouped([each.mean for each in others], [each.mean for each in groups])
    else:
        middle = difficulty.before
        moved = _moved(groups, lambda each: before + known.get(each.task.id, difficulty.now) - middle)
        rest = [each.mean - known.get(each.task.id, middle) for each in others]
        p = p_regrouped(rest, [each.mean - known.get(each.task.id, difficulty.now) for each in groups])
    total, size = len(others) + len(groups), len(groups)
    least = (2.0 if len(others) == size else 1.0) / math.comb(total, size)
    return RewardChange(
        step, earlier, before, now, moved, tuple(others), p, least, difficulty=difficulty, seen=len(known)
    )


def _mean(groups: Sequence[GroupReward]) -> float:
    return math.fsum(each.mean * each.rollouts for each in groups) / sum(each.rollouts for each in groups)


def _moved(groups: Sequence[GroupReward], expected: Callable[[GroupReward], float]) -> tuple[GroupReward, ...]:
    """Return the groups with how much each moved the mean beside what was `expected` of it, the strongest first."""
    total = sum(each.rollouts for each in groups)
    found = [replace(each, moved=(each.mean - expected(each)) * each.rollouts / total) for each in groups]
    return tuple(sorted(found, key=lambda each: -abs(each.moved)))


def _difficulty(
    others: Sequence[GroupReward], groups: Sequence[GroupReward], seen: Mapping[str, Sequence[Seen]], where: str
) -> tuple[Difficulty | None, dict[str, float]]:
    """Return the difficulty of the tasks of two steps, None unless enough of each were seen elsewhere; and what each task
    earned there."""
    known = {task: statistics.fmean(each.reward for each in own) for task, own in seen.items() if own}
    noise = {task: sum(each.variance for each in own) / len(own) ** 2 for task, own in seen.items() if own}
    sides = []
    for own in (others, groups):
        there = [each for each in own if each.task.id in known]
        if len(there) < LEAST_KNOWN * len(own) or not there:
            return None, known
        size = sum(each.rollouts for each in there)
        mean = math.fsum(known[each.task.id] * each.rollouts for each in there) / size
        variance = math.fsum(noise[each.task.id] * (each.rollouts / size) ** 2 for each in there)
        sides.append((mean, variance, len(there)))
    (before, one, known_before), (now, other, known_now) = sides
    return Difficulty(before, now, math.sqrt(one + other), known_before, known_now, where), known


# what tasks earned elsewhere ---------------------------------------------------------------------------------------------
async def _seen_elsewhere(
    store: Store,
    run: Run,
    tasks: set[str],
    steps: tuple[int, int],
    mine: frozenset[str],
    rewards: Mapping[int, float | None],
    curves: Curves,
) -> tuple[dict[str, list[Seen]], str]:
    """Return what the tasks of two steps earned in other steps of the run or in its evaluations, whichever knows more of them:
    the two are never mixed, because their means are over other tasks."""
    by_steps = await _seen_in_steps(store, run, tasks, steps, mine, rewards)
    by_evaluations = await _seen_in_evaluations(store, run, tasks, curves)
    if len(by_evaluations) > len(by_steps):
        return by_evaluations, "in the evaluations of this run"
    return by_steps, "in other steps of this run"


async def _seen_in_steps(
    store: Store,
    run: Run,
    tasks: set[str],
    steps: tuple[int, int],
    mine: frozenset[str],
    rewards: Mapping[int, float | None],
) -> dict[str, list[Seen]]:
    """Search other steps, the nearest first, for rollouts of the same tasks that are in none of the groups `mine`."""
    found: dict[str, list[Seen]] = {}
    looked = 0
    for number in sorted(rewards.keys() - set(steps), key=lambda each: abs(each - steps[1])):
        around = [rewards.get(near) for near in range(number - AROUND, number + AROUND + 1)]
        known = [each for each in around if each is not None]
        rollouts = await all_rollouts(store, run.id, split=TRAIN, step=number)
        looked += len(rollouts)
        same = [each for each in rollouts if each.task.id in tasks and each.group not in mine]
        for group in group_rewards(same) if known else ():
            own = [reward for each in same if each.group == group.id and (reward := earned(each)) is not None]
            spread = statistics.variance(own) if len(own) > 1 else 0.25
            seen = Seen(group.mean - statistics.fmean(known), spread / len(own))
            found.setdefault(group.task.id, []).append(seen)
        if looked >= MOST_ROLLOUTS or all(len(found.get(task, ())) >= ENOUGH for task in tasks):
            break
    return found


async def _seen_in_evaluations(store: Store, run: Run, tasks: set[str], curves: Curves) -> dict[str, list[Seen]]:
    """Search the evaluations, the newest first, for rollouts of the same tasks."""
    found: dict[str, list[Seen]] = {}
    looked = 0
    for evaluation in reversed(curves.evaluations):
        rollouts = await all_rollouts(store, run.id, split=VAL, step=evaluation.step)
        looked += len(rollouts)
        newest = of_generation(rollouts, newest_generation(rollouts))
        same = group_rewards([each for each in newest if each.task.id in tasks])
        if not same:
            break  # every evaluation has the same tasks
        middle = statistics.fmean(each.mean for each in same)
        for each in same:
            seen = Seen(each.mean - middle, max(evaluation.deviation**2, 0.01) / each.rollouts)
            found.setdefault(each.task.id, []).append(seen)
        if looked >= MOST_ROLLOUTS:
            break
    return found


# what changed beside -------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Counted:
    """Rollouts of a kind and the others in one step: their rewards."""

    kind: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        return len(self.kind) / max(1, len(self.kind) + len(self.others))


def _beside(before: StepProof, now: StepProof) -> tuple[tuple[Beside, ...], str]:
    """Return the kinds of rollouts whose share may explain the change, and why their calls are not known (empty if they
    are)."""
    found = [_kind("failed rollouts (they count as 0)", before, now, lambda one, _: one.status is Status.FAILED)]
    for proof in (before, now):
        scored = any(each.status is Status.SUCCEEDED for each in proof.rollouts)
        if scored and not any(each.turns for each in proof.members.values()):
            why = proof.why or "its calls are not stored"
            return tuple(each for each in found if each is not None), why
    found.append(
        _kind("rollouts with an answer cut off", before, now, lambda _, own: None if own is None else own.cut_off > 0)
    )
    found.append(_kind(FAILED_TOOL, before, now, lambda _, own: None if own is None else bool(own.tool_errors)))
    return tuple(each for each in found if each is not None), ""


def _kind(
    name: str,
    before: StepProof,
    now: StepProof,
    has: Callable[[Rollout, MemberCredit | None], bool | None],
) -> Beside | None:
    """Count the rollouts for which `has` is true in both steps; those for which it is None are not counted. None if neither
    step has one."""
    sides = []
    for proof in (before, now):
        counted = _Counted()
        for each in proof.rollouts:
            answer, reward = has(each, proof.members.get(each.id)), earned(each)
            if answer is not None and reward is not None and each.parent is None:
                (counted.kind if answer else counted.others).append(reward)
        sides.append(counted)
    one, other = sides
    if not one.kind and not other.kind:
        return None
    return Beside(name, one.share, other.share, _middle(one.kind, other.kind), _middle(one.others, other.others))


def _middle(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return the mean of the means of two sets of rewards; of a single one if the other is empty, None if both are."""
    means = [statistics.fmean(each) for each in (one, other) if each]
    return statistics.fmean(means) if means else None
