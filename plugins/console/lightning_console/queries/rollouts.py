"""Read one rollout: its conversation, rewards, timeline, and the credit of each of its calls.

The invariant: tokens are returned for the chosen call only, since a rollout may have hundreds of thousands. Spans of one lane
do not overlap. Agents have clocks of their own, so a tool or a reward is placed after the call that it belongs to, and a state
before it. Tools report only their end; their span starts at the answer of the call that asked for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from lightning.errors import DataError, LightningError
from lightning.safe_text import counted
from lightning.store.protocol import Attempt
from lightning.trainer.runs import agent_of
from lightning.trainer.training_data import load_groups
from lightning.types import UNNAMED, Rollout, StepReward, StepState, ToolEvent, Transition
from lightning_branching.recorded import at_attempt, numbers_of
from lightning_debug.credit_audit import AuditedCall, CreditAudit
from lightning_debug.judge import Judge, Judgements, Opinion
from lightning_debug.rollout_calls import NO_NOTES, CallNotes, call_behind, notes_of, why_no_calls, why_untrained
from lightning_record.exchanges import Parent, parents_of

from lightning_console.places import SERVER, Located, group_of, may_change, rollout_of
from lightning_console.queries.branches import (
    NOWHERE,
    Branch,
    Fork,
    audits_of,
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
"""Tokens of a prompt that are returned by default: the last ones."""
MOST_TOKENS: Final = 20_000
"""Most tokens of a call that are returned."""


@dataclass(frozen=True, slots=True)
class CallLine:
    """One call of a rollout. `number` counts all calls and choices of the attempt from 1. `credit` is None if the call was not
    trained on, and `untrained` says why. `notes` say how it stands to other calls."""

    number: int
    transition: Transition
    credit: CallCredit | None
    untrained: str = ""
    notes: CallNotes = NO_NOTES


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of a call: the last `prompt` tokens of its prompt, then those of its answer. `left_out` counts the prompt's tokens
    before them, `answer_left_out` the answer's after them. `logprobs`, `versions`, `advantages` and `trained` (1 or 0) have one
    value for each token, None for a token without one. `missing` says why texts are ids."""

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
    """The start of a branch: the `calls` of its parent that were answered before, with their numbers, and the number `at` of
    the call at which it leaves the parent (0 if not stored). `key` names the parent's run; empty if it is not in this store."""

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
class Judged:
    """What the judge of the run's algorithm said of a rollout, once for each sample: the kept `opinions`. `model` names it, and
    `weight` is that of its score in the return. `missing` says why there are none; empty without a judge."""

    model: str = ""
    weight: float = 0.0
    opinions: tuple[Opinion, ...] = ()
    missing: str = ""


MARKED: Final = "untrained"
"""The word for the status of an answered call that is marked as untrained."""
NOT_JUDGED: Final = Judged()


@dataclass(frozen=True, slots=True)
class RolloutView:
    """One attempt of a rollout. `chosen` is the number of the call whose `tokens` are given, 0 if there is no call, and then
    `empty` says why. `texts` says why messages are not as recorded. `siblings` are the group's rollouts that are not branches.
    `beginning` is where a branch starts (None for any other rollout), `branches` are the branches of this rollout,
    and `fork` says whether one can begin at the chosen call. `agent` is the run's agent as MODULE:FUNCTION; empty if not
    known. `audit` is the newest credit audit that executed decisions of the attempt."""

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
    siblings: tuple[Rollout, ...]
    live: bool = False
    empty: str = ""
    texts: str = ""
    beginning: Beginning | None = None
    branches: tuple[BranchLine, ...] = ()
    fork: Fork = NOWHERE
    agent: str = ""
    judged: Judged = NOT_JUDGED
    audit: CreditAudit | None = None

    @property
    def before(self) -> int:
        """How many calls a replay answers before the chosen one: choices of one call count once, calls without a record do not.
        The calls that a branch took over from its parent count, too."""
        numbers = numbers_of([each.transition for each in self.calls[: self.chosen]])
        own = numbers[-1] - 1 if numbers and numbers[-1] else max(numbers, default=0)
        first = self.beginning
        inherited = 0 if first is None else len(first.calls) + (first.branch.edit is not None)
        return own + inherited


async def rollout_view(
    located: Located,
    rollout: str,
    *,
    call: int = 0,
    attempt: int = 0,
    prompt: int = PROMPT_TOKENS,
    patience: float | None = None,
) -> RolloutView:
    """Read a rollout of a run. `call` is the number of the call whose tokens are wanted (0: the first that was trained on),
    `attempt` the attempt (0: the newest), `prompt` the number of prompt tokens. Other runs are searched for its branches for at
    most `patience` seconds. Raises `DataError` if there is no such rollout, attempt or call."""
    store, found = located.store, await rollout_of(located, rollout)
    newest = found.attempt
    own = at_attempt(found, attempt) if attempt else found
    transitions = await store.transitions(own.id, own.attempt)
    (ended,) = await store.attempts_of([(own.id, own.attempt)])
    proof = (
        await prove(store, located.run, found) if own.attempt == newest else StepProof(why="another attempt was taken")
    )
    (parent,) = await parents_of(store, [own])
    credit = proof.members.get(own.id)
    trained = credit.calls if credit else {}
    calls = _call_lines(transitions, trained, lambda call: _why_untrained(call, own, newest, proof), parent)
    if not 0 <= call <= len(calls):
        raise DataError(f"the rollout {own.id} has {len(calls)} calls, so there is no call {call}")
    chosen = call or next((each.number for each in calls if each.credit is not None), min(1, len(calls)))
    vocabulary = vocabulary_of(located)
    said = said_by(transitions, vocabulary, parent)
    lines, left_out = conversation(transitions, said, ended.step_states, vocabulary, ended.step_rewards)
    reward = found.reward if own.attempt == newest else None
    group = await group_of(located, found.group, found)
    branches, grows = await _branches(located, own, transitions, group, patience)
    audits, more = await audits_of(located, patience=patience)
    audit = next((each for each in audits if any(_is_of(call, own) for call in each.calls)), None)
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
        tuple(each for each in group if each.parent is None),
        grows or more or await may_change(store, [found]),
        "" if calls else await why_no_calls(store, own),
        next((each.missing for each in said if each.missing and not each.reply), ""),
        await _beginning(located, found),
        branches,
        await _fork(located, own, newest, transitions, ended, chosen),
        await agent_of(store, located.run),
        await _judged(located, proof, own) if own.attempt == newest else NOT_JUDGED,
        audit,
    )


def _is_of(call: AuditedCall, rollout: Rollout) -> bool:
    return (call.rollout, call.attempt) == (rollout.id, rollout.attempt)


async def _judged(located: Located, proof: StepProof, rollout: Rollout) -> Judged:
    """Read what the judge said of a rollout when it was trained on; the judge is not asked. A server's console reads no file,
    because whoever may add a run could name any."""
    judge = getattr(proof.algorithm, "credit", None)
    if not isinstance(judge, Judge) or proof.epoch is None:
        return NOT_JUDGED
    if located.url == SERVER:
        return Judged(
            judge.model, judge.weight, missing="what the judge said is kept on the machine that trained the run"
        )
    members = [each for each in proof.rollouts if each.group == rollout.group]
    missing = f"no answer of the judge is kept in {Judgements(judge.cache).file} of this machine"
    try:
        groups = await load_groups(located.store, members, proof.epoch.train_agents, proof.epoch.policy_fault)
        found = [await asyncio.to_thread(judge.opinions, group) for group in groups]
    except LightningError as error:
        return Judged(judge.model, judge.weight, missing=str(error))
    opinions = next((each[rollout.id] for each in found if rollout.id in each), ())
    return Judged(judge.model, judge.weight, opinions, "" if opinions else missing)


async def _fork(
    located: Located, own: Rollout, newest: int, calls: Sequence[Transition], ended: Attempt, chosen: int
) -> Fork:
    """Return whether branches can begin at the chosen call, and if not, why."""
    if not chosen:
        return NOWHERE
    if own.parent is None and not _is_over(own, newest):
        return Fork(why="it has not ended, so that what its tools gave is not recorded yet")
    return await fork_of(located, own, calls, ended, chosen - 1)


def _is_over(rollout: Rollout, newest: int) -> bool:
    """Return whether an attempt has ended; an earlier one has, even if the rollout still runs."""
    return rollout.attempt < newest or rollout.status.ended


async def _beginning(located: Located, rollout: Rollout) -> Beginning | None:
    """Return where a branch begins; None for a rollout that is not a branch."""
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
    """Return the branches of an attempt, by the call at which they begin, and whether there may be more."""
    if rollout.parent is not None:
        return (), False
    elsewhere, grows = await branches_of(located, [rollout.id], patience=patience)
    numbers = {call.key: number for number, call in enumerate(calls, 1)}
    beside = {each.id for each in group}
    every = [
        *(Branch(each, located.key) for each in group),
        *(one for one in elsewhere if one.rollout.id not in beside),
    ]
    found = [
        BranchLine(each, numbers[each.rollout.parent])
        for each in every
        if each.rollout.parent is not None and each.rollout.parent in numbers
    ]
    return tuple(sorted(found, key=_place)), grows


def _place(line: BranchLine) -> tuple[int, str, int, int]:
    """Return the place of a branch in the list: by call, run and step."""
    return line.at, line.branch.key, line.branch.rollout.step, line.branch.rollout.index


def _call_lines(
    calls: Sequence[Transition],
    trained: Mapping[int, CallCredit],
    why: Callable[[Transition], str],
    parent: Parent | None,
) -> tuple[CallLine, ...]:
    """Return the lines of an attempt's calls. `trained` has the credit of trained calls by `seq`, `why` says it of others."""
    return tuple(
        CallLine(number, call, credit, "" if credit else why(call), notes)
        for number, (call, notes) in enumerate(zip(calls, notes_of(calls, parent), strict=True), 1)
        for credit in (trained.get(call.seq),)
    )


def _why_untrained(call: Transition, own: Rollout, newest: int, proof: StepProof) -> str:
    told = why_untrained(call, own, proof.steps, newest=newest)
    shown = 0 if proof.record is None else proof.record.step
    if others := [f"step {step}" for step, why in told.items() if not why and step != shown]:
        here = told.get(shown) or proof.why or f"its advantage is exactly 0 in step {shown}"
        return f"{here}; {', '.join(others)} trained it, and step {shown} is shown"
    why = proof.skipped.get(own.group) if own.id in proof.members else None
    if why and call.status.answered and not call.untrained:
        return f"its group taught nothing: {why.replace('_', ' ')}"
    return told.get(0) or told.get(shown) or (proof.why if proof.proved is None else "its advantage is exactly 0")


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
    advantages: Sequence[float | None] = [None] * len(answer)
    if line.credit is not None:
        advantages = line.credit.advantages[: len(answer)] or [line.credit.advantage] * len(answer)
    return Tokens(
        tuple(vocabulary.texts([*given, *answer])),
        count,
        len(call.prompt_ids) - count,
        len(call.response_ids) - len(answer),
        (*blank, *map(finite, logprobs)),
        (*blank, *map(finite, versions.tolist())),
        (*blank, *advantages),
        (*([0.0] * count), *([float(line.credit is not None)] * len(answer))),
        vocabulary.missing,
    )


Kind = Literal["agent", "call", "tool", "reward", "state"]


@dataclass(frozen=True, slots=True)
class Moment:
    """An event of a rollout, from `begin` to `end` in seconds. `call` is the number of the call that it is or belongs to, 0 for
    none; `status` is a word for its result."""

    kind: Kind
    name: str
    begin: float
    end: float
    call: int = 0
    status: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Lanes:
    """The names of the lanes, and the moments as `(index of its lane, moment)`, with times since the first. `seconds` is the
    time from the first to the last."""

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
    """Return the timeline of an attempt in lanes. Calls without recorded times are placed at its start."""
    placed: list[tuple[str, Moment]] = []
    numbers = {call.id: number for number, call in reversed(list(enumerate(calls, 1)))}
    by_id = {call.id: call for call in reversed(calls)}
    for number, call in enumerate(calls, 1):
        if call.choice:
            continue
        end = max(call.ended_at, call.started_at)
        detail = f"{len(call.prompt_ids)} + {counted(len(call.response_ids), 'token')}"
        detail += f", not trained: {call.untrained}" if call.untrained else ""
        status = MARKED if call.untrained and call.status.answered else str(call.status)
        made = Moment("call", f"call {number}", call.started_at, end, number, status, detail)
        placed.append((call.caller.name, made))
    placed += [_tool(event, calls) for event in events]
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
    """Return the name of the lane for an event of a call; for an event of no call, the lane of the first call's agent."""
    known = call or next(iter(calls), None)
    return known.caller.name if known else UNNAMED.name


def _tool(event: ToolEvent, calls: Sequence[Transition]) -> tuple[str, Moment]:
    number = call_behind(event, calls)
    behind = calls[number - 1] if number else None
    begin = behind.ended_at if behind else event.at
    end = max(event.at, begin)
    who = event.caller.name if event.caller and not behind else _lane(behind, calls)
    detail = (event.error or event.output)[:200]
    return f"{who} · tools", Moment("tool", event.name, begin, end, number, event.status, detail)


def _laid_out(moments: Sequence[tuple[str, Moment]], start: float, last: float) -> Lanes:
    """Place each moment on the first lane of its name that is free at its time, and make the times relative to `start`."""
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
