"""What a run's reward is made of: its distribution and that of its named parts over the steps, and what it follows.

The invariant: it looks at a bounded number of steps and rollouts, chosen evenly over the run, and says how many.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from lightning.errors import LightningError
from lightning.store.exchanges import parents_of
from lightning.store.protocol import Store
from lightning.trainer.plan import TRAIN
from lightning.trainer.training_data import all_rollouts
from lightning.types import Rollout, Run, Status
from lightning_debug.regrade import BESIDES, Regraded, explained_by, rank_correlation
from lightning_debug.transcript import transcript_of

from lightning_console.places import Located
from lightning_console.queries.insight import folder_of
from lightning_console.queries.memo import Memo, apart, stamp_of

STEPS: Final = 24
"""Steps whose rollouts are looked at, evenly over the run."""
CALLS: Final = 400
"""Rollouts whose calls are read, evenly over those."""
BINS: Final = 20
TRIALS: Final = "reward-*.json"
"""Files in the run's folder with what `lightning reward try --json` printed."""
MOST_TRIALS: Final = 12
LARGEST: Final = 20_000_000
"""Bytes of such a file."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How a number is spread over the rollouts of a step: least, quartiles, most, mean."""

    step: int
    count: int
    mean: float
    least: float
    low: float
    middle: float
    high: float
    most: float


@dataclass(frozen=True, slots=True)
class Measure:
    """The reward, or a named part of it, step by step. `bins` are how many rollouts of the first and of the last of the steps
    have a value from `edges[i]` to `edges[i + 1]`."""

    name: str
    steps: tuple[Spread, ...]
    edges: tuple[float, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Correlation:
    """The rank correlation of the reward with something else over `rollouts`, None where one does not vary. `part`: that is a
    named part of it."""

    name: str
    value: float | None
    rollouts: int
    part: bool


@dataclass(frozen=True, slots=True)
class Trial:
    """What another grader would have given, as `lightning reward try` said it. `why` says why a file cannot be read."""

    file: str
    grader: str = ""
    rollouts: int = 0
    before: float | None = None
    now: float | None = None
    rank_correlation: float | None = None
    reordered: int = 0
    groups: int = 0
    equal_before: float | None = None
    equal_now: float | None = None
    advantages: tuple[int, int, int] | None = None
    follows: Mapping[str, tuple[float | None, float | None]] | None = None
    warnings: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Rewards:
    """A run's rewards over the steps that were looked at. `explained` is each part's covariance with the
    reward over the reward's variance: below 0 for a part that works against the others, which go beyond 1 together then.
    `unread` says why calls could not be looked at, empty where they were."""

    run: str
    steps: tuple[int, ...]
    of_steps: int
    rollouts: int
    failed: int
    measures: tuple[Measure, ...]
    correlations: tuple[Correlation, ...]
    explained: Mapping[str, float]
    equal_groups: float | None
    unread: str = ""


_memo: Memo[Rewards] = Memo(kept=16)


async def read_rewards(store: Store, run: Run) -> Rewards:
    """The rewards of a run's training rollouts. Raises `StoreError`."""

    async def make() -> Rewards:
        return await _read(store, run)

    return await _memo.get(store, run.id, await stamp_of(store, run.id), lambda: apart(make))


async def _read(store: Store, run: Run) -> Rewards:
    last = await store.last_step(run.id)
    count = last.step + 1 if last else 1
    steps = sorted({round(place) for place in np.linspace(0, count - 1, min(count, STEPS))})
    rollouts = [each for step in steps for each in await all_rollouts(store, run.id, split=TRAIN, step=step)]
    scored = [each for each in rollouts if each.reward is not None and each.status is Status.SUCCEEDED]
    names = sorted({name for each in scored for name in each.rewards} - {"reward"})
    measures = [_measure("reward", steps, scored), *(_measure(name, steps, scored) for name in names)]
    chosen = [scored[round(place)] for place in np.linspace(0, len(scored) - 1, min(len(scored), CALLS))]
    looked, unread = await _regraded(store, chosen)
    rewards = np.array([each.now for each in looked], dtype=np.float64)
    correlations = []
    for name in (*names, *(BESIDES if not unread else ())):
        values = [_number(each, name) for each in looked]
        known = [place for place, value in enumerate(values) if value is not None]
        other = np.array([values[place] for place in known], dtype=np.float64)
        correlations.append(
            Correlation(name, rank_correlation(other, rewards[known]) if known else None, len(known), name in names)
        )
    return Rewards(
        run=run.id,
        steps=tuple(steps),
        of_steps=count if last else 0,
        rollouts=len(rollouts),
        failed=sum(each.status is Status.FAILED for each in rollouts),
        measures=tuple(each for each in measures if each.steps),
        correlations=tuple(correlations),
        explained=explained_by(looked, rewards) if names else {},
        equal_groups=_equal(scored),
        unread=unread,
    )


def _number(each: Regraded, name: str) -> float | None:
    return each.besides.get(name) if name in each.besides else each.parts.get(name)


async def _regraded(store: Store, rollouts: Sequence[Rollout]) -> tuple[list[Regraded], str]:
    """The rollouts with what their reward should not follow, as if graded again by the recorded rewards; and why that cannot be
    said where their calls are not there."""
    attempts = [(rollout.id, rollout.attempt) for rollout in rollouts]
    calls, ended = await store.transitions_of(attempts), await store.attempts_of([*attempts])
    parents = await parents_of(store, rollouts, dict(zip(attempts, calls, strict=True)))
    found, without, why = [], 0, ""
    for rollout, own, attempt, parent in zip(rollouts, calls, ended, parents, strict=True):
        reward = rollout.reward or 0.0
        made = Regraded(rollout.id, rollout.step, None, "", reward, reward, rollout.rewards, {})
        try:
            seen = transcript_of(rollout, own, attempt.tool_events, parent)
        except LightningError as error:
            without, why = without + 1, why or str(error)
        else:
            without += not seen.calls
            made = replace(made, besides={name: read(seen) for name, read in BESIDES.items()} if seen.calls else {})
        found.append(made)
    why = why or "the calls of its rollouts are not in the store"
    return found, why if found and without == len(found) else ""


def _measure(name: str, steps: Sequence[int], rollouts: Sequence[Rollout]) -> Measure:
    values: dict[int, list[float]] = {step: [] for step in steps}
    for each in rollouts:
        value = each.reward if name == "reward" else each.rewards.get(name)
        if value is not None:
            values[each.step].append(value)
    known = {step: own for step, own in values.items() if own}
    spreads = []
    for step, own in known.items():
        least, low, middle, high, most = (float(each) for each in np.quantile(own, (0, 0.25, 0.5, 0.75, 1)))
        spreads.append(Spread(step, len(own), float(np.mean(own)), least, low, middle, high, most))
    if not spreads:
        return Measure(name, (), (), (), ())
    third = max(1, len(known) // 3)
    ordered = list(known.values())
    early, late = [v for own in ordered[:third] for v in own], [v for own in ordered[-third:] for v in own]
    least, most = min([*early, *late]), max([*early, *late])
    equal = most - least <= 1e-9 * max(1.0, abs(most))  # but for rounding: there is no room for bins between them
    edges = np.histogram_bin_edges([*early, *late], bins=BINS, range=(least - 0.5, most + 0.5) if equal else None)
    first, last = (np.histogram(own, edges)[0] for own in (early, late))
    return Measure(name, tuple(spreads), tuple(map(float, edges)), tuple(map(int, first)), tuple(map(int, last)))


def _equal(rollouts: Sequence[Rollout]) -> float | None:
    """The share of groups whose rewards are all equal, of those with two at least."""
    groups: dict[str, list[float]] = {}
    for each in rollouts:
        groups.setdefault(each.group, []).append(each.reward or 0.0)
    several = [own for own in groups.values() if len(own) > 1]
    return sum(len(set(own)) == 1 for own in several) / len(several) if several else None


def trials_of(found: Located) -> list[Trial]:
    """What `lightning reward try --json` said, from the files in the run's folder, the newest first."""
    folder = folder_of(found)
    if not folder:
        return []
    files = sorted(Path(folder).glob(TRIALS), key=lambda file: file.stat().st_mtime, reverse=True)
    return [_trial(file) for file in files[:MOST_TRIALS]]


def _trial(file: Path) -> Trial:
    try:
        if file.stat().st_size > LARGEST:
            return Trial(file.name, why=f"it has more than {LARGEST} bytes")
        found: dict[str, Any] = json.loads(file.read_text())
        given = found["rollouts"]
        return Trial(
            file=file.name,
            grader=str(found["grader"]),
            rollouts=len(given),
            before=float(np.mean([each["before"] for each in given])) if given else None,
            now=float(np.mean([each["now"] for each in given])) if given else None,
            rank_correlation=found["rank_correlation"],
            reordered=len(found["reordered"]),
            groups=int(found["groups"]),
            equal_before=found["equal_before"],
            equal_now=found["equal_now"],
            advantages=tuple(found["advantages"]) if found["advantages"] else None,
            follows={str(name): (pair["before"], pair["now"]) for name, pair in found["follows"].items()},
            warnings=tuple(map(str, found["warnings"])),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Trial(
            file.name, why=f"it is not what `lightning reward try --json` prints ({type(error).__name__}: {error})"
        )
