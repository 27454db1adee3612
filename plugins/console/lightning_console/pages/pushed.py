"""The page of what a step taught: the calls, and where they differ the tokens, whose probability it pushed up and down most.

The invariant: pushes are derived as for "why was this token pushed?", and the page says whether they are proved.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Final

from lightning.algorithms.protocol import Algorithm
from lightning.errors import DataError
from lightning.trainer.context import read_epochs
from lightning.types import Rollout, StepRecord, Transition, by_key
from lightning_debug.ab import earned
from lightning_record.exchanges import parents_of

from lightning_console.blocks import Block, Cell, Column, Fact, Facts, Link, Notice, Notices, Page, Table
from lightning_console.pages.words import (
    NONE,
    count,
    counted,
    in_short,
    inside,
    located,
    mean_of,
    number,
    share,
    step_links,
    task_text,
    to,
    tone_of,
    trail,
)
from lightning_console.places import Located, Places
from lightning_console.queries.conversation import Said, Vocabulary, one_line, said_by, vocabulary_of
from lightning_console.queries.memo import Memo, apart, stamp_of
from lightning_console.queries.steps import CallCredit, StepProof, prove_step
from lightning_console.router import Address

CALLS: Final = 15
"""Calls in each table."""
TOKENS: Final = 20
"""Tokens in the table of tokens."""
AROUND: Final = 6
"""Tokens of the answer that are shown before and after a token."""
LONGEST: Final = 160
"""Characters of an answer."""


@dataclass(frozen=True, slots=True)
class Siblings:
    """A call beside the `rollouts` of its group: `alike` of them made the same calls up to it, and `better` of these earned
    more. `others` is the mean reward of all the others; `alone` says that none of them earned the same. `part` is the number of
    the call at which it parts from the best of those alike (0: nowhere), with what it said there (`own`) and what the best one
    said (`best`). `calls` counts the trained calls of its rollout, of which it is the `longest` or not."""

    rollouts: int
    alike: int
    better: int
    others: float | None
    alone: bool
    calls: int
    longest: bool
    part: int = 0
    own: str = ""
    best: str = ""


@dataclass(frozen=True, slots=True)
class PushedCall:
    """A call that a step trained on, with its credit. `agent` is None if the call is no longer stored; `number` is its number
    on the page of its rollout, and `answer` its text on one line. `missing` says why the text is not as it was sent.
    `siblings` are known of the strongest call in each direction."""

    rollout: Rollout
    attempt: int
    seq: int
    credit: CallCredit
    agent: str | None = None
    number: int = 0
    answer: str = ""
    missing: str = ""
    siblings: Siblings | None = None


@dataclass(frozen=True, slots=True)
class PushedToken:
    """A token of a call, with its `push` and the text of the answer before and after it."""

    call: PushedCall
    push: float
    before: str
    text: str
    after: str


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a step pushed most. `proof` has no rollouts and not their credit, which may be large. `up` and `down` are calls, the
    strongest first; `tokens` is empty if every call's tokens are pushed alike. `calls` counts the calls that were trained on,
    `total` is the sum of the sizes of their pushes. `by_rollout` says that all calls of each rollout have one advantage,
    although some rollouts have several calls."""

    proof: StepProof
    calls: int
    total: float
    up: tuple[PushedCall, ...]
    down: tuple[PushedCall, ...]
    tokens: tuple[PushedToken, ...]
    by_rollout: bool
    missing: str = ""


_pushed: Memo[Pushed] = Memo(kept=16)


async def pushed_of(found: Located, record: StepRecord, patience: float | None) -> Pushed | None:
    """Find what a step pushed most; None if that is not ready within `patience` seconds. Raises `StoreError`."""
    stamp = record.digest, await stamp_of(found.store, found.run.id)
    about = found.run.id, found.run.created_at, record.step
    return await _pushed.soon(found.store, about, stamp, lambda: apart(lambda: _read(found, record)), patience)


async def _read(found: Located, record: StepRecord) -> Pushed:
    proof = await prove_step(found.store, found.run, record, await read_epochs(found.store, found.run))
    calls = _calls_of(proof, record)
    strongest = sorted(calls, key=lambda each: -abs(each.credit.whole))
    up = [each for each in strongest if each.credit.whole > 0][:CALLS]
    down = [each for each in strongest if each.credit.whole < 0][:CALLS]
    uneven = heaviest_tokens(calls)
    vocabulary = vocabulary_of(found)
    told, ids = await _told(found, [*up, *down, *(call for call, _ in uneven)], vocabulary)
    for each in (*up[:1], *down[:1]):
        one = told[_key(each)]
        told[_key(each)] = replace(one, siblings=await _siblings(found, proof, record, one, vocabulary))
    several = [own for member in proof.members.values() if len(own := [*member.calls.values()]) > 1]
    return Pushed(
        replace(proof, rollouts=(), members={}),
        len(calls),
        sum(abs(each.credit.whole) for each in calls),
        tuple(told[_key(each)] for each in up),
        tuple(told[_key(each)] for each in down),
        tuple(_token(told[_key(call)], ids.get(_key(call), ()), place, vocabulary) for call, place in uneven),
        bool(several) and all(len({each.advantage for each in own}) == 1 for own in several),
        vocabulary.missing,
    )


def _calls_of(proof: StepProof, record: StepRecord) -> list[PushedCall]:
    attempts = dict(record.rollouts)
    return [
        PushedCall(rollout, attempts.get(rollout.id, rollout.attempt), seq, credit)
        for rollout in proof.rollouts
        if (member := proof.members.get(rollout.id)) is not None
        for seq, credit in member.calls.items()
    ]


def heaviest_tokens(calls: Sequence[PushedCall]) -> list[tuple[PushedCall, int]]:
    """Return the tokens with the strongest pushes, as `(call, index in its answer)`, of the calls whose tokens are pushed
    differently."""
    uneven = ((each, place) for each in calls for place in range(len(each.credit.pushes)))
    return heapq.nlargest(TOKENS, uneven, key=lambda pair: abs(pair[0].credit.pushes[pair[1]]))


def _key(call: PushedCall) -> tuple[str, int]:
    return call.rollout.id, call.seq


async def _told(
    found: Located, calls: Sequence[PushedCall], vocabulary: Vocabulary
) -> tuple[dict[tuple[str, int], PushedCall], dict[tuple[str, int], Sequence[int]]]:
    """Return the calls with what is stored of them, by rollout and sequence number, and the tokens of their answers where these
    are pushed differently. One rollout is read at a time, because its calls may be large."""
    told: dict[tuple[str, int], PushedCall] = {}
    ids: dict[tuple[str, int], Sequence[int]] = {}
    for own in by_key(calls, lambda each: each.rollout.id).values():
        stored = await _said(found, own[0], vocabulary)
        for each in own:
            key = _key(each)
            if (known := stored.get(each.seq)) is None:
                told[key] = each
                continue
            place, call, said = known
            answer = one_line(said.answer, LONGEST)
            told[key] = replace(each, number=place, agent=call.caller.name, answer=answer, missing=said.missing)
            if each.credit.pushes:
                ids[key] = call.response_ids
    return told, ids


async def _said(found: Located, one: PushedCall, vocabulary: Vocabulary) -> Mapping[int, tuple[int, Transition, Said]]:
    """Return number, call and content of each call of a rollout, by sequence number."""
    calls = await found.store.transitions(one.rollout.id, one.attempt)
    (parent,) = await parents_of(found.store, [one.rollout])
    said = said_by(calls, vocabulary, parent)
    return {call.seq: (place, call, each) for place, (call, each) in enumerate(zip(calls, said, strict=True), 1)}


async def _siblings(
    found: Located, proof: StepProof, record: StepRecord, one: PushedCall, vocabulary: Vocabulary
) -> Siblings | None:
    """Compare a call with those of the other rollouts of its group; None if its calls are not stored."""
    attempts = dict(record.rollouts)
    group = [each for each in proof.rollouts if each.group == one.rollout.group and each.parent is None]
    said: dict[str, list[str]] = {}
    for each in group:
        calls = await found.store.transitions(each.id, attempts.get(each.id, each.attempt))
        said[each.id] = [call.answer for call in said_by(calls, vocabulary, None)]
    mine, until = said.get(one.rollout.id, []), one.number
    if not until or len(group) < 2:
        return None
    others = [each for each in group if each.id != one.rollout.id]
    alike = [each for each in others if said[each.id][:until] == mine[:until]]
    better = [each for each in alike if (earned(each) or 0.0) > (earned(one.rollout) or 0.0)]
    rewards = [earned(each) for each in others]
    trained = proof.members[one.rollout.id].calls
    longest = all(each.tokens < one.credit.tokens for seq, each in trained.items() if seq != one.seq)
    made = Siblings(
        len(group),
        len(alike) + 1,
        len(better),
        mean_of(rewards),
        earned(one.rollout) not in rewards,
        len(trained),
        longest,
    )
    if not better:
        return made
    best = said[max(better, key=lambda each: earned(each) or 0.0).id]
    pairs = enumerate(zip_longest(mine, best, fillvalue="(no further call)"), 1)
    part, own, other = next(((place, *pair) for place, pair in pairs if pair[0] != pair[1]), (0, "", ""))
    return replace(made, part=part, own=one_line(own, LONGEST), best=one_line(other, LONGEST))


def _token(call: PushedCall, ids: Sequence[int], place: int, vocabulary: Vocabulary) -> PushedToken:
    first = max(0, place - AROUND)
    before, text, after = ids[first:place], ids[place : place + 1], ids[place + 1 : place + 1 + AROUND]
    said = ["".join(vocabulary.texts(part)) for part in (before, text, after)]
    return PushedToken(call, call.credit.pushes[place], said[0], said[1], said[2])


async def page(places: Places, address: Address) -> Page:
    """Make the page `pushed/RUN/STEP`. Raises `DataError` if the address names no committed step."""
    found = await located(places, address)
    if len(address.about) < 2 or not address.about[1].isdecimal():
        raise DataError(f"the address {str(address)!r} names no step: pushed/RUN/STEP, counted from 1")
    step = int(address.about[1])
    records = await found.store.steps(found.run.id, after=max(0, step - 1), limit=1)
    if not records or records[0].step != step:
        raise DataError(f"the run {found.run.id} has no committed step {step}: nothing was trained in it")
    pushed = await pushed_of(found, records[0], places.patience)
    last = await found.store.last_step(found.run.id)
    return Page(
        str(address),
        f"Most pushed in step {step}",
        [*_blocks(found, pushed)],
        trail(found, *step_links(found, records[0])),
        live=pushed is None,
        partial=pushed is None,
        previous=to("pushed", found.key, step - 1) if step > 1 else "",
        next=to("pushed", found.key, step + 1) if last is not None and step < last.step else "",
    )


def _blocks(found: Located, pushed: Pushed | None) -> Iterator[Block]:
    if pushed is None:
        yield Notices([Notice("the calls of this step are read …", "muted")])
        return
    strongest = [*((each, "down") for each in pushed.down[:1]), *((each, "up") for each in pushed.up[:1])]
    yield from in_short([_strongest(found, each, way, pushed.by_rollout) for each, way in strongest])
    notices = [] if pushed.proof.proved else [_doubt(pushed.proof)]
    if pushed.calls and pushed.total:
        notices += _alike(pushed)
    if not pushed.calls and pushed.proof.proved:
        notices.append(Notice("This step trained no call", "muted", detail="no group of it taught anything"))
    yield Notices(notices)
    if not pushed.calls:
        return
    yield Facts(
        [
            Fact("trained calls", count(pushed.calls)),
            Fact("shown", share(_part([*pushed.up, *pushed.down], pushed.total)), "of all that this step pushed"),
        ],
        note="the push of a call is advantage × weight, over all of its tokens: how strongly training moved the "
        "probability of saying this again. A share is the part of all pushes of the step, up and down together. The clip "
        "and the mask of the loss may have held single tokens back",
    )
    yield _table(found, "Pushed up most", pushed.up, pushed.total)
    yield _table(found, "Pushed down most", pushed.down, pushed.total)
    if pushed.tokens:
        yield _tokens(found, pushed)


def _strongest(found: Located, call: PushedCall, way: str, by_rollout: bool) -> Notice:
    """Say which call was pushed hardest in a direction, and whether the call itself or another of its rollout explains it."""
    by = f" by {call.agent}" if call.agent else ""
    text = f"Pushed {way} hardest: {_name(found, call)}{by}, {call.answer!r}"
    link = [
        Link(_name(found, call), _opens(found, call)),
        Link("its group", to("group", found.key, call.rollout.group)),
    ]
    beside, task = call.siblings, call.rollout.task
    if beside is None:
        return Notice(text, links=link)
    if way == "down" and beside.better and beside.part:
        text += f". The mistake is in call {beside.part}: {beside.own!r}; the best of its group said {beside.best!r}"
    expected = "" if task.expected is None else f" (expected {one_line(task_text(task.expected), 60)})"
    detail = (
        f"{_reason(found, call, beside, way, by_rollout)}. Task{expected}: {one_line(task_text(task.input), LONGEST)}"
    )
    return Notice(text, detail=detail, links=link)


def _reason(found: Located, call: PushedCall, beside: Siblings, way: str, by_rollout: bool) -> str:
    """Say why a call was pushed hardest: how its rollout fared in its group, and why the call stands before its siblings."""
    own = number(earned(call.rollout))
    earns = f"alone earned {own}" if beside.alone else f"earned {own}"
    earns += f", the {beside.rollouts - 1} others {number(beside.others)} on average"
    if not by_rollout or beside.calls < 2:
        return f"Its rollout {earns}. {beside.alike} of {beside.rollouts} rollouts made this call"
    first = f". Call {call.number} is first because it is the longest ({counted(call.credit.tokens, 'token')})"
    name = inside(found, call.rollout.id)
    return f"All calls of {name} were pushed {way} alike, since it {earns}{first if beside.longest else ''}"


def _part(calls: Sequence[PushedCall], total: float) -> float | None:
    return sum(abs(each.credit.whole) for each in calls) / total if total else None


def _doubt(proof: StepProof) -> Notice:
    if proof.proved is None:
        return Notice("What this step pushed is not known", "warn", detail=proof.why)
    return Notice("These pushes are not proved to be those of the step", "bad", detail=proof.why)


def _alike(pushed: Pushed) -> Iterator[Notice]:
    """Say which calls and tokens the algorithm pushes alike."""
    name, credit = _names(pushed.proof.algorithm)
    if not pushed.tokens:
        yield Notice(f"{name} gives every token of a call the same push: calls are listed, not tokens")
    if pushed.by_rollout:
        why = f"The credit {credit} gives all calls of a rollout the same advantage"
        yield Notice(
            why, detail="a call may stand here for what another call of its rollout did; longer answers stand higher"
        )


def _names(algorithm: Algorithm | None) -> tuple[str, str]:
    """Return the names of an algorithm and of its credit."""
    credit = getattr(algorithm, "credit", "")
    return (
        str(getattr(algorithm, "low_level", "") or getattr(algorithm, "name", "The algorithm")).upper(),
        f"{credit!r}" if isinstance(credit, str) else type(credit).__name__,
    )


def _table(found: Located, title: str, calls: Sequence[PushedCall], total: float) -> Table:
    columns = [
        Column("call"),
        Column("agent"),
        Column("answer"),
        Column("reward", "number", "of its rollout"),
        Column("advantage", "number", "how much better than its group"),
        Column("tokens", "number"),
        Column("share", "number", "of all that this step pushed, up and down together"),
    ]
    rows = [
        [
            Cell(_name(found, each), here := _opens(found, each)),
            Cell(NONE if each.agent is None else each.agent),
            Cell(each.answer or ("(an empty answer)" if each.agent is not None else "(it is no longer stored)"), here),
            Cell(number(each.rollout.reward)),
            Cell(f"{each.credit.advantage:+.3f}", tone=tone_of(each.credit.advantage)),
            Cell(count(each.credit.tokens)),
            Cell(share(_part([each], total))),
        ]
        for each in calls
    ]
    way = "up" if title == "Pushed up most" else "down"
    missing = dict.fromkeys(each.missing for each in calls if each.missing)
    note = f"some answers are not as they were sent: {'; '.join(missing)}" if missing else ""
    return Table(columns, rows, title=title, note=note, empty=f"no call was pushed {way}")


def _name(found: Located, each: PushedCall) -> str:
    return f"{inside(found, each.rollout.id)}, call {each.number}" if each.number else inside(found, each.rollout.id)


def _opens(found: Located, each: PushedCall) -> str:
    options = {"call": each.number} if each.number else {}
    options |= {"attempt": each.attempt} if each.attempt != each.rollout.attempt else {}
    return to("rollout", found.key, each.rollout.id, **options)


def _tokens(found: Located, pushed: Pushed) -> Table:
    columns = [
        Column("token"),
        Column("in its answer"),
        Column("call"),
        Column("push", "number", "advantage × weight: negative pushes make the token less probable"),
        Column("share", "number", "of all that this step pushed, up and down together"),
    ]
    rows = [
        [
            Cell(repr(each.text)),
            Cell(one_line(f"{each.before}[{each.text}]{each.after}", LONGEST), _opens(found, each.call)),
            Cell(_name(found, each.call), _opens(found, each.call)),
            Cell(f"{each.push:+.2e}", tone=tone_of(each.push)),
            Cell(share(abs(each.push) / pushed.total if pushed.total else None)),
        ]
        for each in pushed.tokens
    ]
    note = "of the calls whose tokens are pushed differently" + (f"; {pushed.missing}" if pushed.missing else "")
    return Table(columns, rows, title="Tokens pushed most", note=note)
