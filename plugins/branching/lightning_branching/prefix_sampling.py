"""Sample groups that begin behind prefixes of the run's own earlier rollouts (`trainer.sampling = prefix`).

The invariant: all rollouts of a group begin at the same call of the same earlier rollout, or all at their task. A prefix is
answered from the record and is no call of the group's rollouts, so it is never trained. Where groups begin depends only on the
seed and on the rollouts of earlier steps, so that a resumed step continues with the same groups.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from operator import attrgetter
from typing import Final, cast

from lightning.batch import Group, Trajectory, is_prefix
from lightning.bounded import Bounded, Once
from lightning.credit import all_equal, rollout_return
from lightning.credit.protocol import group_returns
from lightning.errors import ConfigError
from lightning.safe_text import counted
from lightning.store.pages import batched, each_rollout
from lightning.store.protocol import PRUNED
from lightning.trainer.algorithm import samples_dynamically
from lightning.trainer.plan import TRAIN
from lightning.trainer.samplers import Asked, Sampled, TurnSampler
from lightning.trainer.training_data import all_rollouts, scored
from lightning.types import Json, Rollout, Status, by_key
from lightning_record.exchanges import why_not_replayable
from pydantic import TypeAdapter

from lightning_branching.branch_points import places_of
from lightning_branching.config import PREFIX, BranchingConfig
from lightning_branching.planned import check_branching
from lightning_branching.prefix_choice import Beginning, Begun, Chooser, Parent, Place, ends
from lightning_branching.recorded import is_void, void_reason

logger = logging.getLogger(__name__)

TRIED: Final = 4
"""Most rollouts of a task that are read to find one with calls to begin at; and, for each group of a step, most tasks."""
PARENTS: Final = 4096
"""Most rollouts whose places are kept in memory."""
READ_AT_ONCE: Final = 256
"""Rollouts of another run whose step rewards are read at a time."""
LENT: Final = "prefix_sampling/lent"
"""The key in a run's state, before the name of another run, for the rollouts of that run behind which groups may begin."""
PRUNED_AWAY: Final = (
    "`lightning db prune` removed calls of earlier rollouts, and no group can begin behind these any more. As long as this run "
    "goes on, prune only other runs (--run), and not the run that trainer.prefix_run names"
)
_LENT_OF_TASKS: Final = TypeAdapter(dict[str, list[Begun]])


def prefix_sampler(asked: Asked) -> PrefixSampler | None:
    """Return the sampler for a run that asks for prefixes; None for other runs. Raises `ConfigError` as `check_branching`
    does."""
    if not check_branching(
        asked, PREFIX, "where a group begins depends on all earlier steps, so each waits for the last"
    ):
        return None
    return PrefixSampler()


class PrefixSampler(TurnSampler):
    """Samples groups that begin at their task, and groups that begin behind a prefix."""

    api, carries_out = 1, ("sampling", "order")

    def __init__(self) -> None:
        self._said = Once()
        self._chooser = Chooser()
        self._learned = 0
        self._parents: Bounded[tuple[str, int], Parent | None] = Bounded(PARENTS)
        self._pruned: list[Json] = []
        self._found: list[Beginning] = []

    async def start(self) -> None:
        """Read the rollouts of the other run, if the settings name one. Raises `ConfigError` for a run behind whose rollouts no
        group can begin."""
        if name := BranchingConfig.of(self.config).prefix_run:
            await self._borrow(name)

    async def step(self, step: int) -> Sampled:
        """Sample the groups of a step, and add the metrics of `prefix_metrics`."""
        await self._look_for_pruned()
        for earlier in range(self._learned + 1, step):
            await self._learn(earlier)
        algorithm = self.schedule.at(step)
        waves = self.config.max_waves if samples_dynamically(algorithm) else 1
        count = waves * self.config.tasks_per_step
        self._found = self._chooser.repeated([found async for found in self._beginnings(step, count)], count, step)
        sampled = await super().step(step)
        self._tell_void(sampled.rollouts)
        return replace(sampled, metrics=sampled.metrics | prefix_metrics(sampled.groups, sampled.rollouts))

    def beginnings(self, planned: list[Rollout]) -> list[Rollout]:
        """Return the planned rollouts, of which some groups are replaced by branches of earlier rollouts."""
        found: list[Rollout] = []
        for name, members in by_key(planned, attrgetter("group")).items():
            step, place = members[0].step, int(name.rpartition("/")[2])
            turn = sum(self._draws_prefix(step, earlier) for earlier in range(place))
            if turn < len(self._found) and self._draws_prefix(step, place):
                members = [_begun_at(member, self._found[turn]) for member in members]
            found += members
        return found

    def check(self, what: str, rollouts: Sequence[Rollout]) -> None:
        """Check the rollouts that are not void: a step whose groups are all void teaches nothing, and the run goes on."""
        if begun := [rollout for rollout in rollouts if not is_void(rollout)]:
            super().check(what, begun)

    def _draws_prefix(self, step: int, place: int) -> bool:
        """Whether the group at this place of a step begins at a prefix, if there is one. Each rollout in a row behind which
        groups were void halves the share of these groups."""
        share = (1.0 - BranchingConfig.of(self.config).task_share) * 0.5**self._chooser.voided
        text = f"{self.config.seed}/prefix/{step}/{place}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) / 2.0**64 < share

    async def _beginnings(self, step: int, count: int) -> AsyncIterator[Beginning]:
        """Yield the beginnings for at most `count` groups, each of another task."""
        found, chooser, able = 0, self._chooser, {task.id for task in self.tasks}
        for task in islice((name for name in chooser.skewed() if name in able), TRIED * count):
            for begun in islice(chooser.parents(task), TRIED):
                parent = await self._parent(begun.rollout, begun.attempt)
                if parent is not None and parent.places:
                    if (beginning := chooser.choose(task, parent, step)) is not None:
                        yield beginning
                        found += 1
                    break
            if found == count:
                return

    async def _look_for_pruned(self) -> None:
        """Forget the parents that were read when calls of this run, or of the lender's, were removed since."""
        runs = [self.stack.run.id, *filter(None, [BranchingConfig.of(self.config).prefix_run])]
        pruned = [await self.stack.store.get_state(run, PRUNED) for run in runs]
        if pruned != self._pruned:
            self._pruned = pruned
            self._parents.clear()

    async def _learn(self, step: int) -> None:
        """Tell the chooser of an earlier step's rollouts."""
        fault = "exclude" if self.config.policy_fault == "mask" else self.config.policy_fault
        every = await all_rollouts(self.stack.store, self.stack.run.id, split=TRAIN, step=step)
        for group in by_key(every, attrgetter("group")).values():
            first = group[0]
            known = [one for rollout in group if (one := scored(rollout, fault)) is not None]
            if first.parent is None:
                self._chooser.add(first.task.id, step, await self._begun(known))
                continue
            name, attempt, seq = first.parent
            if all(map(is_void, group)):
                self._chooser.add_void(name)
            parent = await self._parent(name, attempt)
            self._chooser.add_behind(first.task.id, step, parent, seq, await self._begun(known))
        self._learned = step

    async def _parent(self, name: str, attempt: int) -> Parent | None:
        """Return a rollout with the calls at which groups may begin; None if its record is gone or cannot be replayed."""
        key = (name, attempt)
        if key not in self._parents:
            self._parents.keep(key, await self._read(name, attempt))
        return self._parents[key]

    async def _read(self, name: str, attempt: int) -> Parent | None:
        rollout = await self.stack.store.get_rollout(name)
        if rollout is None:
            self._tell(PRUNED_AWAY)
            return None
        if rollout.attempt != attempt or rollout.status is not Status.SUCCEEDED:
            return None
        (group,) = await self.groups_of([rollout])
        (member,) = group.trajectories
        if not member.transitions:
            if await self.stack.store.get_state(rollout.run, PRUNED) is not None:
                self._tell(PRUNED_AWAY)
            return None
        if why := why_not_replayable((*member.transitions, *member.refused, *member.lost), member.tool_events):
            self._tell(why)
            return None
        calls = places_of(member)
        if not calls:
            self._tell(
                "no call can be begun at: agents make one call each, or all at once, or what is trained makes first calls "
                "alone. Leave trainer.sampling out for such an agent"
            )
        return Parent(
            rollout,
            tuple(Place(call.seq, (len(calls) - rank) / (len(calls) + 1)) for rank, call in enumerate(calls)),
            rollout_return(member),
        )

    async def _borrow(self, name: str) -> None:
        """Lend the chooser another run's rollouts: those of the first start, which the run's state keeps, because that run may
        have gone on or been pruned since."""
        store, run = self.stack.store, self.stack.run.id
        if (kept := await store.get_state(run, f"{LENT}/{name}")) is None:
            if await store.get_run(name) is None or name == run:
                raise ConfigError(
                    f"trainer.prefix_run = {name!r}: the store of this run has no other run of that name. Keep both runs "
                    "in one store (--store), or leave the setting out"
                )
            found = await self._lent(name)
            await self._check_lent(name, found)
            kept = await store.keep_state(run, f"{LENT}/{name}", cast("Json", found))
        for task, lent in _LENT_OF_TASKS.validate_python(kept).items():
            self._chooser.lend(task, lent)

    async def _lent(self, name: str) -> dict[str, list[Begun]]:
        """Return by task the worst and the best rollouts that another run began at this run's tasks."""
        wanted, lent = {task.id for task in self.tasks}, dict[str, list[Begun]]()
        async for some in batched(each_rollout(self.stack.store, name, split=TRAIN), READ_AT_ONCE):
            fit = [one for one in some if one.parent is None and one.reward is not None and one.task.id in wanted]
            for rollout, begun in zip(fit, await self._begun(fit), strict=True):
                lent[rollout.task.id] = ends([*lent.get(rollout.task.id, ()), begun])
        return lent

    async def _check_lent(self, name: str, lent: Mapping[str, Sequence[Begun]]) -> None:
        """Raise `ConfigError` if no group can begin behind one of these rollouts."""
        for one in (one for rollouts in lent.values() for one in rollouts):
            parent = await self._parent(one.rollout, one.attempt)
            if parent is not None and parent.places:
                return
        why = (
            "its rollouts cannot be begun behind (the log says why)"
            if lent
            else "none of its rollouts with a reward is of a training task of this run"
        )
        raise ConfigError(f"trainer.prefix_run = {name!r}: {why}. Name another run, or leave the setting out")

    async def _begun(self, rollouts: Sequence[Rollout]) -> list[Begun]:
        """Return rollouts with a reward as the chooser knows them, with their returns."""
        attempts = await self.stack.store.attempts_of([(one.id, one.attempt) for one in rollouts])
        return [
            Begun(
                one.id,
                one.attempt,
                (one.reward or 0.0) + sum(reward.value for reward in attempt.step_rewards),
                one.status is Status.SUCCEEDED,
            )
            for one, attempt in zip(rollouts, attempts, strict=True)
        ]

    def _tell_void(self, rollouts: Sequence[Rollout]) -> None:
        """Warn of groups that are void as a whole, and once of each reason for void rollouts."""
        for name, group in by_key(rollouts, attrgetter("group")).items():
            void = [rollout for rollout in group if is_void(rollout)]
            if void and void[0].parent is not None and len(void) == len(group):
                logger.warning(
                    "the group %s begins at call %d of the rollout %s and teaches nothing: %s. No further group begins behind "
                    "that rollout. The first: %s",
                    name,
                    void[0].parent[2],
                    void[0].parent[0],
                    f"its {counted(len(void), 'rollout is', 'rollouts are')} void",
                    void[0].error,
                )
            elif void and self._said.first(reason := void_reason(void[0])):
                logger.warning("%d of %d rollouts of the group %s are void: %s (said once for %s)", len(void), len(group),
                               name, void[0].error, reason)  # fmt: skip

    def _tell(self, why: str) -> None:
        if self._said.first(why):
            logger.warning(
                "a group does not begin at a prefix, as trainer.sampling = prefix asks for: %s (said once)", why
            )


def _begun_at(planned: Rollout, beginning: Beginning) -> Rollout:
    """Return a planned rollout as a branch: its task and its resources are those of its parent."""
    parent = beginning.parent
    return replace(
        planned, task=parent.task, resources=parent.resources, parent=(parent.id, parent.attempt, beginning.seq)
    )


def prefix_metrics(groups: Sequence[Group], rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the metrics of a step's prefixes: the share of groups that began at one (`prefix_groups`), the mean reward of
    their rollouts (`prefix_reward`; `reward` is that of the others), the share of groups of each kind whose returns differ
    (`differing/prefix`, `differing/task`), the void rollouts (`prefix_void`, and by reason `prefix_void/...`), the tokens that
    were sampled (`sampled_tokens`), and those that prefixes took from the record instead (`prefix_tokens`)."""
    behind = {rollout.group for rollout in rollouts if rollout.parent is not None}
    members = [member for group in groups for member in group.trajectories]
    rewards = [rollout.reward for rollout in rollouts if rollout.parent is not None and rollout.reward is not None]
    void = Counter(void_reason(rollout) for rollout in rollouts if is_void(rollout))
    kinds = {
        kind: [group for group in groups if (group.id in behind) == (kind == "prefix")] for kind in ("task", "prefix")
    }
    return {
        "prefix_groups": len(behind) / max(len(groups), 1),
        **({"prefix_reward": sum(rewards) / len(rewards)} if rewards else {}),
        **{f"differing/{kind}": sum(map(_differs, found)) / len(found) for kind, found in kinds.items() if found},
        "prefix_void": float(void.total()),
        **{f"prefix_void/{reason}": float(count) for reason, count in void.items()},
        "sampled_tokens": float(sum(len(call.response_ids) for member in members for call in member.transitions)),
        "prefix_tokens": float(sum(map(_tokens_kept, members))),
    }


def _differs(group: Group) -> bool:
    return not all_equal(group_returns(group))


def _tokens_kept(member: Trajectory) -> int:
    """Return the number of tokens that a branch got from its parent's record."""
    at = next((call for call in member.parent_calls if call.key == member.rollout.parent), None)
    return 0 if at is None else sum(len(call.response_ids) for call in member.parent_calls if is_prefix(call, at))
