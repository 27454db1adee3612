"""The rewards of a run as another grader would have given them, and what training would have made of those.

The invariant: no agent and no model runs, and nothing is stored. What a grader fails on is counted and left out of all figures,
and each figure says over how many rollouts it is.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from lightning.algorithms.protocol import Algorithm, needs_critic
from lightning.batch import Group
from lightning.errors import ConfigError, LightningError
from lightning.runner.outcomes import score
from lightning.store.epochs import Epoch, epoch_at, read_epochs
from lightning.store.protocol import Store
from lightning.trainer.replay import algorithm_of, policy_fault_of, train_agents_of
from lightning.trainer.training_data import load_groups, rollouts_of
from lightning.types import StepRecord

from lightning_debug.transcript import Transcript, transcript_of

Grader = Callable[[Transcript], object]
"""Gives a reward, or a mapping with named parts, as an agent does."""
STRONG: Final = 0.5
"""A rank correlation from which on the reward follows something that is no part of the task."""
LEAST: Final = 1e-6
"""Advantages that differ by less are the same."""


@dataclass(frozen=True, slots=True)
class Regraded:
    """One rollout, graded again. `before` is the recorded reward, `parts` are the new one's named parts."""

    transcript: Transcript
    step: int
    before: float
    now: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RewardTrial:
    """What another grader would have changed. `flipped` are the groups in which it puts two rollouts the other way round,
    `equal_before` and `equal_now` the share of groups whose rewards are all equal. `follows` are the rank correlations of both
    rewards with what is no part of a task, as `(before, now)`; None where a reward does not vary. `explained` is each part's
    share of the new reward's variance. `advantages` counts calls that are trained, and of those the ones with another
    advantage and with one of the other sign; None where that could not be derived, and `why` says why."""

    grader: str
    rollouts: tuple[Regraded, ...]
    failed: Mapping[str, int]
    groups: int
    flipped: tuple[str, ...]
    rank_correlation: float | None
    equal_before: float
    equal_now: float
    follows: Mapping[str, tuple[float | None, float | None]]
    explained: Mapping[str, float]
    advantages: tuple[int, int, int] | None = None
    why: str = ""
    changed_calls: tuple[tuple[str, int, float, float], ...] = ()
    """Calls with another advantage: rollout, number of the call, before and now."""

    @property
    def same(self) -> bool:
        """Whether the grader orders every group as the recorded rewards do, and failed on nothing."""
        return not self.flipped and not self.failed

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is suspicious of the new reward, in words."""
        found = [
            f"the reward follows {name}: rank correlation {now:+.2f} (the recorded one: {_said(before)})"
            for name, (before, now) in self.follows.items()
            if now is not None and abs(now) >= STRONG and abs(now) > abs(before or 0.0) + 0.1
        ]
        main = max(self.explained, key=lambda name: self.explained[name], default="")
        if len(self.explained) > 1 and self.explained[main] > 0.9:
            found.append(f"the part {main} alone makes {self.explained[main]:.0%} of what varies in the reward")
        if self.equal_now > self.equal_before + 0.05:
            found.append(
                f"{self.equal_now:.0%} of the groups have equal rewards and teach nothing ({self.equal_before:.0%} before)"
            )
        return tuple(found)


async def try_grader(store: Store, run_id: str, grader: Grader) -> RewardTrial:
    """Grade all rollouts again that a run was trained on. Raises `ConfigError` for a run that is not there or has none."""
    run = await store.get_run(run_id)
    if run is None:
        raise ConfigError(f"the store does not know the run {run_id}")
    records, epochs = await store.steps(run_id), await read_epochs(store, run)
    trial = _Trial(grader)
    for record in records:
        epoch = epoch_at(epochs, record.step)
        rollouts = await rollouts_of(store, record, epoch.max_staleness or 0)
        groups = await load_groups(store, rollouts, train_agents_of(epoch), policy_fault_of(epoch))
        trial.step(record, epoch, groups)
    if not trial.rollouts and not trial.failed:
        raise ConfigError(f"the run {run_id} was trained on no rollout")
    return trial.result()


@dataclass
class _Trial:
    grader: Grader
    rollouts: list[Regraded] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    flipped: list[str] = field(default_factory=list)
    equal: list[tuple[bool, bool]] = field(default_factory=list)
    calls: list[tuple[str, int, float, float]] = field(default_factory=list)
    trained: int = 0
    why: str = ""

    def step(self, record: StepRecord, epoch: Epoch, groups: Sequence[Group]) -> None:
        """Grade the groups of a step."""
        again = [self._group(record, group) for group in groups]
        if self.why:
            return
        try:
            algorithm = algorithm_of(epoch, ())
        except ConfigError as error:
            self.why = str(error)
            return
        if needs_critic(algorithm):
            self.why = "its advantages follow from a critic, which other rewards would have trained otherwise"
            return
        kept = [
            replace(group, trajectories=tuple(m for m in group.trajectories if m.rollout.id in now))
            for group, now in zip(groups, again, strict=True)
        ]
        regraded = [
            replace(
                group,
                trajectories=tuple(
                    replace(m, rollout=replace(m.rollout, reward=now[m.rollout.id])) for m in group.trajectories
                ),
            )
            for group, now in zip(kept, again, strict=True)
        ]
        try:
            before, after = _advantages(algorithm, kept), _advantages(algorithm, regraded)
        except LightningError as error:
            self.why = str(error)
            return
        self.trained += len(before.keys() | after.keys())
        for key in sorted(before.keys() | after.keys()):
            one, other = before.get(key, 0.0), after.get(key, 0.0)
            if abs(one - other) > LEAST:
                self.calls.append((*key, one, other))

    def _group(self, record: StepRecord, group: Group) -> dict[str, float]:
        """The new rewards of a group by rollout, without those that the grader failed on."""
        pairs: list[tuple[float, float]] = []
        found = {}
        for member in group.trajectories:
            seen = transcript_of(member.rollout, member.transitions, member.tool_events)
            try:
                now, parts = score(self.grader(seen))
            except Exception as error:  # noqa: BLE001 — isolates the user's grader
                self.failed[f"{type(error).__name__}: {error}"[:200]] += 1
                continue
            self.rollouts.append(Regraded(seen, record.step, member.reward, now, parts))
            found[member.rollout.id] = now
            pairs.append((member.reward, now))
        if any((a - c) * (b - d) < 0 for number, (a, b) in enumerate(pairs) for c, d in pairs[:number]):
            self.flipped.append(group.id)
        if pairs:
            self.equal.append((len({a for a, _ in pairs}) == 1, len({b for _, b in pairs}) == 1))
        return found

    def result(self) -> RewardTrial:
        before = np.array([each.before for each in self.rollouts], dtype=np.float64)
        now = np.array([each.now for each in self.rollouts], dtype=np.float64)
        share = np.mean(np.array(self.equal, dtype=np.float64).reshape(-1, 2), axis=0) if self.equal else (0.0, 0.0)
        return RewardTrial(
            grader=place_of(self.grader),
            rollouts=tuple(self.rollouts),
            failed=dict(self.failed),
            groups=len(self.equal),
            flipped=tuple(self.flipped),
            rank_correlation=rank_correlation(before, now),
            equal_before=float(share[0]),
            equal_now=float(share[1]),
            follows={
                name: (rank_correlation(before, values), rank_correlation(now, values))
                for name, values in _besides(self.rollouts).items()
            },
            explained=_explained(self.rollouts, now),
            advantages=None
            if self.why
            else (self.trained, len(self.calls), sum(one * other < 0 for *_, one, other in self.calls)),
            why=self.why,
            changed_calls=tuple(self.calls),
        )


def _advantages(algorithm: Algorithm, groups: Sequence[Group]) -> dict[tuple[str, int], float]:
    """The advantage of each trained call, by rollout and number."""
    batch = algorithm.batch(groups)
    return {
        (span.rollout, span.seq): float(sample.advantages[span.start])
        for sample in batch.samples
        for span in sample.spans
        if np.any(sample.weights[span.start : span.stop])
    }


def _besides(rollouts: Sequence[Regraded]) -> dict[str, npt.NDArray[np.float64]]:
    """What a reward should not follow."""

    def each(of: Callable[[Transcript], float]) -> npt.NDArray[np.float64]:
        return np.array([of(one.transcript) for one in rollouts], dtype=np.float64)

    return {
        "the length of the answers (tokens)": each(lambda seen: seen.tokens),
        "the number of calls": each(lambda seen: len(seen.calls)),
        "the length of the last answer (characters)": each(lambda seen: len(seen.answer)),
        "answers that were cut off": each(lambda seen: sum(call.finish_reason == "length" for call in seen.calls)),
        "tools that failed": each(lambda seen: sum(event.status == "error" for event in seen.tool_events)),
    }


def _explained(rollouts: Sequence[Regraded], now: npt.NDArray[np.float64]) -> dict[str, float]:
    """Each part's share of the reward's variance: its covariance with the reward over the variance of that. Parts that make up
    the reward by addition have shares that add up to 1."""
    names = sorted({name for each in rollouts for name in each.parts} - {"reward"})
    variance = float(np.var(now)) if len(now) else 0.0
    if variance <= 0:
        return {}
    parts = {name: np.array([each.parts.get(name, 0.0) for each in rollouts]) for name in names}
    return {
        name: float(np.mean((values - values.mean()) * (now - now.mean()))) / variance for name, values in parts.items()
    }


def rank_correlation(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float | None:
    """Spearman's rho: the correlation of the ranks, ties by their mean; None where one of both does not vary."""
    if len(one) < 2:
        return None
    first, second = _ranks(one), _ranks(other)
    if not np.std(first) or not np.std(second):
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: npt.NDArray[np.float64] = (ends - (counts - 1) / 2.0)[inverse]
    return ranks


def place_of(grader: Grader) -> str:
    """Where a grader stands: `grader.py:12 in grade`."""
    code = getattr(inspect.unwrap(grader), "__code__", None)
    name = getattr(grader, "__qualname__", type(grader).__qualname__)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno} in {name}" if code else str(name)


def _said(value: float | None) -> str:
    return "it does not vary" if value is None else f"{value:+.2f}"
