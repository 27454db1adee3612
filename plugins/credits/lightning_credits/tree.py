"""Credit on trees: a call's return is compared with the returns of other rollouts from the same state (the transition tree), or
with those of other continuations from the call at which rollouts branch.

The invariant: calls of one state are compared by the rewards from there on; earlier rewards of their rollouts are left out.
Among branches, independent rollouts are continuations from the start, and a branch and its parent are continuations from the
state of the call at which it branches. A continuation is never compared with itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from lightning.batch import Group, Trajectory, branched_at, is_prefix
from lightning.config import refuses_unknown
from lightning.credit import (
    GroupAdvantage,
    all_equal,
    centre,
    check_discount,
    group_returns,
    returns_to_go,
    rloo,
    state_ids,
)
from lightning.errors import ConfigError
from lightning.types import Transition


@refuses_unknown
@dataclass(frozen=True, slots=True)
class LeaveOneOut:
    """A credit: the return from each call on, minus the mean return of the *other* rollouts from the same state on.

    This is RLOO's baseline (arXiv 2402.14740) at every state that rollouts of the group share: the first prompt, later prompts
    while the histories are the same token ids, and prompts that no longer hold the difference. A rollout that was in the state
    several times counts once, with its mean, and never in its own baseline.

    A baseline from few rollouts is noisy, so this advantage is mixed with RLOO's over the whole group: with m other rollouts in
    the state, the state's advantage has the share m / (m + `prior`). With `prior` = 0 one other rollout is enough. If no other
    rollout was in the state, the group's advantage is used alone.

    The estimator is not used, and advantages are in units of the reward. Baselines and shares depend on the other rollouts
    alone, so they do not bias the policy gradient. Equal prompts are taken for equal states: if the environment has a state
    that the prompt does not show, the baseline fits less well, but is still unbiased.
    """

    prior: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.prior < np.inf:
            raise ConfigError(f"prior={self.prior} is not a number of rollouts: use 0 or more")

    def __call__(self, group: Group, advantage: GroupAdvantage) -> list[npt.NDArray[np.float64]]:
        """Return one array of advantages, shape (calls,), for each trajectory of the group."""
        counts = [len(trajectory.transitions) for trajectory in group.trajectories]
        earned = _joined([returns_to_go(trajectory) for trajectory in group.trajectories])
        rollouts = np.repeat(np.arange(len(counts)), counts)
        found = np.repeat(rloo(group_returns(group)), counts)
        for calls in _shared(state_ids(group)):
            visitors, inverse = np.unique(rollouts[calls], return_inverse=True)
            if (others := len(visitors) - 1) > 0:
                means = np.bincount(inverse, earned[calls]) / np.bincount(inverse)
                here = earned[calls] - means[inverse] + rloo(means)[inverse]
                found[calls] += others / (others + self.prior) * (here - found[calls])
        return _parted(found, counts)


@refuses_unknown
@dataclass(frozen=True, slots=True)
class GiGPO:
    """Group-in-group policy optimisation (arXiv 2505.10978): the rollout's advantage in its group, plus `omega` times the
    call's advantage among the calls made in the same anchor state.

    In each anchor group (equation 6) the estimator (equation 7) compares the discounted returns from each call on (equation 5).
    Every visit counts, so a rollout that was in a state twice counts twice, as in the paper; the only call of a state gets no
    second part. The estimator decides whether to divide by the deviation (F_norm). Anchor states are equal prompts: agents
    whose prompts hold their whole history share only the states before their histories differ.

    The second part is centred in its state under every low level. REINFORCE++ compares no rollouts within a group, but
    normalises over the step (arXiv 2501.03262) with one mean for all calls: without a mean of its own, a shared state would
    raise the advantages of all calls that were made in it.

    `gamma` and `omega` have the defaults of the authors' code. With gamma < 1 rollouts of different lengths differ in a
    state even if their rewards are equal.
    """

    gamma: float = 0.95
    omega: float = 1.0

    def __post_init__(self) -> None:
        check_discount(self.gamma)
        if not 0.0 <= self.omega < np.inf:
            raise ConfigError(f"omega={self.omega} is not a weight: use a number from 0 up")

    def __call__(self, group: Group, advantage: GroupAdvantage) -> list[npt.NDArray[np.float64]]:
        """Return one array of advantages, shape (calls,), for each trajectory of the group."""
        counts = [len(trajectory.transitions) for trajectory in group.trajectories]
        earned = _joined([returns_to_go(trajectory, self.gamma) for trajectory in group.trajectories])
        found = np.repeat(advantage(group_returns(group)), counts)
        for calls in _shared(state_ids(group)):
            found[calls] += self.omega * centre(advantage(earned[calls]))
        return _parted(found, counts)


def _shared(states: Sequence[npt.NDArray[np.int64]]) -> Iterator[npt.NDArray[np.intp]]:
    """Yield, for each state with more than one call, the indices of its calls, counted through all trajectories."""
    every = np.concatenate([np.zeros(0, np.int64), *states])
    order = np.argsort(every, kind="stable")
    for calls in np.split(order, np.flatnonzero(np.diff(every[order])) + 1):
        if len(calls) > 1:
            yield calls


def _joined(parts: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    return np.concatenate([np.zeros(0), *parts])


def _parted(values: npt.NDArray[np.float64], counts: Sequence[int]) -> list[npt.NDArray[np.float64]]:
    ends = np.cumsum(counts, dtype=np.intp)
    return [values[end - count : end] for end, count in zip(ends, counts, strict=True)]


Node = tuple[str, int, int]
"""A node of the tree of branches: the key of the call at which rollouts branch, or `START`, the beginning of the task."""

START: Node = ("", 0, 0)


@refuses_unknown
@dataclass(frozen=True, slots=True)
class Branched:
    """A credit for branched rollouts: the value of a continuation minus the mean of the *other* continuations from its node.

    A parent's calls are cut into segments at the calls where it has branches. Each cut is a node. Its continuations are the
    parent's own calls from there on and each branch; the continuations from the start are the group's independent rollouts. The
    value Q of a rollout's last segment is the rollout's return. The value Q of another segment is the value V of the node at
    its end: the mean Q of the continuations from there. All calls of a segment get the advantage

        Q - mean of the Q of the other continuations at its node.

    So the values of states are means over sampled continuations, as in VinePPO (arXiv 2410.01679), for segments of calls, as
    in SPO (arXiv 2505.23564), and the baseline at every node is RLOO's (arXiv 2402.14740). Without branches this is RLOO.

    A baseline from few continuations is noisy, so it is mixed with the baseline of the segment that leads to the node: with m
    other continuations, their mean has the share m / (m + `prior`). With `prior` = 0 it is their mean alone.

    A state with n continuations is trained on n times. With `shared` each counts 1/n: an advantage is divided by the product of
    the numbers of continuations at the nodes between the start and its call, so that the tree's expected gradient is that of
    its independent rollouts. Without `shared`, states after a branch weigh more than their frequency under the policy.

    Calls without a comparison get 0: those of a single independent rollout up to its first node, and those of a branch whose
    parent is not in the group. Several such branches at one call are compared with each other; if the whole group begins there,
    that call is its start.

    The estimator is not used, and advantages are in units of the reward. Given the state of a node, its continuations are
    independent, so no baseline biases the policy gradient, under one condition: the choice of the call to branch at may depend
    on what was known before the call was answered, not on the answer or on what followed.
    """

    prior: float = 1.0
    shared: bool = True

    knows_branches: ClassVar[bool] = True
    """True: this credit compares branches with what they part from."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.prior < np.inf:
            raise ConfigError(f"prior={self.prior} is not a number of continuations: use 0 or more")

    def __call__(self, group: Group, advantage: GroupAdvantage) -> list[npt.NDArray[np.float64]]:
        """Return one array of advantages, shape (calls,), for each trajectory of the group."""
        returns = group_returns(group)
        if all_equal(returns):
            return [np.zeros(len(member.transitions)) for member in group.trajectories]
        lines, nodes = _tree(group.trajectories)
        for line in reversed(lines):
            line.segments[-1].value = float(returns[line.member])
            for cut, segment in zip(reversed(line.cuts), reversed(line.segments[:-1]), strict=True):
                segment.value = float(np.mean([other.value for other in nodes[cut.key]]))
        cuts = {cut.key for line in lines for cut in line.cuts}
        roots = nodes.keys() - cuts
        for key in roots:
            is_start = key == START or len(roots) == 1
            self._compare(nodes[key], None, 1.0 if is_start else 1.0 / len(nodes[key]))
        for line in lines:
            for cut, before in zip(line.cuts, line.segments[:-1], strict=True):
                self._compare(nodes[cut.key], before.baseline, before.weight / len(nodes[cut.key]))
        found = [np.zeros(0)] * len(lines)
        for line in lines:
            found[line.member] = np.array([line.segments[place].credit for place in line.places], dtype=np.float64)
        return found

    def _compare(self, segments: Sequence[_Segment], outer: float | None, weight: float) -> None:
        """Set the advantages of the segments that begin at a node. `outer` is the baseline of the segment that leads to the
        node (None if it has none), `weight` the weight of each segment's advantage with `shared`."""
        others = len(segments) - 1
        beside = rloo(np.array([segment.value for segment in segments]))
        for segment, difference in zip(segments, beside, strict=True):
            advantage = float(difference)
            if outer is not None:
                share = others / (others + self.prior) if others else 0.0
                advantage = share * advantage + (1.0 - share) * (segment.value - outer)
            segment.baseline = segment.value - advantage if others or outer is not None else None
            segment.weight = weight
            segment.credit = advantage * weight if self.shared else advantage


@dataclass(slots=True)
class _Segment:
    """The calls of one rollout between two nodes, which all have the same credit."""

    value: float = 0.0
    baseline: float | None = None
    weight: float = 1.0
    credit: float = 0.0


@dataclass(slots=True)
class _Line:
    """The rollout number `member` of the group, from the node at which it begins to its end. `cuts` are its calls at which
    other rollouts branch; `places[i]` is the index in `segments` of the segment that its call i belongs to."""

    member: int
    cuts: list[Transition]
    places: list[int]
    segments: list[_Segment] = field(default_factory=list)


def _tree(members: Sequence[Trajectory]) -> tuple[list[_Line], dict[Node, list[_Segment]]]:
    """Return the rollouts, parents before their branches, and the segments that begin at each node."""
    starts = _starts(members)
    taken = set(starts)
    lines = []
    for member in _parents_first(members):
        calls = members[member].transitions
        cuts = [call for call in calls if call.key in taken]
        places = [sum(not is_prefix(call, cut) for cut in cuts) for call in calls]
        lines.append(_Line(member, cuts, places, [_Segment() for _ in range(len(cuts) + 1)]))
    nodes: dict[Node, list[_Segment]] = {}
    for line in lines:
        for node, segment in zip((starts[line.member], *(cut.key for cut in line.cuts)), line.segments, strict=True):
            nodes.setdefault(node, []).append(segment)
    return lines, nodes


def _starts(members: Sequence[Trajectory]) -> list[Node]:
    """Return the node at which each rollout begins. A branch that repeats no call of its parent begins at its parent's node."""
    places = branched_at(members)
    found = []
    for member in members:
        first = member
        for _ in members:
            at = places.get(first.rollout.id)
            if at is None or at.prefix:
                break
            first = at.parent
        found.append(first.rollout.parent or START)
    return found


def _parents_first(members: Sequence[Trajectory]) -> list[int]:
    """Return the indices of the rollouts in the group, ordered so that each comes after its parent."""
    places = branched_at(members)
    depths = []
    for member in members:
        depth, above = 0, places.get(member.rollout.id)
        while above is not None and depth < len(members):
            depth, above = depth + 1, places.get(above.parent.rollout.id)
        depths.append(depth)
    return sorted(range(len(members)), key=depths.__getitem__)
