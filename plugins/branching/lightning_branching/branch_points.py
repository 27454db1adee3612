"""Choose the calls of a group's finished rollouts (trunks) to branch at, for a number of tokens.

The invariant: the choice is a pure function of its arguments, and does not depend on the order of the trunks. Every chosen call
can be branched: it is trained, some call was answered before it, and no call before it broke off or was refused. All branches
together are expected to cost at most the given tokens.

A branch at a call is expected to cost what its trunk sampled from that call on.

Credit from branches (`lightning_credits.Branched`) is unbiased where the choice of a call does not depend on what it was
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
"""The number of an answer's first tokens whose mean logprob measures how uncertain the answer was."""


def branch_points(
    trunks: Sequence[Trajectory],
    tokens: float,
    by: BranchBy = "random",
    seed: int | str = 0,
    branches: Sequence[Trajectory] = (),
    per_call: float | None = None,
) -> list[BranchPoint]:
    """Return the calls to branch at, in the order in which they were chosen; a call that is listed twice gets two branches.

    `trunks` are the finished rollouts of a group, `tokens` the number of tokens that may be sampled for branches, and
    `branches` the branches that the group already has. Calls are taken in rounds, in an order that `by` gives; the first round
    leaves out calls that have a branch. A call that costs more than the tokens that are left is passed over. `per_call` is the
    mean number of branches of a call at most: with 0.3, each call is left out with probability 0.7. None: only the tokens
    limit it.

    - `random`: the order is drawn from `seed`, anew for each round.
    - `entropy`: calls that follow a tool run come first (ARPO, arXiv 2507.19849, branches after tool use). Among them, calls
      whose answers have a lower mean logprob over their first `FIRST_TOKENS` tokens come first; ties are drawn. Answers without
      logprobs come last.
    - `variance`: the middle call of each trunk, then the quarters, and so on. Calls whose `branches` have returns that differ
      come before all others: with n returns of variance s² (the trunk's included), one more branch lowers the variance of their
      mean by s² / (n (n + 1)), and each next branch goes to the call where this is largest per token.

    Raises `ConfigError` for an unknown `by`, for `tokens` that are not finite, and for a negative `per_call`.
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
    """A call that can be branched at, with its expected `cost` in tokens. `rank` is its index among the `among` such calls of
    its trunk."""

    trunk: Trajectory
    call: Transition
    cost: int
    rank: int
    among: int


def _order(trunk: Trajectory) -> tuple[int, str]:
    return trunk.rollout.index, trunk.rollout.id


def places_of(trunk: Trajectory) -> list[Transition]:
    """Return the calls of a trunk that can be branched at."""
    return [
        call
        for call, trainable in zip(trunk.transitions, trunk.trainable, strict=True)
        if call.choice == 0 and is_trained(call, trainable) and _can_branch(trunk, call)
    ]


def _places(trunk: Trajectory) -> list[_Place]:
    """Return the calls of a trunk that can be branched at. The expected cost of a branch is the number of tokens that the trunk
    sampled from the call on."""
    able = places_of(trunk)
    costs = [sum(len(other.response_ids) for other in trunk.transitions if not is_prefix(other, call)) for call in able]
    return [
        _Place(trunk, call, cost, rank, len(able)) for rank, (call, cost) in enumerate(zip(able, costs, strict=True))
    ]


def _can_branch(trunk: Trajectory, at: Transition) -> bool:
    """Whether some call was answered before this call, and all calls that a branch would repeat are recorded."""
    unrecorded = any(call.seq < at.seq for call in trunk.refused) or any(is_prefix(call, at) for call in trunk.lost)
    return not unrecorded and any(is_prefix(call, at) for call in trunk.transitions)


def _ordered(places: Sequence[_Place], by: BranchBy, seed: int | str, turn: int) -> list[_Place]:
    """Return the calls in the order in which round `turn` takes them."""
    if by == "random":
        return sorted(places, key=lambda place: _drawn(place, seed, turn, "order"))
    if by == "entropy":
        drawn = partial(_drawn, seed=seed, turn=turn, what="order")
        return sorted(places, key=lambda place: (not _follows_tool(place), _mean_logprob(place.call), drawn(place)))
    return sorted(places, key=lambda place: (*_spread(place.rank, place.among), _order(place.trunk)))


def _drawn(place: _Place, seed: int | str, turn: int, what: str) -> float:
    """Return a random number from 0 to 1 that depends only on the arguments and the call's place in its group, so that a
    resumed run draws the same number."""
    name = f"{seed}/{turn}/{what}/{place.trunk.rollout.index}/{place.call.seq}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) / 2.0**64


def _follows_tool(place: _Place) -> bool:
    """Whether the last answer that the same agent got before the call made it run tools."""
    calls = [call for call in place.trunk.transitions if is_prefix(call, place.call)]
    own = [call for call in calls if call.caller.name == place.call.caller.name] or calls
    last = own[-1]
    asked = {name for call in own if call.id == last.id for name in call.tool_calls}
    events = place.trunk.tool_events
    return bool(asked) or any(event.response_id == last.id for event in events)


def _mean_logprob(call: Transition) -> float:
    """Return the mean logprob of an answer's first tokens; the lower, the less certain the answer was. Infinite without
    logprobs."""
    first = np.asarray(call.logprobs, dtype=np.float32)[:FIRST_TOKENS]
    return float(first.mean(dtype=np.float64)) if len(first) else float("inf")


def _spread(rank: int, among: int) -> tuple[int, float]:
    """Return the sort key that puts the middle of `among` calls first, then the quarters, and so on: the level at which
    repeated halving reaches the call, and the call's place in its trunk."""
    low, high, level = 0, among, 0
    while (middle := (low + high) // 2) != rank:
        low, high = (low, middle) if rank < middle else (middle + 1, high)
        level += 1
    return level, (rank + 0.5) / among


def _by_variance(places: Sequence[_Place], branches: Sequence[Trajectory], tokens: float) -> Iterator[_Place]:
    """Yield calls whose returns differ: each time the one where another branch lowers the variance most per token, until the
    tokens are spent."""
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
