"""Small decision tasks whose true advantages are known, rollouts of a fixed policy in them, and scores of credit functions. In
the bifurcation tasks a few calls decide and the others only make noise, in one of the ways that occur in agents.

The invariant: the sampled rollouts and the exact truth come from one description. The rollouts are real `Group`s with prompt
ids, agents and step rewards. The truth is solved exactly (linear equations, so loops are allowed), never estimated. Every
bifurcation task has a single difficulty, which its `about` names, so that its score has a clear meaning.

A branch here is recorded as a real one. It has only its own calls, from a state that its parent was in. The prefix that it
shares counts in its reward, and in step rewards that name its parent's calls.

The score of a credit function (how near it comes to the true advantages, and what that does to the policy gradient) is a
property of the credit and the task. Sampling noise is in the score only where it is meant to be (`correlation`, `variance`,
`cosine`: what a step has to live with); it is taken out of `bias`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning.algorithms.intake import one_per_call, per_call
from lightning.batch.trajectory import Group, Trajectory
from lightning.credit.advantage import rloo
from lightning.credit.protocol import Credit, GroupAdvantage
from lightning.errors import ConfigError, DataError
from lightning.testing.trajectories import make_call, make_trajectory
from lightning.types import StepReward, Transition

Floats: TypeAlias = npt.NDArray[np.float64]
Places: TypeAlias = npt.NDArray[np.int64]

BEGIN = 0
"""The first token id of every prompt. The ids after it are those of the states, then those of the actions."""


@dataclass(frozen=True, slots=True)
class ActionOutcome:
    """One possible outcome of an action. The call earns `step_reward` (as with `lightning.reward`). The rollout goes on in
    `state`, or ends with `reward` if `state` is empty."""

    probability: float = 1.0
    state: str = ""
    reward: float = 0.0
    step_reward: float = 0.0


@dataclass(frozen=True, slots=True)
class Action:
    """An action that the policy takes with `probability`. The policy does not know which of the outcomes will follow."""

    probability: float
    outcomes: tuple[ActionOutcome, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """A state in which `agent` is called. Calls of agents that are not `trained` belong to the environment."""

    actions: tuple[Action, ...]
    agent: str = "agent"
    trained: bool = True


@dataclass(frozen=True, slots=True)
class Truth:
    """The exact quantities of a task with S states and at most A actions, in the order of its states."""

    values: Floats
    """V, shape (S,): the expected return from each state on, undiscounted."""
    advantages: Floats
    """A = Q - V, shape (S, A); 0 where a state has fewer actions."""
    policy: Floats
    """Probabilities of the actions, shape (S, A)."""
    visits: Floats
    """The expected number of calls in each state during a rollout, shape (S,)."""
    trained: npt.NDArray[np.bool_]
    """Whether each state's calls are trained, shape (S,)."""

    @property
    def gradient(self) -> Floats:
        """The policy gradient with respect to one logit for each action of each trained state, shape (S, A): the policy
        gradient theorem (Sutton et al., NeurIPS 1999) for a softmax, visits · policy · advantage."""
        return np.where(self.trained[:, None], self.visits[:, None] * self.policy * self.advantages, 0.0)


@dataclass(frozen=True, slots=True)
class DecisionTask:
    """A task with named states, of which the first begins every rollout.

    With `memory`, as in a chat, a call's prompt holds the whole history: all states and answers so far, and the present state.
    Without `memory`, the prompt is the present state alone, so that rollouts with different histories meet again. Raises
    `ConfigError` for probabilities that are negative or do not add up to 1, for states that do not exist, and for rollouts that
    cannot end.
    """

    name: str
    states: Mapping[str, Decision]
    memory: bool = True
    about: str = ""

    def __post_init__(self) -> None:
        for name, state in self.states.items():
            _check_probabilities(f"{self.name}: the actions of {name!r}", [item.probability for item in state.actions])
            for action in state.actions:
                _check_probabilities(f"{self.name}: outcomes in {name!r}", [o.probability for o in action.outcomes])
                for outcome in action.outcomes:
                    if outcome.state and outcome.state not in self.states:
                        raise ConfigError(f"{self.name}: {name!r} leads to {outcome.state!r}, which is no state")
                    if outcome.state and outcome.reward:
                        raise ConfigError(
                            f"{self.name}: {name!r} gives the reward {outcome.reward} and goes on to {outcome.state!r}; "
                            "only the end has a reward: use step_reward"
                        )
        if endless := self.states.keys() - _can_end(self.states):
            raise ConfigError(f"{self.name}: a rollout that comes to {min(endless)!r} can never end")

    def truth(self) -> Truth:
        """Compute values, advantages and visits under the task's own policy."""
        places = {name: place for place, name in enumerate(self.states)}
        count, width = len(places), max(len(state.actions) for state in self.states.values())
        policy, rewards = np.zeros((count, width)), np.zeros((count, width))
        follows = np.zeros((count, width, count))
        for place, state in enumerate(self.states.values()):
            for number, action in enumerate(state.actions):
                policy[place, number] = action.probability
                for outcome in action.outcomes:
                    rewards[place, number] += outcome.probability * (outcome.reward + outcome.step_reward)
                    if outcome.state:
                        follows[place, number, places[outcome.state]] += outcome.probability
        stays = np.eye(count) - np.einsum("sa,san->sn", policy, follows)
        values = np.linalg.solve(stays, (policy * rewards).sum(axis=1))
        visits = np.linalg.solve(stays.T, np.eye(count)[0])
        advantages = np.where(policy > 0, rewards + follows @ values - values[:, None], 0.0)
        trained = np.array([state.trained for state in self.states.values()])
        return Truth(values, advantages, policy, visits, trained)


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """A sampled group, and for each trajectory the state of each call and the action taken, shape (calls,)."""

    group: Group
    states: tuple[Places, ...]
    actions: tuple[Places, ...]


def sample_group(
    task: DecisionTask,
    size: int,
    rng: np.random.Generator,
    *,
    name: str = "group",
    values: Floats | None = None,
) -> SampledGroup:
    """Sample `size` rollouts of a task. `values`, shape (S,), are a critic's values of the states: they become
    `Trajectory.values`, NaN for calls that are not trained."""
    paths = [walk(task, DecisionPath(), rng) for _ in range(size)]
    made = [path_trajectory(task, path, name, index, values) for index, path in enumerate(paths)]
    return as_sampled(name, made, paths)


@dataclass(slots=True)
class DecisionPath:
    """The calls of one rollout (state, action and step reward of each), and the reward at the end."""

    states: list[int] = field(default_factory=list)
    actions: list[int] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    reward: float = 0.0

    def part(self, calls: slice) -> DecisionPath:
        """Return the path with only these calls."""
        return DecisionPath(self.states[calls], self.actions[calls], self.steps[calls], self.reward)


def walk(task: DecisionTask, path: DecisionPath, rng: np.random.Generator, at: int = 0) -> DecisionPath:
    """Extend a path by the policy's calls from the state number `at` to the end of the rollout, and return the path."""
    places = {state: place for place, state in enumerate(task.states)}
    decisions = list(task.states.values())
    while True:
        choices = decisions[at].actions
        action = _drawn(rng, choices)
        outcomes = choices[action].outcomes
        outcome = outcomes[_drawn(rng, outcomes)]
        path.states.append(at)
        path.actions.append(action)
        path.steps.append(outcome.step_reward)
        if not outcome.state:
            path.reward = outcome.reward
            return path
        at = places[outcome.state]


def path_trajectory(
    task: DecisionTask, path: DecisionPath, group: str, index: int, values: Floats | None = None
) -> Trajectory:
    """Return the path as a trajectory with one call for each decision. The state is the last token id of the call's prompt. The
    action is the call's only response token, with the policy's logprob of the action. `values`, shape (S,), are a critic's
    values of the states; the calls that are not trained get NaN."""
    decisions = list(task.states.values())
    made = make_trajectory([], rollout=f"{group}/{index}", group=group, index=index, reward=path.reward)
    prompt, calls = [BEGIN], []
    for seq, (at, action) in enumerate(zip(path.states, path.actions, strict=True)):
        prompt = [*prompt, 1 + at] if task.memory else [BEGIN, 1 + at]
        response = [1 + len(decisions) + action]
        logprob, agent = math.log(decisions[at].actions[action].probability), decisions[at].agent
        calls.append(make_call(prompt, response, rollout=made.rollout.id, seq=seq, logprob=logprob, agent=agent))
        prompt = prompt + response
    flags = tuple(decisions[at].trained for at in path.states)
    said: tuple[float, ...] = ()
    if values is not None:
        said = tuple(float(values[at]) if own else math.nan for at, own in zip(path.states, flags, strict=True))
    steps = zip(calls, path.steps, strict=True)
    rewards = tuple(StepReward(value, "step", call.id) for call, value in steps if value)
    return Trajectory(made.rollout, tuple(calls), flags, (), rewards, said)


def as_sampled(name: str, made: Sequence[Trajectory], paths: Sequence[DecisionPath]) -> SampledGroup:
    """Return the group of these trajectories, with the states and actions of `paths`. Path i has the calls of trajectory i."""
    states = tuple(np.array(path.states, dtype=np.int64) for path in paths)
    actions = tuple(np.array(path.actions, dtype=np.int64) for path in paths)
    return SampledGroup(Group(name, tuple(made)), states, actions)


def _drawn(rng: np.random.Generator, choices: Sequence[Action] | Sequence[ActionOutcome]) -> int:
    """Draw the index of one of the choices, by their probabilities."""
    last = len(choices) - 1
    left = rng.random() if last else 0.0
    for index in range(last):
        left -= choices[index].probability
        if left < 0.0:
            return index
    return last


def _check_probabilities(what: str, probabilities: Sequence[float]) -> None:
    if not probabilities or min(probabilities) < 0 or abs(sum(probabilities) - 1.0) > 1e-9:
        raise ConfigError(
            f"{what} have the probabilities {list(probabilities)}, which must be 0 or more and add up to 1"
        )


def _can_end(states: Mapping[str, Decision]) -> set[str]:
    """Return the states from which a rollout ends with some probability."""
    ending: set[str] = {""}
    while True:
        more = {
            name
            for name, state in states.items()
            if name not in ending
            and any(
                action.probability > 0 and outcome.probability > 0 and outcome.state in ending
                for action in state.actions
                for outcome in action.outcomes
            )
        }
        if not more:
            return ending - {""}
        ending |= more


@cache
def bifurcation_tasks() -> Mapping[str, DecisionTask]:
    """Return all bifurcation tasks, by name."""
    made = (
        early(), late(), long_chain(), two_agents(), consult(), wasteful_tool(), late_bill(), recombining(), retry()
    )  # fmt: skip
    return MappingProxyType({task.name: task for task in made})


def early(noise: int = 4) -> DecisionTask:
    """A task whose first call decides; the calls after it change nothing."""
    states = {"choose": Decision((_go(0.5, "right-1"), _go(0.5, "wrong-1")))}
    states |= _chain("right-", noise, 0.9) | _chain("wrong-", noise, 0.1)
    return DecisionTask("early", states, about="the first call decides, the others are noise")


def late(noise: int = 4) -> DecisionTask:
    """A task whose last call decides; the calls before it change nothing."""
    states = {f"noise-{place}": _noise(f"noise-{place + 1}" if place < noise else "choose") for place in _to(noise)}
    states["choose"] = Decision((_end(0.5, 0.9), _end(0.5, 0.1)))
    return DecisionTask("late", states, about="the last call decides, the others are noise")


def long_chain(calls: int = 12, decisive: int = 6) -> DecisionTask:
    """A task with one deciding call in the middle of many that change nothing."""
    states = {
        f"noise-{place}": _noise(f"noise-{place + 1}" if place + 1 < decisive else "choose")
        for place in _to(decisive - 1)
    }
    states["choose"] = Decision((_go(0.5, "right-1"), _go(0.5, "wrong-1")))
    states |= _chain("right-", calls - decisive, 0.9) | _chain("wrong-", calls - decisive, 0.1)
    return DecisionTask("long-chain", states, about=f"call {decisive} of {calls} decides, the others are noise")


def two_agents(turns: int = 2) -> DecisionTask:
    """A task with a planner whose first call decides, a writer who changes nothing, and a judge who is not trained."""
    states = {"plan": Decision((_go(0.5, "right-1"), _go(0.5, "wrong-1")), "planner")}
    for side, success in (("right-", 0.9), ("wrong-", 0.1)):
        for turn in _to(turns):
            states[f"{side}{turn}"] = _noise(f"{side}{turn + 1}" if turn < turns else f"{side}judge", agent="writer")
        states[f"{side}judge"] = Decision((_end(1.0, success),), "judge", trained=False)
    return DecisionTask(
        "two-agents", states, about="the planner decides, the writer is noise, the judge is not trained"
    )


def consult() -> DecisionTask:
    """A task with a router that does the work alone, or asks an expert, whose own decision matters less than being asked."""
    states = {
        "route": Decision((_go(0.5, "expert"), _end(0.5, 0.1)), "router"),
        "expert": Decision((_end(0.5, 0.95), _end(0.5, 0.65)), "expert"),
    }
    return DecisionTask("consult", states, about="an agent that is called only where things go well anyway")


def wasteful_tool(calls: int = 4) -> DecisionTask:
    """A task in which a call of a useless tool costs a quarter at once; success is a coin toss."""
    states = {}
    for place in _to(calls):
        after = f"work-{place + 1}" if place < calls else ""
        ends = tuple(ActionOutcome(0.5, reward=reward) for reward in (1.0, 0.0))
        waste = tuple(ActionOutcome(item.probability, "", item.reward, -0.25) for item in ends)
        states[f"work-{place}"] = Decision(
            (
                Action(0.5, (ActionOutcome(state=after),) if after else ends),
                Action(0.5, (ActionOutcome(state=after, step_reward=-0.25),) if after else waste),
            )
        )
    return DecisionTask("wasteful-tool", states, about="each call may cost a step reward at once; the outcome is luck")


def late_bill(noise: int = 2) -> DecisionTask:
    """A task whose first call decides the cost that a later call has to pay and cannot change."""
    states = {"choose": Decision((_go(0.5, "careful-1"), _go(0.5, "careless-1")))}
    for side, cost in (("careful-", 0.0), ("careless-", -0.5)):
        states |= {
            f"{side}{place}": _noise(f"{side}{place + 1}" if place < noise else f"{side}bill") for place in _to(noise)
        }
        pays = tuple(ActionOutcome(0.5, reward=reward, step_reward=cost) for reward in (1.0, 0.0))
        states[f"{side}bill"] = Decision((Action(0.5, pays), Action(0.5, pays)))
    return DecisionTask("late-bill", states, about="the first call decides on a step reward that a later call gets")


def recombining(stages: int = 3, memory: bool = False) -> DecisionTask:
    """A task in which luck puts the rollout into one of three places, which differ by 0.4; then each call earns 0.2 or nothing.

    Prompts show the place and the stage, so rollouts meet again in the same state. With `memory` prompts also show the earlier
    actions, and fewer rollouts share a state.
    """
    order = ("low", "mid", "high")
    states = {"start": _noise(*(f"{name}-1" for name in order))}
    for place, name in enumerate(order):
        for stage in _to(stages):
            after = f"{name}-{stage + 1}" if stage < stages else ""
            reward = 0.0 if after else 0.4 * place
            states[f"{name}-{stage}"] = Decision(
                tuple(Action(0.5, (ActionOutcome(1.0, after, reward, earned),)) for earned in (0.2, 0.0))
            )
    return DecisionTask("recombining", states, memory, "luck decides most, then rollouts meet in the same few states")


def retry() -> DecisionTask:
    """A task to try with care, try in haste, or give up; a failed try costs a little and leads back to the same prompt."""
    states = {
        "read": _noise("easy", "hard"),
        "easy": _try("easy", 0.8, 0.5),
        "hard": _try("hard", 0.4, 0.1),
    }
    return DecisionTask("retry", states, False, "a failed call costs a step reward and leads back to the same state")


def _try(name: str, careful: float, hasty: float) -> Decision:
    tries = tuple(
        Action(0.4, (ActionOutcome(success, reward=1.0), ActionOutcome(1.0 - success, name, step_reward=-0.1)))
        for success in (careful, hasty)
    )
    return Decision((*tries, Action(0.2, (ActionOutcome(),))))


def _go(probability: float, *states: str) -> Action:
    """An action that leads to one of the states, with equal probabilities."""
    return Action(probability, tuple(ActionOutcome(1.0 / len(states), state) for state in states))


def _end(probability: float, success: float) -> Action:
    """An action that ends the rollout with the reward 1 or 0."""
    return Action(probability, (ActionOutcome(success, reward=1.0), ActionOutcome(1.0 - success)))


def _noise(*states: str, agent: str = "agent") -> Decision:
    """Two actions that make no difference."""
    return Decision((_go(0.5, *states), _go(0.5, *states)), agent)


def _chain(prefix: str, calls: int, success: float) -> dict[str, Decision]:
    """Calls that change nothing, up to an end with this probability of success."""
    chain = {f"{prefix}{place}": _noise(f"{prefix}{place + 1}") for place in _to(calls - 1)}
    return {**chain, f"{prefix}{calls}": Decision((_end(0.5, success), _end(0.5, success)))}


def _to(count: int) -> range:
    return range(1, count + 1)


BranchBy: TypeAlias = Literal["random", "entropy", "variance"]
"""The values of `trainer.branch_by`."""


class ChoosesPoints(Protocol):
    """A function that chooses the calls of trunks to branch at, as `lightning_branching.branch_points.branch_points` does."""

    def __call__(
        self,
        trunks: Sequence[Trajectory],
        tokens: float,
        by: BranchBy = ...,
        seed: int = ...,
        branches: Sequence[Trajectory] = ...,
        per_call: float | None = ...,
    ) -> Sequence[tuple[Trajectory, Transition]]:
        """Return the chosen calls, each with its trunk, for this many tokens."""


@dataclass(frozen=True, slots=True)
class TreeSampling:
    """How to sample a group as a tree: `trunks` independent rollouts, and branches in place of the group's other rollouts. The
    branches begin at the calls that `points` chooses, according to `by`.

    A call counts as one token here. The branches may sample as many calls as the other rollouts would have, estimated from the
    trunks. With `variance`, half of these calls are spent before returns are looked at, as with `trainer.sampling = tree`. With
    `per_call`, each call has this many branches on average, however many calls that takes.
    """

    points: ChoosesPoints
    trunks: int = 4
    by: BranchBy = "random"
    per_call: float | None = None

    def __post_init__(self) -> None:
        if self.trunks < 1:
            raise ConfigError(f"trunks={self.trunks}: give the number of rollouts to branch, 1 or more")


def sample_tree(
    task: DecisionTask,
    size: int,
    tree: TreeSampling,
    rng: np.random.Generator,
    *,
    name: str = "group",
    values: Floats | None = None,
) -> SampledGroup:
    """Sample a group with about as many calls as `size` independent rollouts have. `values` is as in `sample_group`."""
    paths = [walk(task, DecisionPath(), rng) for _ in range(tree.trunks)]
    trunks = [path_trajectory(task, path, name, index, values) for index, path in enumerate(paths)]
    made, own = list(trunks), list(paths)
    share = 1e6 if tree.per_call is not None else max(0, size - tree.trunks) / tree.trunks
    tokens = share * sum(len(path.states) for path in paths)
    for part in (tokens / 2, tokens / 2) if tree.by == "variance" else (tokens,):
        seed = int(rng.integers(2**31))
        known = made[len(trunks) :]
        for trunk, call in tree.points(trunks, part, tree.by, seed, known, tree.per_call):
            at = paths[trunk.rollout.index]
            whole = walk(task, at.part(slice(call.seq)), rng, at.states[call.seq])
            made.append(branch_of(path_trajectory(task, whole, name, len(made), values), trunk, call.seq))
            own.append(whole.part(slice(call.seq, None)))
    return as_sampled(name, made, own)


def branch_of(whole: Trajectory, trunk: Trajectory, seq: int) -> Trajectory:
    """Return a branch as it is recorded: the rollout `whole` without the calls before `seq`, which it shares with its trunk."""
    name = whole.rollout.id
    calls = [replace(call, seq=place, id=f"{name}/{place}") for place, call in enumerate(whole.transitions[seq:])]
    known = [call.id for call in (*trunk.transitions[:seq], *calls)]
    ids = dict(zip((call.id for call in whole.transitions), known, strict=True))
    steps = tuple(replace(reward, response_id=ids[reward.response_id]) for reward in whole.step_rewards)
    return replace(
        whole,
        rollout=replace(whole.rollout, parent=trunk.transitions[seq].key),
        transitions=tuple(calls),
        trainable=whole.trainable[seq:],
        step_rewards=steps,
        values=whole.values[seq:],
    )


def independent(group: Sequence[Trajectory]) -> int:
    """Return how many of the trajectories are not branches."""
    return sum(member.rollout.parent is None for member in group)


@dataclass(frozen=True, slots=True)
class CreditScore:
    """How good a credit's advantages are on a task. Gradients are with respect to one logit for each action of each state, and
    every call has the same weight: no clipping, no normalisation by tokens."""

    correlation: float
    """Pearson's correlation between given and true advantages over all trained calls; 0 if all given advantages are
    equal."""
    slope: float
    """The slope of the given advantages on the true ones, by least squares: 1 if a better action gets exactly its advantage
    more."""
    bias: float
    """0 to 1: the part of the truth that remains after the *expected* gradient, at its best scale, is subtracted. With Â(s, a)
    the expected gradient per visit (the mean advantage of action a in state s, less that of the state) it is min over c >= 0 of
    ||c Â - A|| / ||A||, weighted by visits: the sine of the angle between them. Noise is removed by multiplying the means of
    two halves of the groups."""
    variance: float
    """The summed variance of one group's gradient over the squared length of its expectation: the number of groups to average
    until noise is as long as signal. Infinite when there is no signal."""
    cosine: float
    """The cosine between one group's gradient and the true one, averaged over groups; 0 for a group whose gradient is 0."""
    calls: float
    """The mean number of calls that a group sampled."""


def score_credit(
    credit: Credit,
    task: DecisionTask,
    *,
    groups: int = 400,
    group_size: int = 8,
    seed: int = 0,
    advantage: GroupAdvantage = rloo,
    value_error: float = 0.0,
    tree: TreeSampling | None = None,
) -> CreditScore:
    """Sample groups of a task and compare the credit's advantages with the true ones.

    `advantage` is the estimator that the credit is given. Credits that read `Trajectory.values` get the exact value of each
    state plus a normal error of deviation `value_error`, drawn once for each state: a critic errs in the same way each time.
    With `tree`, a group has fewer independent rollouts and branches of them, for about as many calls (`CreditScore.calls`) as
    `group_size` rollouts make. Raises `DataError` when the credit does not give one finite number for each call.
    """
    scores = score_credits(
        {"credit": credit},
        task,
        groups=groups,
        group_size=group_size,
        seed=seed,
        advantage=advantage,
        value_error=value_error,
        tree=tree,
    )
    return scores["credit"]


def score_credits(
    named: Mapping[str, Credit],
    task: DecisionTask,
    *,
    groups: int = 400,
    group_size: int = 8,
    seed: int = 0,
    advantage: GroupAdvantage = rloo,
    value_error: float = 0.0,
    tree: TreeSampling | None = None,
) -> dict[str, CreditScore]:
    """Score several credits on the same rollouts, each as `score_credit` does."""
    if groups < 2:
        raise ConfigError(f"groups={groups}: the score needs at least 2")
    truth = task.truth()
    if not truth.gradient.any():
        raise ConfigError(f"{task.name}: none of the trained decisions makes a difference, so there is nothing to find")
    rng = np.random.default_rng(seed)
    values = truth.values + value_error * rng.standard_normal(len(truth.values))
    names = [f"group-{number}" for number in range(groups)]
    if tree is None:
        sampled = [sample_group(task, group_size, rng, name=name, values=values) for name in names]
    else:
        sampled = [sample_tree(task, group_size, tree, rng, name=name, values=values) for name in names]
    return {name: _score(truth, _calls(credit, sampled, advantage), sampled) for name, credit in named.items()}


def _calls(credit: Credit, sampled: Sequence[SampledGroup], advantage: GroupAdvantage) -> Floats:
    """Return the credit's advantages of all calls of all groups, in one flat array, where a call has one for each token their
    mean. Raises `DataError` for other shapes."""
    parts: list[Floats] = []
    for each in sampled:
        name = str(getattr(credit, "__qualname__", repr(credit)))
        given = per_call(each.group, credit(each.group, advantage), name, "finite advantage")
        parts.extend(np.array(one_per_call(own)) for own in given)
    found = np.concatenate(parts)
    if not np.isfinite(found).all():
        raise DataError("the credit gave a number that is not finite: it must give one finite advantage for each call")
    return found


def _score(truth: Truth, given: Floats, sampled: Sequence[SampledGroup]) -> CreditScore:
    groups, rollouts = len(sampled), independent(sampled[0].group.trajectories)
    states = np.concatenate([own for each in sampled for own in each.states])
    actions = np.concatenate([own for each in sampled for own in each.actions])
    number = np.repeat(np.arange(groups), [sum(map(len, each.states)) for each in sampled])
    kept = truth.trained[states]
    states, actions, given, number = states[kept], actions[kept], given[kept], number[kept]
    correlation, slope = _regression(given, truth.advantages[states, actions])
    gradients = np.zeros((groups, *truth.policy.shape))
    np.add.at(gradients, (number, states, actions), given)
    total = np.zeros((groups, len(truth.policy)))
    np.add.at(total, (number, states), given)
    gradients = ((gradients - total[:, :, None] * truth.policy) / rollouts).reshape(groups, -1)
    true, weights = truth.gradient.ravel(), (truth.visits[:, None] * truth.policy).ravel()
    lengths = np.linalg.norm(gradients, axis=1) * np.linalg.norm(true)
    cosines = np.divide(gradients @ true, lengths, out=np.zeros(groups), where=lengths > 0)
    one, other = gradients[::2].mean(axis=0), gradients[1::2].mean(axis=0)
    signal = float(one @ other)
    noise = float(gradients.var(axis=0, ddof=1).sum())
    return CreditScore(
        correlation,
        slope,
        _bias(one, other, true, weights),
        noise / signal if signal > 0 else float("inf"),
        float(cosines.mean()),
        sum(len(own) for each in sampled for own in each.states) / groups,
    )


def _regression(given: Floats, true: Floats) -> tuple[float, float]:
    """Return Pearson's correlation, and the slope of the given on the true advantages."""
    given, true = given - given.mean(), true - true.mean()
    common, own, others = float(given @ true), float(given @ given), float(true @ true)
    if others == 0.0:
        return 0.0, 0.0
    return (common / math.sqrt(own * others) if own > 1e-24 * len(given) else 0.0), common / others


def _bias(one: Floats, other: Floats, true: Floats, weights: Floats) -> float:
    """Return the sine of the angle between expected and true gradient, weighted by visits; 1 beyond a right angle."""
    seen = weights > 0
    one, other, true = (part[seen] / np.sqrt(weights[seen]) for part in (one, other, true))
    along, across = float(one @ true), float(other @ true)
    length = float(one @ other)
    if length <= 0 or along <= 0 or across <= 0:
        return 1.0
    return math.sqrt(max(0.0, 1.0 - along * across / (length * float(true @ true))))
