"""At which calls of a group's finished rollouts to branch, for a number of tokens.

The invariant: the answer is a pure function of its arguments, and no order of the trunks changes it. Every point can be
branched: its call is trained, something was answered before it, and nothing before it broke off or was refused. The points
together cost at most the tokens that may be spent.

A branch at a call is expected to cost what its trunk sampled from that call on.

Credit from branches (`lightning.credit.Branched`) is unbiased where the choice of a call does not depend on what it was
answered, nor on what followed. `random` keeps to it with `per_call`, as long as the tokens suffice. Where it spends all
tokens, a call of a short rollout gets more branches than one of a long rollout. `entropy` looks at the answers themselves, and
`variance` at their returns, once there are any.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, get_args

import numpy as np
from lightning.batch import Trajectory, is_prefix, is_trained
from lightning.credit.protocol import rollout_return
from lightning.errors import ConfigError
from lightning.types import Transition

from lightning_branching.config import BranchBy

BranchPoint: TypeAlias = tuple[Trajectory, Transition]

FIRST_TOKENS = 20
"""How many of an answer's first tokens say how uncertain it was."""


def branch_points(
    trunks: Sequence[Trajectory],
    tokens: float,
    by: BranchBy = "random",
    seed: int | str = 0,
    branches: Sequence[Trajectory] = (),
    per_call: float | None = None,
) -> list[BranchPoint]:
    """The calls to branch at, in the order in which they were chosen; a call that is there twice gets two branches.

    `trunks` are the finished rollouts of a group, `tokens` how many may be sampled for branches. `branches` are those that
    the group has already. The calls without one are taken in an order, and those that there are no tokens left for are passed
    over; when each was taken once, the order begins again, with all calls. `per_call` is how many branches a call gets at most,
    on average: with 0.3, each call is left out with the probability 0.7. None: what the tokens allow.

    - `random`: the order is drawn anew each time, from `seed`.
    - `entropy`: calls that follow a tool run come first (ARPO, arXiv 2507.19849, branches after tool use). Among them the
      answer is first whose `FIRST_TOKENS` first tokens have the least mean logprob; of equal ones, any. Answers without
      logprobs come last.
    - `variance`: the middle of each trunk, then the quarters, and so on. Where `branches` has returns that differ, these calls
      come before the others: with n returns of variance s² (the trunk's among them) one more takes s² / (n (n + 1)) off the
      variance of their mean, and each next branch goes where that is most for a token.

    Raises `ConfigError` for another `by`, and for numbers that mean nothing.
    """
    if not np.isfinite(tokens):
        raise ConfigError(f"tokens={tokens}: say how many tokens may be sampled for branches")
    most = np.inf if per_call is None else per_call
    if not most >= 0:
        raise ConfigError(f"per_call={per_call} is not a number of branches: use 0 or more, or None")
    if by not in get_args(BranchBy):
        raise ConfigError(f"unknown way to choose branches {by!r}: use one of {', '.join(get_args(BranchBy))}")
    places = [place for trunk in sorted(trunks, key=_order) for place in _places(trunk)]
    taken = list(_by_variance(places, branches, tokens)) if by == "variance" else []
    left = tokens - sum(place.cost for place in taken)
    tried = {branch.rollout.parent for branch in branches}
    turn = 0
    while turn < most and any(place.cost <= left for place in places):
        for place in _ordered(places, by, seed, turn):
            is_due = turn or place.call.key not in tried
            if is_due and place.cost <= left and _drawn(place, seed, turn, "left out") < most - turn:
                taken.append(place)
                left -= place.cost
        turn += 1
    return [(place.trunk, place.call) for place in taken]


@dataclass(frozen=True, slots=True)
class _Place:
    """A call that can be branched. `rank` is its place among those of its trunk, of which there are `among`."""

    trunk: Trajectory
    call: Transition
    cost: int
    rank: int
    among: int


def _order(trunk: Trajectory) -> tuple[int, str]:
    return trunk.rollout.index, trunk.rollout.id


def _places(trunk: Trajectory) -> list[_Place]:
    """The calls of a trunk that can be branched, with what that is expected to cost."""
    able = [
        call
        for call, trainable in zip(trunk.transitions, trunk.trainable, strict=True)
        if call.choice == 0 and is_trained(call, trainable) and _can_branch(trunk, call)
    ]
    costs = [sum(len(other.response_ids) for other in trunk.transitions if not is_prefix(other, call)) for call in able]
    return [
        _Place(trunk, call, cost, rank, len(able)) for rank, (call, cost) in enumerate(zip(able, costs, strict=True))
    ]


def _can_branch(trunk: Trajectory, at: Transition) -> bool:
    """Whether something was answered before a call, and all that a branch asks again is on record."""
    unrecorded = any(call.seq < at.seq for call in trunk.refused) or any(is_prefix(call, at) for call in trunk.lost)
    return not unrecorded and any(is_prefix(call, at) for call in trunk.transitions)


def _ordered(places: Sequence[_Place], by: BranchBy, seed: int | str, turn: int) -> list[_Place]:
    """The order in which calls are taken for the `turn`-th time."""
    if by == "random":
        return sorted(places, key=lambda place: _drawn(place, seed, turn, "order"))
    if by == "entropy":
        drawn = partial(_drawn, seed=seed, turn=turn, what="order")
        return sorted(places, key=lambda place: (not _follows_tool(place), _mean_logprob(place.call), drawn(place)))
    return sorted(places, key=lambda place: (*_spread(place.rank, place.among), _order(place.trunk)))


def _drawn(place: _Place, seed: int | str, turn: int, what: str) -> float:
    """A random number from 0 to 1 that depends on the call's place in the group alone, so that no resume changes it."""
    name = f"{seed}/{turn}/{what}/{place.trunk.rollout.index}/{place.call.seq}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) / 2.0**64


def _follows_tool(place: _Place) -> bool:
    """Whether tools ran for the last answer that the same agent got before the call."""
    calls = [call for call in place.trunk.transitions if is_prefix(call, place.call)]
    own = [call for call in calls if call.caller.name == place.call.caller.name] or calls
    last = own[-1]
    asked = {name for call in own if call.id == last.id for name in call.tool_calls}
    events = place.trunk.tool_events
    return bool(asked) or any(event.response_id == last.id for event in events)


def _mean_logprob(call: Transition) -> float:
    """Of the first tokens of an answer: the lower, the less certain. Infinite where there are no logprobs."""
    first = np.frombuffer(call.logprobs, dtype=np.float32)[:FIRST_TOKENS]
    return float(first.mean(dtype=np.float64)) if len(first) else float("inf")


def _spread(rank: int, among: int) -> tuple[int, float]:
    """The level at which halving the calls again and again comes to this one, the middle first; then its place."""
    low, high, level = 0, among, 0
    while (middle := (low + high) // 2) != rank:
        low, high = (low, middle) if rank < middle else (middle + 1, high)
        level += 1
    return level, (rank + 0.5) / among


def _by_variance(places: Sequence[_Place], branches: Sequence[Trajectory], tokens: float) -> Iterator[_Place]:
    """The calls with returns that differ, each time the one where another branch is worth most for its tokens."""
    returns: dict[tuple[str, int, int], list[float]] = {}
    for branch in branches:
        if branch.rollout.parent is not None:
            returns.setdefault(branch.rollout.parent, []).append(rollout_return(branch))
    measured: list[tuple[_Place, float]] = []
    counts: list[int] = []
    for place in places:
        if own := returns.get(place.call.key):
            every = [rollout_return(place.trunk), *own]
            measured.append((place, float(np.var(every, ddof=1))))
            counts.append(len(every))
    while True:
        gains = [
            variance / (count * (count + 1) * place.cost) if place.cost <= tokens else 0.0
            for (place, variance), count in zip(measured, counts, strict=True)
        ]
        if not any(gains):
            return
        best = int(np.argmax(gains))
        yield measured[best][0]
        counts[best] += 1
        tokens -= measured[best][0].cost
