"""Turns credited trajectories into training rows, merging calls of one rollout that continue one another.

The invariant (fragmentation): a token's weight, advantage and context depend on its rollout and its call alone, never on
which calls share a row, so one row, two rows or a row for each call give the same loss and the same gradient.

    calls of a rollout                                rows
    (P, R1)  (P+R1+O1, R2)  (P+R1+O1+R2+O2, R3)  ->   P R1 O1 R2 O2 R3               each turn extends the last one
    A: (P, R1)  B: (Q, S1)  A: (P+R1+O, R2) ...  ->   P R1 O R2 ; Q S1 ...           interleaved agents
    (P, R1)  (P', R2)                            ->   P R1 ; P' R2                   the system prompt changed, or compaction

Rows of different rollouts are never merged here. The states that a head values are put into rows of the same kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from lightning.batch.masks import SamplingMask
from lightning.batch.sample import IntArray, Sample, TokenSpan, sampled_with
from lightning.batch.trajectory import Group, Trajectory, find_flaw, first_flaw, inherited, is_trained, trained_tokens
from lightning.errors import ConfigError, DataError
from lightning.safe_text import counted
from lightning.types import GREEDY_BELOW, POLICY, TokenIds, Transition, by_key

Normalization = Literal["token-mean", "rollout-mean", "sequence-mean", "constant"]
"""The rule for a token's weight. With N trained tokens in the step, R rollouts that have trained tokens, and C trained calls:

Each policy of a run has counts of its own.

`token-mean` 1/N (DAPO, arXiv 2503.14476) · `rollout-mean` 1/(R · tokens of its rollout) · `sequence-mean` 1/(C · tokens of
its call) (GRPO, arXiv 2402.03300) · `constant` 1/(R · `constant_tokens`) (Dr. GRPO, arXiv 2503.20783).

The length of a branch's rollout includes the trained tokens of the parent's calls that the branch repeats, although these are
trained in the parent's rows. So a branch at a late call does not weigh more because its own calls are few.
"""

PerToken: TypeAlias = "float | npt.NDArray[np.floating]"
"""The advantage of a call: one number for all its tokens, or an array with one for each token of its response, shape
(tokens,)."""

Advantages: TypeAlias = "Sequence[Sequence[PerToken] | npt.NDArray[np.floating]]"
"""For each trajectory an advantage for each call."""

MAX_ADVANTAGE = 1e14
"""The largest absolute advantage or value target: its square times the square of a logprob's gradient must fit in float32."""


def build_samples(
    trajectories: Sequence[Trajectory],
    advantages: Advantages,
    *,
    normalization: Normalization = "rollout-mean",
    constant_tokens: int | None = None,
    drop_zero_advantages: bool = False,
    value_targets: Sequence[Sequence[float] | npt.NDArray[np.floating]] | None = None,
    value_coefficient: float = 1.0,
) -> tuple[Sample, ...]:
    """Return the training rows of one optimizer step, in the order of the trajectories and of their calls.

    `advantages[i][j]` belongs to call j of trajectory i: a number, or an array with one for each token of its response. The
    trained calls are the OK calls of the component of interest that
    have response tokens; only they get weight and a span, and only they make rows. Calls share a row only if they are of one
    rollout, one policy and one temperature. `drop_zero_advantages` leaves out calls whose advantages are all exactly 0 (their
    policy gradient is 0, but an entropy bonus would not be); they still count in the normalisation.

    `value_targets[i][j]` is the value that the head should have given to the state of call j. The span of each of a policy's C
    trained calls holds its target with the weight `value_coefficient` / C, so every state counts the same, whatever the length
    of its answer. None makes rows without targets.

    Raises `DataError`, naming rollout, attempt and call, for a trained call that has a flaw (`find_flaw`), that occurs twice,
    that belongs to another attempt, or whose advantage has another length than its response, or whose advantage or target is
    not finite or beyond `MAX_ADVANTAGE`. The engine checks
    that token ids lie inside the vocabulary.
    """
    if normalization not in get_args(Normalization):
        raise ConfigError(f"unknown normalization {normalization!r}: use one of {', '.join(get_args(Normalization))}")
    if len(trajectories) != len(advantages):
        raise DataError(f"{len(advantages)} lists of advantages were given for {len(trajectories)} trajectories")
    rollouts = [
        list(_trained_calls(trajectory, values)) for trajectory, values in zip(trajectories, advantages, strict=True)
    ]
    _refuse_duplicates(rollouts)
    before = inherited(trajectories)
    for policy in dict.fromkeys(call.policy for calls in rollouts for call in calls):
        own = [[call for call in calls if call.policy == policy] for calls in rollouts]
        shared = [
            trained_tokens(pair for pair in before.get(each.rollout.id, ()) if pair[0].policy == policy)
            for each in trajectories
        ]
        _set_weights(own, shared, normalization, constant_tokens)
        if value_targets is not None:
            _set_targets(trajectories, own, value_targets, value_coefficient)
    samples: list[Sample] = []
    for calls in rollouts:
        kept = [call for call in calls if not drop_zero_advantages or np.any(call.advantage)]
        samples.extend(row.sample() for row in _merge(kept))
    return tuple(samples)


def given_rows(answers: Sequence[tuple[TokenIds, TokenIds]], *, policy: str = POLICY) -> tuple[Sample, ...]:
    """Return rows of answers that no policy sampled, such as demonstrations, for a loss beside that of a step's batch. Each
    answer is (prompt ids, response ids). All response tokens have one weight, which add up to 1, the advantage 1, no sampler's
    logprob, and the temperature 1. Their spans name the rollout `given`, which no store has, and count the answers as calls.

    Raises `DataError`, naming the answer, for one without a prompt or without a response.
    """
    for number, (prompt, response) in enumerate(answers):
        if not len(prompt) or not len(response):
            what = "prompt" if not len(prompt) else "response"
            raise DataError(f"answer {number} of {len(answers)} has no {what}: give (prompt ids, response ids) of each")
    count, rows = sum(len(response) for _, response in answers), []
    for number, (prompt, response) in enumerate(answers):
        ids = np.concatenate([np.asarray(prompt, np.int32), np.asarray(response, np.int32)])
        trained = (np.arange(len(ids)) >= len(prompt)).astype(np.float32)
        unknown, version = np.full(len(ids), np.nan, np.float32), np.full(len(ids), -1, np.int32)
        span = TokenSpan("given", 0, number, len(prompt), len(ids))
        rows.append(Sample(ids, trained / np.float32(count), trained, unknown, version, (span,), policy=policy))
    return tuple(rows)


@dataclass(slots=True)
class _Call:
    """One trained call with its arrays (views of the transition's buffers)."""

    transition: Transition
    prompt: IntArray
    response: IntArray
    advantage: npt.NDArray[np.float64]
    """Shape () or (response tokens,)."""
    temperature: float
    weight: float = 0.0
    value_target: float = math.nan
    value_weight: float = 0.0

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)

    @property
    def policy(self) -> str:
        """The name of the policy that answered."""
        return self.transition.policy


@dataclass(slots=True)
class _Row:
    """Calls of one rollout that share a sequence of tokens: the prompt and the response of the call `longest`."""

    longest: _Call
    calls: list[_Call] = field(default_factory=list)

    def extended_by(self, call: _Call) -> bool:
        """Whether the whole row is a prefix of the call's prompt."""
        last = self.longest
        cut, end = len(last.prompt), len(last)
        return (
            end <= len(call.prompt)
            and np.array_equal(call.prompt[cut:end], last.response)
            and np.array_equal(call.prompt[:cut], last.prompt)
        )

    def contains(self, call: _Call) -> bool:
        """Whether the call's prompt and response are a prefix of the row, and no call of the row trains a token of that
        response."""
        start, stop = len(call.prompt), len(call)
        return (
            stop <= len(self.longest)
            and not any(start < len(other) and len(other.prompt) < stop for other in self.calls)
            and np.array_equal(self.ids()[:stop], np.concatenate((call.prompt, call.response)))
        )

    def ids(self) -> IntArray:
        """Return all token ids of the row."""
        return np.concatenate((self.longest.prompt, self.longest.response))

    def sample(self) -> Sample:
        """Return the finished training row of these calls."""
        length = len(self.longest)
        weights, advantages = np.zeros(length, np.float32), np.zeros(length, np.float32)
        logprobs, versions = np.full(length, np.nan, np.float32), np.full(length, -1, np.int32)
        spans, masks = [], dict[int, SamplingMask]()
        for call in sorted(self.calls, key=lambda call: len(call.prompt)):
            source, start, stop = call.transition, len(call.prompt), len(call)
            weights[start:stop] = call.weight
            advantages[start:stop] = call.advantage
            logprobs[start:stop], mask = sampled_with(source)
            if mask is not None:
                masks[start] = mask
            for run in source.versions:
                versions[start + run.start : stop] = run.version
            key = (source.rollout, source.attempt, source.seq)
            spans.append(TokenSpan(*key, start, stop, call.value_target, call.value_weight))
        kind = self.longest
        return Sample(
            self.ids(),
            weights,
            advantages,
            logprobs,
            versions,
            tuple(spans),
            kind.temperature,
            policy=kind.policy,
            mask=SamplingMask.placed(length, masks) if masks else None,
        )


def _merge(calls: Sequence[_Call]) -> list[_Row]:
    rows: list[_Row] = []
    for call in calls:
        kind = call.temperature, call.policy
        peers = [row for row in rows if (row.longest.temperature, row.longest.policy) == kind]
        extended = max((row for row in peers if row.extended_by(call)), key=lambda row: len(row.longest), default=None)
        if extended is not None:
            extended.longest = call
            extended.calls.append(call)
            continue
        shared = next((row for row in peers if row.contains(call)), None)
        if shared is None:
            rows.append(_Row(call, [call]))
        else:
            shared.calls.append(call)
    return rows


def _set_weights(
    rollouts: Sequence[Sequence[_Call]], shared: Sequence[int], normalization: Normalization, constant: int | None
) -> None:
    """Set the weight of each call's tokens. `shared` is the number of trained tokens that each rollout repeats of its
    parent."""
    if normalization == "constant" and not (constant is not None and constant > 0):
        raise ConfigError("normalization 'constant' needs constant_tokens, a positive number of tokens per rollout")
    tokens = [sum(len(call.response) for call in calls) for calls in rollouts]
    step_tokens = sum(tokens)
    trained_rollouts = sum(1 for count in tokens if count)
    trained_calls = sum(len(calls) for calls in rollouts)
    for calls, own, before in zip(rollouts, tokens, shared, strict=True):
        for call in calls:
            shares = {
                "token-mean": step_tokens,
                "rollout-mean": trained_rollouts * (before + own),
                "sequence-mean": trained_calls * len(call.response),
                "constant": trained_rollouts * (constant or 1),
            }
            call.weight = 1.0 / shares[normalization]


def _set_targets(
    trajectories: Sequence[Trajectory],
    rollouts: Sequence[Sequence[_Call]],
    targets: Sequence[Sequence[float] | npt.NDArray[np.floating]],
    coefficient: float,
) -> None:
    known = {
        call.key: float(target)
        for trajectory, own in zip(trajectories, targets, strict=True)
        for call, target in zip(trajectory.transitions, own, strict=True)
    }
    share = coefficient / max(1, sum(len(calls) for calls in rollouts))
    for calls in rollouts:
        for call in calls:
            call.value_target, call.value_weight = known[call.transition.key], share
            if not abs(call.value_target) <= MAX_ADVANTAGE:
                raise DataError(f"{name_of(call.transition)} cannot train the head: its target is {call.value_target}")


def _trained_calls(
    trajectory: Trajectory, advantages: Sequence[PerToken] | npt.NDArray[np.floating]
) -> Iterator[_Call]:
    count = len(trajectory.transitions)
    if len(trajectory.trainable) != count or len(advantages) != count:
        raise DataError(
            f"rollout {trajectory.rollout.id} has {counted(count, 'call')}, but "
            f"{counted(len(trajectory.trainable), 'trainable flag')} "
            f"and {counted(len(advantages), 'advantage')}: credit must give one advantage for each call"
        )
    for transition, trainable, advantage in zip(trajectory.transitions, trajectory.trainable, advantages, strict=True):
        if is_trained(transition, trainable):
            own = np.asarray(advantage, dtype=np.float64)
            _check(trajectory, transition, own)
            yield _Call(
                transition,
                np.asarray(transition.prompt_ids, dtype=np.int32),
                np.asarray(transition.response_ids, dtype=np.int32),
                own,
                transition.temperature if transition.temperature >= GREEDY_BELOW else 1.0,
            )


def wrong_length(call: Transition, advantage: npt.NDArray[np.float64]) -> str:
    """Return how the advantage of a call has another length than its response, or "" if it is one number or one for each
    token."""
    tokens = len(call.response_ids)
    if advantage.shape in ((), (tokens,)):
        return ""
    given = counted(len(advantage), "number") if advantage.ndim == 1 else f"numbers of the shape {advantage.shape}"
    return f"{given} for {counted(tokens, 'response token')}"


def beyond(advantage: PerToken) -> float | None:
    """Return the first of a call's advantages that is not finite or beyond `MAX_ADVANTAGE`; None if there is none."""
    values = np.atleast_1d(np.asarray(advantage, dtype=np.float64))
    bad = ~(np.abs(values) <= MAX_ADVANTAGE)
    return float(values[bad][0]) if bad.any() else None


def _check(trajectory: Trajectory, call: Transition, advantage: npt.NDArray[np.float64]) -> None:
    rollout, flaw = trajectory.rollout, find_flaw(call)
    problem = ""
    if (call.rollout, call.attempt) != (rollout.id, rollout.attempt):
        problem = f"it is not part of attempt {rollout.attempt} of rollout {rollout.id}, which was accepted"
    elif flaw is not None:
        problem = flaw.problem
    elif length := wrong_length(call, advantage):
        problem = f"its advantage has {length}: give one number for the call, or one for each token of its response"
    elif (wrong := beyond(advantage)) is not None:
        problem = f"its advantage is {wrong}: check the reward and the credit function"
    if problem:
        raise DataError(f"{name_of(call)} cannot be trained on: {problem}")


def _refuse_duplicates(rollouts: Sequence[Sequence[_Call]]) -> None:
    every = (call.transition for calls in rollouts for call in calls)
    for same in by_key(every, attrgetter("key")).values():
        if len(same) > 1:
            raise DataError(f"{name_of(same[0])} occurs twice in one step: each call is trained exactly once")


def name_of(call: Transition) -> str:
    """Return the rollout, attempt and number of a call as text, for messages."""
    return f"rollout {call.rollout} attempt {call.attempt} call {call.seq}"


StateValues = Mapping[tuple[str, int, int], float]
"""The value of each call's state, by the call's key `(rollout, attempt, seq)`."""


def state_rows(groups: Sequence[Group]) -> tuple[Sample, ...]:
    """Return rows with a span for each trained call, in which a head finds its states. Rollouts with a flawed call are left
    out."""
    whole = [member for group in groups for member in group.trajectories if first_flaw(member) is None]
    return build_samples(whole, [np.zeros(len(member.transitions)) for member in whole])


def with_values(groups: Sequence[Group], values: StateValues) -> list[Group]:
    """Return the groups with `Trajectory.values` set from `values`: NaN for a call that `values` lacks."""
    return [
        Group(
            group.id,
            tuple(
                replace(member, values=tuple(values.get(call.key, math.nan) for call in member.transitions))
                for member in group.trajectories
            ),
        )
        for group in groups
    ]
