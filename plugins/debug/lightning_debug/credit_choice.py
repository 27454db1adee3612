"""Choose the recorded decisions that a credit audit executes, and find the groups that they were credited in.

The invariant: the choice depends on the seed, the record and no return, so that a share of the chosen decisions estimates that
of all. A decision that cannot be executed is left out with its reason, which is counted.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from lightning.algorithms.intake import Intake, Overlong, with_rules
from lightning.algorithms.protocol import Algorithm, head_of
from lightning.batch import Group, Trajectory, is_prefix, is_trained
from lightning.errors import ConfigError, DataError
from lightning.store.protocol import Store
from lightning.trainer.context import PolicyFault, epoch_at, read_epochs
from lightning.trainer.plan import VAL
from lightning.trainer.runs import rebuild_algorithm
from lightning.trainer.training_data import agents_of_step, all_rollouts, load_groups
from lightning.types import Json, Run, by_key
from lightning_branching.recorded import Prefix, RecordedCall, live_tools, prefix_of, version_of
from lightning_branching.replay_command import Found, found_in
from lightning_proof.recorded_step import recorded_values, rollouts_of


@dataclass(frozen=True, slots=True)
class Recorded:
    """The groups that a step trained on, or that an evaluation sampled, with the rewards that the algorithm's rules add.
    `train_agents` and `policy_fault` are those of their run. `algorithm` is None if only the user's own code can make it;
    `described_credit` is the credit in the record of the algorithm, None if that has none."""

    run: Run
    step: int
    groups: tuple[Group, ...]
    train_agents: tuple[str, ...]
    policy_fault: PolicyFault
    algorithm: Algorithm | None
    described_credit: Json = None

    def rewarded_branches(self, group: Group) -> Group:
        """Return a group of branches of these rollouts with the rewards that the algorithm's rules add. The calls that a branch
        repeats of its parent count, too: a whole rollout is too long or not, wherever its record ends."""
        wanted = {member.rollout.parent[0] for member in group.trajectories if member.rollout.parent is not None}
        every = (member for each in self.groups for member in each.trajectories)
        parents = tuple(member for member in every if member.rollout.id in wanted)
        found = rewarded(Group(group.id, (*parents, *group.trajectories)), self.algorithm)
        return Group(group.id, found.trajectories[len(parents) :])

    @property
    def has_values(self) -> bool:
        """Whether the calls have the values of a critic."""
        return any(member.values for group in self.groups for member in group.trajectories)


def rewarded(group: Group, algorithm: Algorithm | None) -> Group:
    """Return the group with the rewards that its algorithm's rules add: for tools, and for answers that are too long."""
    tokens = getattr(algorithm, "overlong_tokens", None)
    overlong = None
    if tokens is not None:
        overlong = Overlong(
            tokens, getattr(algorithm, "overlong_buffer", 0), getattr(algorithm, "overlong_penalty", 1.0)
        )
    return with_rules(group, getattr(algorithm, "tool_reward", None), overlong)


async def read_recorded(store: Store, run: Run, step: int | None, *, held_out: bool) -> Recorded:
    """Read the groups of a committed step, or with `held_out` of the evaluation after so many steps; None takes the last step.
    Raises `ConfigError` if there is no such step or evaluation."""
    last = await store.last_step(run.id)
    steps = last.step if last is not None else 0
    chosen = steps if step is None else step
    if not (0 if held_out else 1) <= chosen <= steps:
        raise ConfigError(f"run {run.id} has {steps} committed steps: there is no step {chosen} to audit")
    epochs = await read_epochs(store, run)
    epoch = epoch_at(epochs, max(1, chosen))
    globs, algorithm = epoch.train_agents, rebuild_algorithm(epoch.config)
    if held_out:
        rollouts = await all_rollouts(store, run.id, split=VAL, step=chosen)
        if not rollouts:
            raise ConfigError(f"run {run.id} was not evaluated after {chosen} steps: leave --held-out out")
    else:
        (record,) = await store.steps(run.id, after=chosen - 1, limit=1)
        globs = agents_of_step(epoch, record)
        rollouts = await rollouts_of(store, record, epoch.max_staleness or 0)
    groups = await load_groups(store, rollouts, globs, epoch.policy_fault)
    if algorithm is not None and head_of(algorithm) and not held_out:
        groups = await recorded_values(store, run.id, chosen, groups)
    sound = (Intake().sound(rewarded(group, algorithm)) for group in groups)
    described = epoch.config.get("algorithm")
    arguments = described.get("arguments") if isinstance(described, Mapping) else None
    credit = arguments.get("credit") if isinstance(arguments, Mapping) else None
    return Recorded(run, chosen, tuple(sound), globs, epoch.policy_fault, algorithm, credit)


@dataclass(frozen=True, slots=True)
class Decision:
    """A recorded call whose answer is to be executed, and the call that came `after` it; None if it ended the rollout. `prefix`
    is the part of the record before the call, and `tools` run again in its branches."""

    group: str
    call: RecordedCall
    prefix: Prefix
    after: RecordedCall | None
    tools: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen decisions, by rollout. `first` is one of the rollouts, whose prompts and seed all have; `version` is that of
    the policy that answered. `left_out` counts the calls and rollouts that cannot be executed, by reason."""

    first: Found
    version: int
    decisions: tuple[Decision, ...]
    left_out: Counter[str] = field(default_factory=Counter)


async def choose(store: Store, recorded: Recorded, rollouts: int, calls: int | None, seed: int) -> Choice:
    """Choose at most `calls` decisions (None: all) of each of `rollouts` rollouts, as many as possible of different tasks.
    Raises `DataError` if no decision of the groups can be executed."""
    left_out: Counter[str] = Counter()
    rng = random.Random(f"{seed}/{recorded.run.id}/{recorded.step}")  # noqa: S311 — a choice, not a secret
    version, first = _version_of(recorded.groups), None
    chosen: list[Decision] = []
    taken = 0
    for group, member in _in_turns(recorded.groups, rng, left_out):
        if taken == rollouts:
            break
        if len(member.transitions) < 2:
            left_out["rollouts of one call, whose credit has nothing to divide"] += 1
            continue
        try:
            found = await found_in(store, member.rollout.id, member.rollout.attempt)
        except DataError as error:
            left_out[str(error).partition(": ")[2] or str(error)] += 1
            continue
        if first is not None and (found.prompts, found.how.seed) != (first.prompts, first.how.seed):
            left_out["rollouts with other prompts than the first one's"] += 1
            continue
        own = list(_decisions(group.id, member, found, version, left_out))
        if own:
            first, taken = first or found, taken + 1
            kept = sorted(rng.sample(range(len(own)), min(len(own), calls or len(own))))
            chosen += [own[place] for place in kept]
    if first is None:
        reasons = "; ".join(f"{count} x {why}" for why, count in left_out.most_common(3))
        raise DataError(
            f"no decision of step {recorded.step} of run {recorded.run.id} can be executed"
            + (f": {reasons}" if reasons else ": it has no rollout with a trained call")
        )
    return Choice(first, version, tuple(chosen), left_out)


def _in_turns(
    groups: Sequence[Group], rng: random.Random, left_out: Counter[str]
) -> Iterator[tuple[Group, Trajectory]]:
    """Yield the rollouts that are no branches and have trained calls, in random order: one of each task, then another one of
    each, and so on. Count the others."""
    able = []
    for group in groups:
        for member in group.trajectories:
            if member.rollout.parent is not None:
                left_out["rollouts that are branches themselves"] += 1
            elif any(map(is_trained, member.transitions, member.trainable)):
                able.append((group, member))
            else:
                left_out["rollouts without a trained call"] += 1
    of_tasks = list(by_key(able, lambda each: each[1].rollout.task.id).values())
    shuffled = [rng.sample(own, len(own)) for own in rng.sample(of_tasks, len(of_tasks))]
    for turn in zip_longest(*shuffled):
        yield from (each for each in turn if each is not None)


def _version_of(groups: Sequence[Group]) -> int:
    """Return the policy version that answered most trained calls."""
    versions = Counter(
        version_of(call, member.rollout)
        for group in groups
        for member in group.trajectories
        for call, trainable in zip(member.transitions, member.trainable, strict=True)
        if is_trained(call, trainable)
    )
    return max(versions, key=lambda version: (versions[version], version), default=0)


def _decisions(
    group: str, member: Trajectory, found: Found, version: int, left_out: Counter[str]
) -> Iterator[Decision]:
    """Yield the trained calls of a rollout that can be executed; count the others by reason."""
    trained = {
        call.seq
        for call, trainable in zip(member.transitions, member.trainable, strict=True)
        if is_trained(call, trainable) and not call.choice
    }
    several = {call.id for call in member.transitions if call.choice}
    for call in found.recorded.calls:
        if call.transition.seq not in trained:
            continue
        runs = call.transition.versions
        if len(runs) > 1 or version_of(call.transition, member.rollout) != version:
            left_out[f"calls that were not answered by version {version} alone"] += 1
        elif call.transition.id in several:
            left_out["calls with several choices"] += 1
        else:
            made = _decision(group, found, call)
            if isinstance(made, str):
                left_out[made] += 1
            else:
                yield made


def _decision(group: str, found: Found, call: RecordedCall) -> Decision | str:
    """Return a call as a decision, or why it cannot be executed: what follows one answer can only be sampled apart if no other
    call was under way beside it."""
    recorded = found.recorded
    after = next((each for each in recorded.calls if is_prefix(call.transition, each.transition)), None)
    try:
        prefix = prefix_of(recorded, call.transition.seq)
        tools = tuple(live_tools(recorded, prefix))
        if after is None:
            return "calls beside others" if prefix.beside else Decision(group, call, prefix, None, tools)
        behind = prefix_of(recorded, after.transition.seq)
    except DataError as error:
        return str(error).partition(": ")[2] or str(error)
    if {each.number for each in behind.answered} != {call.number, *(each.number for each in prefix.answered)}:
        return "calls beside others"
    return Decision(group, call, prefix, after, tools)
