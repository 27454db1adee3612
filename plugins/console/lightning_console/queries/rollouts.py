"""One rollout: what it was asked, said and earned, and what training made of each of its calls.

The invariant: only the chosen call's tokens are told, since a rollout may have hundreds of thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from lightning.errors import DataError
from lightning.store.exchanges import parents_of
from lightning.store.protocol import Attempt
from lightning.trainer.runs import agent_of
from lightning.types import Rollout, Run, StepReward, Transition

from lightning_console.places import Located
from lightning_console.queries.branches import (
    NOWHERE,
    Branch,
    Fork,
    branches_of,
    changes_of,
    fork_of,
    inherited,
    key_beside,
)
from lightning_console.queries.conversation import Line, conversation
from lightning_console.queries.finding import at_attempt, group_of, may_change, rollout_of, why_no_calls
from lightning_console.queries.proof import CallCredit, StepProof, prove
from lightning_console.queries.said import said_by
from lightning_console.queries.timeline import Lanes, lanes_of
from lightning_console.queries.tokens import Vocabulary, vocabulary_of

PROMPT_TOKENS: Final = 512
"""Tokens of a prompt that are told unless more are asked for: the last ones."""
MOST_TOKENS: Final = 20_000
"""Tokens that are told at most."""


@dataclass(frozen=True, slots=True)
class CallLine:
    """One call. `number` counts all calls and choices of the attempt from 1. `credit` is None where it was not trained, and
    `untrained` says why not."""

    number: int
    transition: Transition
    credit: CallCredit | None
    untrained: str = ""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of a call: the last of its prompt, `prompt` of them, then the answer's. `left_out` are those of the prompt before,
    `answer_left_out` those of the answer behind. `logprobs`, `versions`, `advantages` and `trained` (1 or 0) have one value for
    each token, None where it has none."""

    texts: tuple[str, ...]
    prompt: int
    left_out: int
    answer_left_out: int
    logprobs: tuple[float | None, ...]
    versions: tuple[float | None, ...]
    advantages: tuple[float | None, ...]
    trained: tuple[float | None, ...]
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a branch begins with: `calls` of its parent, with their numbers in it, and the number `at` of the call at which it
    leaves it, 0 where that is not stored. `key` names the parent's run, empty where it is not in this store."""

    branch: Branch
    parent: str
    key: str = ""
    attempt: int = 0
    at: int = 0
    calls: tuple[tuple[int, Transition], ...] = ()


@dataclass(frozen=True, slots=True)
class BranchLine:
    """A branch of the rollout that is shown, and the number of the call at which it begins."""

    branch: Branch
    at: int


@dataclass(frozen=True, slots=True)
class RolloutView:
    """A rollout as one of its attempts. `chosen` is the number of the call whose `tokens` are told, 0 where there is none;
    `empty` says why there is no call, `texts` why messages are not as they were recorded. `siblings` are the ids of the
    rollouts of its group that are no branches. `beginning` is that of a branch, `branches` are those that this rollout has, and
    `fork` says whether there can be one at the chosen call. `agent` is the run's as MODULE:FUNCTION, empty where that is not
    known."""

    run: Run
    rollout: Rollout
    attempts: int
    calls: tuple[CallLine, ...]
    chosen: int
    tokens: Tokens | None
    lines: tuple[Line, ...]
    lines_left_out: int
    lanes: Lanes
    ended: Attempt
    proof: StepProof
    siblings: tuple[str, ...]
    live: bool = False
    empty: str = ""
    texts: str = ""
    beginning: Beginning | None = None
    branches: tuple[BranchLine, ...] = ()
    fork: Fork = NOWHERE
    agent: str = ""

    @property
    def before(self) -> int:
        """How many calls a replay answers before the chosen one: choices of one call are one, and a branch has its parent's."""
        own = sum(not each.transition.choice for each in self.calls[: self.chosen]) - 1
        first = self.beginning
        inherited = 0 if first is None else len(first.calls) + (first.branch.edit is not None)
        return max(0, own) + inherited

    @property
    def step_rewards(self) -> tuple[StepReward, ...]:
        """The rewards that were given inside of it."""
        return self.ended.step_rewards


async def rollout_view(
    located: Located,
    rollout: str,
    *,
    call: int = 0,
    attempt: int = 0,
    prompt: int = PROMPT_TOKENS,
    patience: float | None = None,
) -> RolloutView:
    """A rollout of a run; `call` is the number of the call whose tokens are told, 0: the first that was trained. Runs that have
    branches of it are looked for during `patience` seconds. Raises `DataError` for a rollout, an attempt or a call that is not
    there."""
    store, found = located.store, await rollout_of(located, rollout)
    newest = found.attempt
    own = at_attempt(found, attempt) if attempt else found
    transitions = await store.transitions(own.id, own.attempt)
    (ended,) = await store.attempts_of([(own.id, own.attempt)])
    proof = (
        await prove(store, located.run, found) if own.attempt == newest else StepProof(why="another attempt was taken")
    )
    credit = proof.members.get(own.id)
    trained = credit.calls if credit else {}
    calls = tuple(
        CallLine(number, each, trained.get(each.seq), "" if each.seq in trained else _why_untrained(each, found, proof))
        for number, each in enumerate(transitions, 1)
    )
    if not 0 <= call <= len(calls):
        raise DataError(f"the rollout {own.id} has {len(calls)} calls, so there is no call {call}")
    chosen = call or next((each.number for each in calls if each.credit is not None), min(1, len(calls)))
    vocabulary = vocabulary_of(located)
    (parent,) = await parents_of(store, [own])
    said = said_by(transitions, vocabulary, parent)
    lines, left_out = conversation(transitions, said, ended.step_states, vocabulary)
    reward = found.reward if own.attempt == newest else None
    group = await group_of(located, found.group, found)
    branches, grows = await _branches(located, own, transitions, group, patience)
    return RolloutView(
        located.run,
        own,
        newest,
        calls,
        chosen,
        _tokens(calls[chosen - 1], vocabulary, prompt) if chosen else None,
        tuple(lines),
        left_out,
        lanes_of(transitions, ended.tool_events, ended.step_rewards, ended.step_states, reward),
        ended,
        proof,
        tuple(each.id for each in group if each.parent is None),
        grows or await may_change(store, [found]),
        "" if calls else await why_no_calls(store, own),
        next((each.missing for each in said if each.missing and not each.reply), ""),
        await _beginning(located, found),
        branches,
        await _fork(located, own, newest, transitions, ended, chosen),
        await agent_of(store, located.run),
    )


async def _fork(
    located: Located, own: Rollout, newest: int, calls: Sequence[Transition], ended: Attempt, chosen: int
) -> Fork:
    """Whether branches can begin at the chosen call."""
    if not chosen:
        return NOWHERE
    if own.parent is None and not _is_over(own, newest):
        return Fork(why="it has not ended, so that what its tools gave is not recorded yet")
    return await fork_of(located, own, calls, ended, chosen - 1)


def _is_over(rollout: Rollout, newest: int) -> bool:
    """Whether an attempt has ended: an earlier one has, also while the rollout goes on."""
    return rollout.attempt < newest or rollout.status.ended


async def _beginning(located: Located, rollout: Rollout) -> Beginning | None:
    """Where a branch begins; None for a rollout that is none."""
    if rollout.parent is None:
        return None
    parent, attempt, seq = rollout.parent
    changed, edit = await changes_of(located.store, located.run)
    branch = Branch(rollout, located.key, changed, edit)
    found = await located.store.get_rollout(parent)
    if found is None:
        return Beginning(branch, parent)
    calls = await located.store.transitions(parent, attempt)
    before = inherited(calls, seq)
    return Beginning(
        branch,
        parent,
        key_beside(located, found.run),
        attempt,
        0 if before.at is None else before.at + 1,
        tuple((place + 1, calls[place]) for place in before.answered if not calls[place].choice),
    )


async def _branches(
    located: Located, rollout: Rollout, calls: Sequence[Transition], group: Sequence[Rollout], patience: float | None
) -> tuple[tuple[BranchLine, ...], bool]:
    """The branches of an attempt, in the order of its calls, and whether there may be more."""
    if rollout.parent is not None:
        return (), False
    elsewhere, grows = await branches_of(located, [rollout.id], patience=patience)
    numbers = {call.key: number for number, call in enumerate(calls, 1)}
    every = [*(Branch(each, located.key) for each in group), *elsewhere]
    found = [
        BranchLine(each, numbers[each.rollout.parent])
        for each in every
        if each.rollout.parent is not None and each.rollout.parent in numbers
    ]
    return tuple(sorted(found, key=lambda each: (each.at, each.branch.key, each.branch.rollout.index))), grows


def _why_untrained(call: Transition, rollout: Rollout, proof: StepProof) -> str:
    if proof.proved is None:
        return proof.why
    if not call.status.answered or not len(call.response_ids):
        return f"it gave nothing to train on: {call.status}{f', {call.finish_reason}' if call.finish_reason else ''}"
    if rollout.id not in proof.members:
        return f"its rollout is in no group: {rollout.status}{f', fault: {rollout.fault}' if rollout.fault else ''}"
    if why := proof.skipped.get(rollout.group):
        return f"its group taught nothing: {why.replace('_', ' ')}"
    return "its agent is not trained, the rollout is masked, or its advantage is exactly 0"


def _tokens(line: CallLine, vocabulary: Vocabulary, prompt: int) -> Tokens:
    call = line.transition
    answer = call.response_ids[:MOST_TOKENS]
    count = max(0, min(prompt, len(call.prompt_ids), MOST_TOKENS - len(answer)))
    given = call.prompt_ids[len(call.prompt_ids) - count :]
    blank: list[float | None] = [None] * count
    logprobs = list(call.logprobs[: len(answer)]) if len(call.logprobs) else [None] * len(answer)
    versions = np.full(len(answer), float("nan"))
    for run in call.versions:
        versions[run.start :] = run.version
    advantage = None if line.credit is None else line.credit.advantage
    return Tokens(
        tuple(vocabulary.texts([*given, *answer])),
        count,
        len(call.prompt_ids) - count,
        len(call.response_ids) - len(answer),
        (*blank, *map(_finite, logprobs)),
        (*blank, *map(_finite, versions.tolist())),
        (*blank, *([advantage] * len(answer))),
        (*([0.0] * count), *([float(line.credit is not None)] * len(answer))),
        vocabulary.missing,
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and np.isfinite(value) else None
