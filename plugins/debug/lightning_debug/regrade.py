"""Grade a run's rollouts again with another grader, and compute how rewards and advantages would have changed.

The invariant: no agent and no policy runs, and nothing is stored. Rollouts that the grader fails on are counted and left out of
all figures, and each figure says how many rollouts it rests on.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from lightning.algorithms.protocol import Algorithm, head_of
from lightning.asyncio_utils import in_thread
from lightning.batch import Group
from lightning.errors import ConfigError, DataError, LightningError
from lightning.runner.outcomes import score
from lightning.store.protocol import PRUNED, Store
from lightning.trainer.context import Epoch, epoch_at, read_epochs
from lightning.trainer.training_data import agents_of_step, load_groups
from lightning.types import Json, Status, StepRecord, Transition
from lightning_proof.bring_forward import algorithm_of
from lightning_proof.recorded_step import rollouts_of
from lightning_record.exchanges import parent_of

from lightning_debug.judge import NOTHING, Judgement
from lightning_debug.transcript import REDACTED, Transcript, transcript_of

Grader = Callable[[Transcript], object]
"""A function that returns a transcript's reward, or a mapping with named parts, as an agent does."""


@runtime_checkable
class GroupGrader(Protocol):
    """A grader of whole groups, such as `Judge`: `weight` times its score is added to the reward that the agent returned."""

    weight: float

    def judge(self, groups: Sequence[Sequence[Transcript]]) -> Sequence[Judgement]:
        """Return a judgement for each group, with scores in the order of its rollouts."""


Graded = tuple[float, Mapping[str, float]]
"""A reward and its named parts, as a grader gave them."""
STRONG: Final = 0.5
"""From this rank correlation on (of either sign), a reward is said to follow a quantity that is not part of the task."""
ADDRESS: Final = re.compile(r"0x[0-9a-f]+")
AGREEING: Final = 0.7
"""Below this agreement of a judge with itself, its order is mostly chance."""
LEAST: Final = 1e-6
"""Advantages that differ by at most this are taken as equal."""


@dataclass(frozen=True, slots=True)
class Regraded:
    """One rollout, graded again. `before` is the recorded reward, `now` the new one with its named `parts`. `answer` is the end
    of the last answer, tool calls included. `besides` are the quantities that a reward should not follow, by name."""

    rollout: str
    step: int
    task: Json
    answer: str
    before: float
    now: float
    parts: Mapping[str, float]
    besides: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RewardTrial:
    """The changes that another grader would have made. `failed` counts by reason the rollouts that it could not grade, `kept`
    those that the policy failed: they keep the reward of `trainer.policy_fault`. Neither is in the figures.

    `reordered` are the groups in which the order of two rollouts changes, ties included; `equal_before` and `equal_now` are the
    shares of groups whose rewards are all equal. `follows` are the rank correlations of both rewards with the quantities of
    `BESIDES`, as `(before, now)`; None if either is constant. `explained` is each part's share of the new reward's variance.
    `advantages` counts the trained calls, those whose advantage changes, and those whose advantage changes its sign; None if
    advantages could not be derived, and `why` says why. `changed_calls` are (rollout, number of the call, mean before,
    mean now).
    For a judge, `agreement` is the share of pairs of rollouts that two of its samples order alike, the mean over groups, and
    `unusable` counts the groups without usable scores. None means not measured.
    """

    grader: str
    rollouts: tuple[Regraded, ...]
    failed: Mapping[str, int]
    kept: int
    groups: int
    reordered: tuple[str, ...]
    rank_correlation: float | None
    equal_before: float | None
    equal_now: float | None
    follows: Mapping[str, tuple[float | None, float | None]]
    explained: Mapping[str, float]
    advantages: tuple[int, int, int] | None
    why: str
    changed_calls: tuple[tuple[str, int, float, float], ...]
    agreement: float | None = None
    unusable: int | None = None

    @property
    def same(self) -> bool:
        """Whether training would have been the same: every group has the same order, all advantages are equal, and every
        rollout could be graded. False if this is not known, because nothing was graded or advantages could not be derived."""
        return bool(self.rollouts) and not (self.reordered or self.failed or self.changed_calls or self.why)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about what is suspicious in the new reward."""
        found = [
            f"the reward follows {name}: rank correlation {now:+.2f} (the recorded one: {_said(before)})"
            for name, (before, now) in self.follows.items()
            if now is not None
            and abs(now) >= STRONG
            and (abs(now) > abs(before or 0.0) + 0.1 or now * (before or 0.0) < 0)
        ]
        if self.agreement is not None and self.agreement < AGREEING:
            alike = f"two samples order only {self.agreement:.0%} of the pairs of rollouts alike"
            found.append(f"the judge contradicts itself: {alike}, where chance alone makes 50%")
        main = max(self.explained, key=lambda name: self.explained[name], default="")
        if len(self.explained) > 1 and self.explained[main] > 0.9:
            found.append(f"the part {main} alone makes {self.explained[main]:.0%} of what varies in the reward")
        if self.equal_before is not None and self.equal_now is not None and self.equal_now > self.equal_before + 0.05:
            share = f"{self.equal_now:.0%} of the groups have equal rewards"
            found.append(
                f"{share} ({self.equal_before:.0%} with the recorded ones): most algorithms learn nothing from those"
            )
        return tuple(found)


async def try_grader(store: Store, run_id: str, grader: Grader | GroupGrader) -> RewardTrial:
    """Grade all rollouts that a run was trained on again. The grader runs in a thread without an event loop; it may be a
    coroutine function. Raises `ConfigError` if there is no such run, it has no rollout to grade, or its calls were removed, and
    passes on the error of a judge that does not answer."""
    run = await store.get_run(run_id)
    if run is None:
        raise ConfigError(f"the store does not know the run {run_id}")
    pruned = await store.get_state(run_id, PRUNED)
    if isinstance(pruned, Mapping) and pruned.get("trained"):
        raise ConfigError(f"calls that {run_id} was trained on were removed (lightning db prune --trained)")
    records, epochs = await store.steps(run_id), await read_epochs(store, run)
    trial = _Trial(grader)
    for record in records:
        epoch = epoch_at(epochs, record.step)
        rollouts = await rollouts_of(store, record, epoch.max_staleness or 0)
        groups = await load_groups(store, rollouts, agents_of_step(epoch, record), epoch.policy_fault)
        names = [(m.rollout.id, m.rollout.attempt) for group in groups for m in group.trajectories]
        calls = dict(zip((name for name, _ in names), await store.transitions_of(names), strict=True))
        await in_thread(trial.step, record, epoch, groups, calls)
    if not trial.rollouts and not trial.failed:
        raise ConfigError(f"the run {run_id} was trained on no rollout that a grader has graded")
    return trial.result()


@dataclass
class _Trial:
    grader: Grader | GroupGrader
    rollouts: list[Regraded] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    kept: int = 0
    reordered: list[str] = field(default_factory=list)
    equal: list[tuple[bool, bool]] = field(default_factory=list)
    calls: list[tuple[str, int, float, float]] = field(default_factory=list)
    trained: int = 0
    why: str = ""
    agreements: list[float] = field(default_factory=list)
    unusable: int = 0
    first_said: str = ""

    def step(
        self, record: StepRecord, epoch: Epoch, groups: Sequence[Group], calls: Mapping[str, Sequence[Transition]]
    ) -> None:
        """Grade the groups of a step, and compare rewards and advantages with the recorded ones. `calls` has all calls of each
        rollout."""
        seen = [self._seen(group, calls) for group in groups]
        graded = (
            self._judge(seen)
            if isinstance(self.grader, GroupGrader)
            else [list(map(self._grade, each)) for each in seen]
        )
        again = [self._group(record, *each) for each in zip(groups, seen, graded, strict=True)]
        if self.why:
            return
        kept = [_with_rewards(group, now, new=False) for group, now in zip(groups, again, strict=True)]
        regraded = [_with_rewards(group, now, new=True) for group, now in zip(groups, again, strict=True)]
        try:
            algorithm = algorithm_of(epoch, ())
            if head_of(algorithm):
                raise ConfigError(
                    "its advantages follow from a critic, which other rewards would have trained otherwise"
                )
            if isinstance(self.grader, GroupGrader) and getattr(getattr(algorithm, "credit", None), "rewards", False):
                raise ConfigError("the run was trained with a judge, to whose scores this one's would be added")
            before, after = _advantages(algorithm, kept), _advantages(algorithm, regraded)
        except Exception as error:  # noqa: BLE001 — isolates algorithms and credit functions of others
            self.why = str(error) if isinstance(error, LightningError) else f"{type(error).__name__}: {error}"
            self.calls.clear()
            return
        self.trained += len(before.keys() | after.keys())
        for key in sorted(before.keys() | after.keys()):
            one, other = before.get(key, NONE), after.get(key, NONE)
            if np.abs(one - other).max() > LEAST:
                self.calls.append((*key, float(one.mean()), float(other.mean())))

    def _seen(self, group: Group, calls: Mapping[str, Sequence[Transition]]) -> list[Transcript]:
        """Return the transcripts of a group that can be graded; count the others as failed or kept."""
        found = []
        for member in group.trajectories:
            rollout = member.rollout
            if rollout.status is Status.FAILED:  # no grader saw it: its reward is `trainer.policy_fault`
                self.kept += 1
                continue
            try:
                seen = transcript_of(rollout, calls[rollout.id], member.tool_events, parent_of(member))
                if seen.missing and not (isinstance(self.grader, GroupGrader) and seen.missing == REDACTED):
                    raise DataError(seen.missing)
            except LightningError as error:
                self._fail(error)
            else:
                found.append(seen)
        return found

    def _grade(self, seen: Transcript) -> Graded | None:
        """Return the grader's reward with its parts; if the grader raises, count that and return None."""
        assert not isinstance(self.grader, GroupGrader)
        try:
            return score(_graded(self.grader, copy.deepcopy(seen)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 — isolates the user's grader
            self._fail(error)
            return None

    def _judge(self, groups: Sequence[Sequence[Transcript]]) -> list[list[Graded | None]]:
        """Grade groups with a judge as training does: the agent's reward plus `weight` times the score; None for the rollouts
        of a group without usable scores."""
        assert isinstance(self.grader, GroupGrader)
        judged = iter(self.grader.judge([group for group in groups if group]))
        found: list[list[Graded | None]] = []
        for group in groups:
            judgement = next(judged) if group else NOTHING
            if judgement.agreement is not None:
                self.agreements.append(judgement.agreement)
            if judgement.scores is None:
                self.unusable += 1
                self.first_said = self.first_said or judgement.nonsense[0][:100]
                for _ in group:  # with one text for all groups, so that they count as one reason
                    self._fail(DataError(f"the judge gave no usable scores; it said first {self.first_said!r}"))
                found.append([None] * len(group))
                continue
            given = zip(group, judgement.scores, strict=True)
            found.append([_sum(seen.rollout.reward or 0.0, self.grader.weight * value) for seen, value in given])
        return found

    def _fail(self, error: BaseException) -> None:
        self.failed[ADDRESS.sub("0x…", f"{type(error).__name__}: {error}")[:200]] += 1

    def _group(
        self, record: StepRecord, group: Group, seen: Sequence[Transcript], graded: Sequence[Graded | None]
    ) -> dict[str, float]:
        """Record the result of a group, and return its new rewards by rollout, without rollouts that could not be graded."""
        rewards = {member.rollout.id: member.reward for member in group.trajectories}
        found = {
            member.rollout.id: member.reward for member in group.trajectories if member.rollout.status is Status.FAILED
        }
        pairs: list[tuple[float, float]] = []
        for transcript, given in zip(seen, graded, strict=True):
            if given is None:
                continue
            rollout, (now, parts) = transcript.rollout, given
            besides = {name: of(transcript) for name, of in BESIDES.items()}
            before, answer = rewards[rollout.id], transcript.ending[-200:]
            self.rollouts.append(
                Regraded(rollout.id, record.step, rollout.task.input, answer, before, now, parts, besides)
            )
            found[rollout.id] = now
            pairs.append((before, now))
        if any(np.sign(a - c) != np.sign(b - d) for number, (a, b) in enumerate(pairs) for c, d in pairs[:number]):
            self.reordered.append(group.id)
        if pairs:
            self.equal.append((len({a for a, _ in pairs}) == 1, len({b for _, b in pairs}) == 1))
        return found

    def result(self) -> RewardTrial:
        before = np.array([each.before for each in self.rollouts], dtype=np.float64)
        now = np.array([each.now for each in self.rollouts], dtype=np.float64)
        share = np.mean(np.array(self.equal, dtype=np.float64), axis=0) if self.equal else (None, None)
        besides = {name: np.array([each.besides[name] for each in self.rollouts]) for name in BESIDES}
        return RewardTrial(
            grader=place_of(self.grader),
            rollouts=tuple(self.rollouts),
            failed=dict(self.failed),
            kept=self.kept,
            groups=len(self.equal),
            reordered=tuple(self.reordered),
            rank_correlation=rank_correlation(before, now),
            equal_before=None if share[0] is None else float(share[0]),
            equal_now=None if share[1] is None else float(share[1]),
            follows={
                name: (rank_correlation(before, values), rank_correlation(now, values))
                for name, values in besides.items()
            },
            explained=explained_by(self.rollouts, now),
            advantages=None
            if self.why
            else (self.trained, len(self.calls), sum(one * other < 0 for *_, one, other in self.calls)),
            why=self.why,
            changed_calls=tuple(self.calls),
            agreement=float(np.mean(self.agreements)) if self.agreements else None,
            unusable=self.unusable if isinstance(self.grader, GroupGrader) else None,
        )


def _graded(grader: Grader, seen: Transcript) -> object:
    """Call a grader and return its result; an awaitable is run to its end."""
    found = grader(seen)

    async def wait() -> object:
        return await found if inspect.isawaitable(found) else found

    return asyncio.run(wait()) if inspect.isawaitable(found) else found


def _with_rewards(group: Group, now: Mapping[str, float], *, new: bool) -> Group:
    """Return the group without the rollouts that could not be graded, with the new rewards or, unless `new`, the recorded
    ones."""
    members = tuple(member for member in group.trajectories if member.rollout.id in now)
    if not new:
        return replace(group, trajectories=members)
    return replace(
        group,
        trajectories=tuple(
            replace(member, rollout=replace(member.rollout, reward=now[member.rollout.id])) for member in members
        ),
    )


NONE: Final = np.zeros(1)
"""The advantage of a call without a row."""


def _advantages(algorithm: Algorithm, groups: Sequence[Group]) -> dict[tuple[str, int], npt.NDArray[np.float64]]:
    """Return the advantages of the tokens of each call that has a weight in the batch, by rollout and sequence number."""
    batch = algorithm.batch(groups)
    return {
        (span.rollout, span.seq): sample.advantages[span.start : span.stop].astype(np.float64)
        for sample in batch.samples
        for span in sample.spans
        if np.any(sample.weights[span.start : span.stop])
    }


BESIDES: Final[Mapping[str, Callable[[Transcript], float]]] = {
    "the length of the answers (tokens)": lambda seen: float(seen.tokens),
    "the number of calls": lambda seen: float(len(seen.calls)),
    "the length of the last answer (characters)": lambda seen: float(len(seen.ending)),
    "answers that were cut off": lambda seen: float(sum(call.finish_reason == "length" for call in seen.calls)),
    "tools that failed": lambda seen: float(sum(event.status == "error" for event in seen.tool_events)),
}
"""Quantities of a transcript that a reward should not follow, by their description."""


def explained_by(rollouts: Sequence[Regraded], now: npt.NDArray[np.float64]) -> dict[str, float]:
    """Return each part's share of the reward's variance: its covariance with the reward, divided by that variance. The shares
    add up to 1. Empty if the reward is constant, or if it is not the sum of its parts (and perhaps a constant): then no share
    can be told."""
    names = sorted({name for each in rollouts for name in each.parts} - {"reward"})
    if not len(now) or np.ptp(now) <= 1e-12 * max(1.0, float(np.abs(now).max())):
        return {}
    variance = float(np.var(now))
    parts = {name: np.array([each.parts.get(name, 0.0) for each in rollouts]) for name in names}
    if np.ptp(now - sum(parts.values())) > 1e-6 * float(np.ptp(now)):
        return {}
    return {
        name: float(np.mean((values - values.mean()) * (now - now.mean()))) / variance for name, values in parts.items()
    }


def rank_correlation(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float | None:
    """Return Spearman's rho: the correlation of the ranks, with the mean rank for ties; None if either is constant."""
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


def _sum(agent: float, judge: float) -> Graded:
    return agent + judge, {"agent": agent, "judge": judge}


def place_of(grader: Grader | GroupGrader) -> str:
    """Return where a grader is defined, as `grader.py:12 in grade`, or its name if it has no code."""
    code = getattr(inspect.unwrap(grader) if callable(grader) else grader, "__code__", None)
    name = getattr(grader, "__qualname__", type(grader).__qualname__)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno} in {name}" if code else str(name)


def _said(value: float | None) -> str:
    return "it does not vary" if value is None else f"{value:+.2f}"
