"""The rewards of a run as another grader would have given them, and what training would have made of those.

The invariant: no agent and no model runs, and nothing is stored. What a grader fails on is counted and left out of all figures,
and each figure says over how many rollouts it is.
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
from lightning.algorithms.protocol import Algorithm, needs_critic
from lightning.asyncio_utils import in_thread
from lightning.batch import Group
from lightning.errors import ConfigError, DataError, LightningError
from lightning.runner.outcomes import score
from lightning.store.protocol import PRUNED, Store
from lightning.trainer.epochs import Epoch, epoch_at, read_epochs
from lightning.trainer.training_data import load_groups, rollouts_of
from lightning.types import Json, Status, StepRecord, Transition
from lightning_proof.bring_forward import algorithm_of, policy_fault_of, train_agents_of
from lightning_record.exchanges import parent_of

from lightning_debug.judge import NOTHING, Judgement
from lightning_debug.transcript import REDACTED, Transcript, transcript_of

Grader = Callable[[Transcript], object]
"""Gives a reward, or a mapping with named parts, as an agent does."""


@runtime_checkable
class GroupGrader(Protocol):
    """Grades whole groups, such as `Judge`: `weight` times its score is added to what the agent returned."""

    weight: float

    def judge(self, groups: Sequence[Sequence[Transcript]]) -> Sequence[Judgement]:
        """Scores for each group, in the order of its rollouts."""


Graded = tuple[float, Mapping[str, float]]
"""A reward and its named parts."""
STRONG: Final = 0.5
"""A rank correlation from which on the reward follows something that is no part of the task."""
ADDRESS: Final = re.compile(r"0x[0-9a-f]+")
AGREEING: Final = 0.7
"""The agreement of a judge with itself below which its order is mostly chance."""
LEAST: Final = 1e-6
"""Advantages that differ by less are the same."""


@dataclass(frozen=True, slots=True)
class Regraded:
    """One rollout, graded again. `before` is the recorded reward, `parts` are the new one's named parts, `answer` is the end of
    the last answer, tool calls included, and `besides` what a reward should not follow."""

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
    """What another grader would have changed. `failed` counts by reason the rollouts that it could not grade, `kept` those that
    the policy failed: they have the reward that `trainer.policy_fault` gives them. Neither is in the figures.

    `reordered` are the groups in which it orders two rollouts otherwise, ties included; `equal_before` and `equal_now` are the
    share of groups whose rewards are all equal. `follows` are the rank correlations of both rewards with what is no part of a
    task, as `(before, now)`; None where one does not vary. `explained` is each part's share of the new reward's variance.
    `advantages` counts calls that are trained, and of those the ones with another advantage and with one of the other sign;
    None where that could not be derived, and `why` says why. `changed_calls` are rollout, number of the call, before and now.
    Of a judge: `agreement` is the share of pairs of rollouts that two of its samples order alike, the mean over groups;
    `unusable` counts groups that it gave no usable scores for. None is what was not measured.
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
        """Whether training would have been the same: every group in the same order, no other advantage, and no rollout that
        could not be graded. False where advantages could not be derived or nothing was graded, since nobody knows then."""
        return bool(self.rollouts) and not (self.reordered or self.failed or self.changed_calls or self.why)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is suspicious of the new reward, in words."""
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
    """Grade all rollouts again that a run was trained on. The grader runs in a thread without an event loop; it may be a
    coroutine function. Raises `ConfigError` for a run that is not there, has no rollout, or whose calls were removed, and what
    a judge raises that does not answer."""
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
        groups = await load_groups(store, rollouts, train_agents_of(epoch), policy_fault_of(epoch))
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
        """Grade the groups of a step. `calls` are all calls of each rollout."""
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
            if needs_critic(algorithm):
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
            one, other = before.get(key, 0.0), after.get(key, 0.0)
            if abs(one - other) > LEAST:
                self.calls.append((*key, one, other))

    def _seen(self, group: Group, calls: Mapping[str, Sequence[Transition]]) -> list[Transcript]:
        """The transcripts that can be graded."""
        found = []
        for member in group.trajectories:
            rollout = member.rollout
            if rollout.status is Status.FAILED:  # no grader has seen it: its reward is that of policy faults
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
        """A reward with its parts; None where the grader fails, which is counted."""
        assert not isinstance(self.grader, GroupGrader)
        try:
            return score(_graded(self.grader, copy.deepcopy(seen)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 — isolates the user's grader
            self._fail(error)
            return None

    def _judge(self, groups: Sequence[Sequence[Transcript]]) -> list[list[Graded | None]]:
        """As training has it with a judge: what the agent returned, and `weight` times the score."""
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
                for _ in group:  # in the same words: a judge can say something else of each group
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
        """The new rewards of a group by rollout, without those that could not be graded."""
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
    """What a grader gives; a coroutine is run to its end."""
    found = grader(seen)

    async def wait() -> object:
        return await found if inspect.isawaitable(found) else found

    return asyncio.run(wait()) if inspect.isawaitable(found) else found


def _with_rewards(group: Group, now: Mapping[str, float], *, new: bool) -> Group:
    """The group without what could not be graded, with its own rewards or the new ones."""
    members = tuple(member for member in group.trajectories if member.rollout.id in now)
    if not new:
        return replace(group, trajectories=members)
    return replace(
        group,
        trajectories=tuple(
            replace(member, rollout=replace(member.rollout, reward=now[member.rollout.id])) for member in members
        ),
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


BESIDES: Final[Mapping[str, Callable[[Transcript], float]]] = {
    "the length of the answers (tokens)": lambda seen: float(seen.tokens),
    "the number of calls": lambda seen: float(len(seen.calls)),
    "the length of the last answer (characters)": lambda seen: float(len(seen.ending)),
    "answers that were cut off": lambda seen: float(sum(call.finish_reason == "length" for call in seen.calls)),
    "tools that failed": lambda seen: float(sum(event.status == "error" for event in seen.tool_events)),
}
"""What a reward should not follow."""


def explained_by(rollouts: Sequence[Regraded], now: npt.NDArray[np.float64]) -> dict[str, float]:
    """Each part's share of the reward's variance: its covariance with the reward over the variance of that. Parts that make up
    the reward by addition have shares that add up to 1."""
    names = sorted({name for each in rollouts for name in each.parts} - {"reward"})
    if not len(now) or np.ptp(now) <= 1e-12 * max(1.0, float(np.abs(now).max())):
        return {}
    variance = float(np.var(now))
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


def _sum(agent: float, judge: float) -> Graded:
    return agent + judge, {"agent": agent, "judge": judge}


def place_of(grader: Grader | GroupGrader) -> str:
    """Where a grader stands: `grader.py:12 in grade`."""
    code = getattr(inspect.unwrap(grader) if callable(grader) else grader, "__code__", None)
    name = getattr(grader, "__qualname__", type(grader).__qualname__)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno} in {name}" if code else str(name)


def _said(value: float | None) -> str:
    return "it does not vary" if value is None else f"{value:+.2f}"
