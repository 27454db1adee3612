"""One rollout: what it was asked, said and earned, when what ran, and what training made of each of its calls.

The invariant: only the chosen call's tokens are told, since a rollout may have hundreds of thousands. Spans of one lane do not
overlap, and what belongs to a call is on its side of it, though agents have clocks of their own. Tools tell when they ended;
they began at the earliest when the call that asked for them had its answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from lightning.errors import DataError
from lightning.store.protocol import Attempt
from lightning.trainer.runs import agent_of
from lightning.types import UNNAMED, Rollout, StepReward, StepState, ToolEvent, Transition
from lightning_record.exchanges import parents_of

from lightning_console.places import Located, at_attempt, group_of, may_change, rollout_of, why_no_calls
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
from lightning_console.queries.conversation import Line, Vocabulary, conversation, said_by, vocabulary_of
from lightning_console.queries.runs import finite
from lightning_console.queries.steps import CallCredit, StepProof, prove

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
        (*blank, *map(finite, logprobs)),
        (*blank, *map(finite, versions.tolist())),
        (*blank, *([advantage] * len(answer))),
        (*([0.0] * count), *([float(line.credit is not None)] * len(answer))),
        vocabulary.missing,
    )


Kind = Literal["agent", "call", "tool", "reward", "state"]


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that ran, or happened, at a time in seconds. `call` is the number of the call that it is or belongs to, 0 for
    none; `status` a word that says how it went."""

    kind: Kind
    name: str
    begin: float
    end: float
    call: int = 0
    status: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lanes' names, and what is on them: the index of the lane with each, whose times are since the beginning. `seconds` is
    how long it took from the first of it to the last."""

    lanes: tuple[str, ...]
    moments: tuple[tuple[int, Moment], ...]
    seconds: float


def lanes_of(
    calls: Sequence[Transition],
    events: Sequence[ToolEvent],
    rewards: Sequence[StepReward],
    states: Sequence[StepState],
    reward: float | None,
) -> Lanes:
    """The lanes of an attempt. Calls whose times are not recorded stand at the beginning."""
    placed: list[tuple[str, Moment]] = []
    numbers = {call.id: number for number, call in reversed(list(enumerate(calls, 1)))}
    by_id = {call.id: call for call in reversed(calls)}
    for number, call in enumerate(calls, 1):
        if call.choice:
            continue
        end = max(call.ended_at, call.started_at)
        detail = f"{len(call.prompt_ids)} + {len(call.response_ids)} tokens"
        made = Moment("call", f"call {number}", call.started_at, end, number, str(call.status), detail)
        placed.append((call.caller.name, made))
    placed += [_tool(event, calls, by_id, numbers) for event in events]
    for given in rewards:
        behind = by_id.get(given.response_id)
        at = max(given.at, behind.ended_at) if behind else given.at
        called = numbers.get(given.response_id, 0)
        placed.append((_lane(behind, calls), Moment("reward", f"{given.name} {given.value:+g}", at, at, called)))
    for state in states:
        behind = by_id.get(state.response_id)
        at = min(state.at or behind.started_at, behind.started_at) if behind else state.at
        called = numbers.get(state.response_id, 0)
        placed.append((_lane(behind, calls), Moment("state", state.name, at, at, called)))
    known = [each for _, each in placed if each.begin > 0]
    start = min((each.begin for each in known), default=0.0)
    last = max((each.end for each in known), default=start)
    if reward is not None and calls:
        placed.append((calls[-1].caller.name, Moment("reward", f"reward {reward:+g}", last, last, len(calls))))
    return _laid_out(placed, start, last)


def _lane(call: Transition | None, calls: Sequence[Transition]) -> str:
    """The lane of what belongs to a call; of what belongs to none, that of the first one's agent."""
    known = call or next(iter(calls), None)
    return known.caller.name if known else UNNAMED.name


def _tool(
    event: ToolEvent, calls: Sequence[Transition], by_id: Mapping[str, Transition], numbers: Mapping[str, int]
) -> tuple[str, Moment]:
    asked = next((call for call in calls if event.call_id and event.call_id in call.tool_calls), None)
    behind = asked or by_id.get(event.response_id)
    begin = behind.ended_at if behind else event.at
    end = max(event.at, begin)
    who = event.caller.name if event.caller and not behind else _lane(behind, calls)
    detail = (event.error or event.output)[:200]
    number = numbers.get(behind.id, 0) if behind else 0
    return f"{who} · tools", Moment("tool", event.name, begin, end, number, event.status, detail)


def _laid_out(moments: Sequence[tuple[str, Moment]], start: float, last: float) -> Lanes:
    """Each thing on the first lane of its name that is free then."""
    names = list(dict.fromkeys(name for name, _ in moments))
    agents = [name for name in names if not name.endswith(" · tools")]
    ordered = [lane for name in agents for lane in (name, f"{name} · tools") if lane in names]
    ordered += [name for name in names if name not in ordered]
    free: dict[str, list[float]] = {}
    placed: list[tuple[str, int, Moment]] = []
    for name, each in sorted(moments, key=lambda one: (one[1].begin, one[1].end)):
        own = free.setdefault(name, [])
        if each.kind in ("reward", "state"):
            place = 0  # a moment takes no time, and overlaps nothing
            if not own:
                own.append(each.begin)
        else:
            place = next((number for number, until in enumerate(own) if until <= each.begin), len(own))
            if place == len(own):
                own.append(each.end)
            own[place] = each.end
        placed.append((name, place, each))
    lanes = [(name, place) for name in ordered for place in range(len(free.get(name, ())))]
    index = {lane: number for number, lane in enumerate(lanes)}
    told = tuple(
        (index[name, place], replace(each, begin=max(0.0, each.begin - start), end=max(0.0, each.end - start)))
        for name, place, each in placed
    )
    titles = tuple(f"{name} ({place + 1})" if place else name for name, place in lanes)
    return Lanes(titles, told, max(0.0, last - start))
