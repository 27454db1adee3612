"""The calls of branches that are answered from the record of the rollouts that they branch from.

The invariant: nothing of a branch is sampled before all that its parent was answered, before the call at which it branches was
sent, has been asked again exactly as it is recorded, and has been answered alike. A branch that asks anything else is void: its
calls are refused with where they differ, and the store is told.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import orjson
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from lightning.batch.trajectory import begins_at
from lightning.errors import DataError, StoreError
from lightning.gateway.body_limits import beside
from lightning.gateway.http import Body, RefusalError, send_bytes, too_deep
from lightning.gateway.identity import NO_RETRY, Claims
from lightning.gateway.replay.divergence import diverged
from lightning.gateway.replay.recorded import (
    Prefix,
    RecordedCall,
    RecordedCalls,
    RecordedRollout,
    edited,
    prefix_of,
    read_rollout,
)
from lightning.gateway.replay.streams import stream_of
from lightning.gateway.stages import CallStage
from lightning.store import exchanges
from lightning.store.exchanges import TEXTS
from lightning.store.protocol import Store
from lightning.types import BRANCH_VOID, CallStatus, Rollout, ToolEvent, Transition

if TYPE_CHECKING:
    from lightning.gateway.call import Answer, Call, Request
    from lightning.gateway.calls import Parts

REMEMBERED: Final = 1024
"""Branches at work whose prefixes are at hand."""
PATIENCE: Final = 120.0
"""Seconds that a call waits for those of the prefix, since the last of them was asked again: tools run between them."""
PARENTS: Final = 8
"""Records of parents that are at hand: the branches of one come together."""
TOLD: Final = 4
"""Calls of a parent that those of its branch may be told against to begin with."""
SAID: Final = 4 * TOLD
"""Calls of each of these whose texts are at hand: groups that are sampled as trees branch at several calls at once."""
VOID: Final = "This branch is void:"
"""How the error of a void branch begins."""
NEVER_BRANCHED: Final = (
    f"{VOID} the agent ended without an answer to the call at which it branches. It has to run as it did: give it the time and "
    "random numbers with its task"
)
CHANGES: Final = "branch"
"""Where the configuration of a run says what its branches change: `{"edit": text, "prompts": true}`; and with `{"live":
version}` that the policy of the parent's run answers them, while it has that version."""
BRANCHES: Final = "branches"
"""The name of the stage."""
EDIT_TAKEN: Final = "edit_taken"
"""Begins the key of a run's state that says that the agent of a branch was given its edited answer, and all before it."""


@runtime_checkable
class Texts(Protocol):
    """The stage of texts: it stores a call as what it adds to an earlier one."""

    def inherit(self, attempt: tuple[str, int], calls: Sequence[exchanges.Said]) -> None:
        """The calls of a branch's attempt may be told against these of its parent."""


@dataclass(slots=True)
class _RecordedParent:
    """The record of a parent, and of its calls what those of branches are packed against. Both are forgotten together: a parent
    that is made again says something else."""

    recorded: RecordedRollout
    _said: OrderedDict[int, exchanges.Said] = field(default_factory=OrderedDict)

    def told_against(self, prefix: Prefix) -> list[exchanges.Said]:
        """What the calls of a branch are packed against to begin with: the call at which it branches, which its first call
        mostly asks again, and the last ones before that, as its parent's calls were. Its siblings get the same objects: to
        unpack a long rollout takes milliseconds of the event loop, and its requests may be megabytes."""
        last = sorted(prefix.answered, key=lambda call: call.transition.ended_at)[1 - TOLD :]
        numbers = [call.transition.seq for call in (prefix.at, *last)]
        if unknown := [number for number in numbers if number not in self._said]:
            calls = [call.transition for call in self.recorded.calls]
            self._said.update(zip(unknown, exchanges.said_in_parent(calls, unknown), strict=True))
        for number in numbers:
            self._said.move_to_end(number)
        while len(self._said) > SAID:
            self._said.popitem(last=False)
        return [self._said[number] for number in numbers]


@dataclass(frozen=True, slots=True)
class MeantChanges:
    """What is meant to be another than in a branch's parent: the answer to the call at which it branches, and prompts. `live`
    is the version that the policy of the parent's run has to have when it answers; None where another one answers."""

    edit: str | None = None
    prompts: bool = False
    live: int | None = None


class BranchedAttempt:
    """One attempt of a branch. What its `run` says is `meant`: where prompts are others, the call at which it branches may ask
    something else than it did; with an edit it is answered with that text instead of being sampled."""

    def __init__(self, prefix: Prefix, owner: tuple[str, int], run: str, meant: MeantChanges) -> None:
        self.prefix, self.owner, self.run = prefix, owner, run
        self._changed, self._live = meant.prompts, meant.live
        edit = meant.edit
        answered = (*prefix.answered, edited(prefix.at, edit)) if edit is not None else prefix.answered
        self._calls = RecordedCalls(answered)
        self._given: dict[tuple[str, bytes], RecordedCall] = {}
        self._open = {call.key for call in (prefix.at, *prefix.beside)}
        self._missing, self._ids = len(answered), frozenset(call.transition.id for call in answered)
        self._begun, self._whole, self._taken_at = asyncio.Event(), asyncio.Event(), 0.0
        self._beside, self._void = False, ""
        if not answered:
            self._whole.set()
        self._edited = edit is not None

    async def answer(self, caller: str, path: str, body: Mapping[str, Any], request: bytes) -> RecordedCall | None:
        """The recorded call that answers a request, of which `request` is the canonical form; None for one that is to be
        sampled, when it may be. Raises `RefusalError` (409) for what makes the branch void, and in a void one."""
        self._check()
        key = (path, request)
        if (found := self._calls.take(caller, path, request)) is not None:
            self._taken(key, found)
            return found
        if self._begun.is_set():
            return None
        known = key in self._open
        if not known and key in self._given:  # its client did not get the answer, and asks again
            return self._given[key]
        if not known and (not self._whole.is_set() or not (self._changed or self._beside)):
            difference = diverged(body, caller, path, [*self._calls.left, self.prefix.at])
            said = str(difference).removesuffix(difference.suspect).rstrip()
            self.refuse(f"{difference.suspect}. {said}")
        await self._wait(self._whole)
        if key == self.prefix.at.key or (self._changed and not known):
            self._begin()
        elif known:
            self._beside = True
        else:
            await self._wait(self._begun)  # what follows from a call beside it comes after it
        return None

    def _taken(self, key: tuple[str, bytes], call: RecordedCall) -> None:
        self._given[key], self._taken_at = call, asyncio.get_running_loop().time()
        self._missing -= 1
        if not self._missing:
            self._whole.set()
            if self._edited:
                self._begin()

    def goes_on(self, calls: Sequence[Transition]) -> None:
        """The attempt has made these calls of its own already: another server has answered what comes before."""
        if begins_at(calls, self.prefix.at.transition) or (self._changed and calls):
            self._missing = 0
            self._whole.set()
            self._begin()

    def _begin(self) -> None:
        """From here on everything is sampled: what of the record is not needed any more may be megabytes."""
        self.prefix = replace(self.prefix, answered=(), beside=())
        self._calls, self._open, self._given = RecordedCalls(()), set(), {}
        self._begun.set()

    @staticmethod
    def own_seed(claims: Claims, seed: int) -> int:
        """The seed of a sampled call whose agent gives one. The agent draws what its parent drew, and with the parent's seed
        the model would answer what it answered there."""
        text = f"{seed}/{claims.rollout}/{claims.attempt}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1

    @property
    def has_edit(self) -> bool:
        """Whether the agent has been given the edited answer, and all that came before it."""
        return self._edited and not self._missing and not self._void

    @property
    def recorded_ids(self) -> frozenset[str]:
        """The ids of the answers that come from the record."""
        return self._ids

    def check_prompt(self, prompt_ids: Sequence[int]) -> None:
        """The policy server has read the call at which it branches, which has to have the recorded prompt, token for token.
        Raises `RefusalError` (409)."""
        at = self.prefix.at
        if self._changed:
            return
        recorded = at.transition.prompt_ids
        if list(prompt_ids) != list(recorded):
            pairs = zip(prompt_ids, recorded, strict=False)
            place = next((n for n, (now, then) in enumerate(pairs) if now != then), min(len(prompt_ids), len(recorded)))
            self.refuse(
                f"the prompt of call {at.number} has other tokens than were recorded, from token {place} on: the chat template "
                "or the tokenizer has changed. Branch with the model that the rollout ran with"
            )

    @property
    def is_live(self) -> bool:
        """Whether the policy of the parent's run answers, which may be updated."""
        return self._live is not None

    def check_version(self, sampled_by: set[int] | None) -> None:
        """These versions have sampled a call, or nobody knows which: where the policy of the parent's run answers, it may have
        been updated. Raises `RefusalError` (409)."""
        if self._live is None or sampled_by == {self._live}:
            return
        why = (
            f"version {max(sampled_by)} of the policy has answered, and version {self._live} was to: the run's trainer has "
            "updated it meanwhile"
            if sampled_by
            else f"nobody knows whether version {self._live} of the policy has answered: the store or the trainer was silent "
            "for seconds"
        )
        self.refuse(f"{why}. Branch without --live, with a vLLM of its own")

    def refuse(self, why: str) -> None:
        """The branch is void. Raises `RefusalError`."""
        self._void = why
        self._whole.set()
        self._begun.set()
        self._check()

    def _check(self) -> None:
        if self._void:
            raise void(self._void)

    async def _wait(self, event: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not event.is_set():
            try:
                async with asyncio.timeout_at(max(began, self._taken_at) + PATIENCE):
                    await event.wait()
            except TimeoutError:
                if loop.time() - max(began, self._taken_at) >= PATIENCE:
                    left = self._calls.left
                    first = left[0] if left else self.prefix.at
                    self.refuse(
                        f"call {first.number} of {first.caller} was not asked for again within {PATIENCE:g} s: the agent's "
                        "code has changed, or runs otherwise each time; or its calls came to several servers, and a branch's "
                        "have to come to one"
                    )
        self._check()


async def meant_changes(store: Store, rollout: Rollout) -> MeantChanges:
    """What the run of a branch says of it."""
    run = await store.get_run(rollout.run)
    said = run.config.get(CHANGES) if run is not None else None
    if not isinstance(said, Mapping):
        return MeantChanges()
    edit, live = said.get("edit"), said.get("live")
    return MeantChanges(
        None if edit is None else str(edit), bool(said.get("prompts")), live if isinstance(live, int) else None
    )


async def why_no_branch(store: Store, rollout: Rollout, calls: Sequence[Transition]) -> str:
    """Why the calls of a branch's attempt do not show that it branched; empty where they do. An agent whose prompts were
    changed, or that was given an edited answer, need not have asked what its parent did."""
    assert rollout.parent is not None, "asked of branches"
    if await store.get_state(rollout.run, edit_key(rollout.id, rollout.attempt)) is True:
        return ""
    if (await meant_changes(store, rollout)).prompts and any(call.status.answered for call in calls):
        return ""
    parent, attempt, seq = rollout.parent
    at = next((call for call in await store.transitions(parent, attempt) if call.seq == seq), None)
    return "" if at is not None and begins_at(calls, at) else NEVER_BRANCHED


def void(why: str) -> RefusalError:
    """The refusal (409) of a call in a branch that is no branch."""
    return RefusalError(409, BRANCH_VOID, f"{VOID} {why}", [NO_RETRY])


def is_void(rollout: Rollout) -> bool:
    """Whether an ended rollout is a branch that did not begin as its parent did."""
    return rollout.parent is not None and rollout.error.startswith(VOID)


def edit_key(rollout: str, attempt: int) -> str:
    """Where a branch's run says that its agent was given the edited answer."""
    return f"{EDIT_TAKEN}/{rollout}/{attempt}"


@dataclass(slots=True)
class Branches:
    """The branches that this gateway answers, by attempt."""

    store: Store
    texts: Texts | None
    _known: OrderedDict[tuple[str, int], BranchedAttempt] = field(default_factory=OrderedDict)
    _reading: dict[tuple[str, int], asyncio.Task[BranchedAttempt]] = field(default_factory=dict)
    _parents: OrderedDict[tuple[str, int], asyncio.Task[_RecordedParent]] = field(default_factory=OrderedDict)

    async def of(self, claims: Claims) -> BranchedAttempt:
        """The branch of an attempt. Raises `RefusalError`: 409 where it is void from the beginning, 503 when the store cannot
        tell."""
        key = (claims.rollout, claims.attempt)
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        reading = self._reading.get(key)
        if reading is None:  # one reading for all calls that come at once: they share what is left of the prefix
            reading = self._reading[key] = asyncio.ensure_future(self._read(claims.rollout, claims.attempt))
            reading.add_done_callback(lambda _: self._reading.pop(key, None))
        try:
            return await asyncio.shield(reading)
        except DataError as error:
            raise void(str(error)) from error
        except StoreError as error:
            message = f"The store does not say what the branch begins with: {error}. Send the call again."
            raise RefusalError(503, "store_failed", message) from error

    async def keep_edit(self, branch: BranchedAttempt, claims: Claims) -> None:
        """The agent is about to get the edited answer: keep that, since it may make no call of its own after it. Raises
        `RefusalError` (409) where the store fails: the answer is given once, so that the branch is void."""
        try:
            await self.store.put_state(branch.run, edit_key(claims.rollout, claims.attempt), True, once=None)
        except StoreError as error:
            branch.refuse(f"the store does not keep that its edited answer was given: {error}")

    async def tool_runs(self, claims: Claims) -> list[ToolEvent]:
        """The runs of tools that are answered in a branch. Raises as `of` does."""
        return list((await self.of(claims)).prefix.tool_events)

    async def _read(self, name: str, number: int) -> BranchedAttempt:
        rollout = await self.store.get_rollout(name)
        if rollout is None or rollout.parent is None:
            raise DataError(f"the rollout {name} is no branch")
        parent, attempt, seq = rollout.parent
        found = await self._parent(parent, attempt)
        meant, prefix = await meant_changes(self.store, rollout), prefix_of(found.recorded, seq)
        if self.texts is not None:
            self.texts.inherit((name, number), found.told_against(prefix))
        branch = BranchedAttempt(prefix, (parent, attempt), rollout.run, meant)
        branch.goes_on(await self.store.transitions(name, number))
        self._known[name, number] = branch  # before the reading is over: whoever comes then must not read again
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return branch

    async def _parent(self, parent: str, attempt: int) -> _RecordedParent:
        key = (parent, attempt)
        reading = self._parents.get(key)
        if reading is None:  # one reading for all branches that come at once: they share what it finds
            reading = self._parents[key] = asyncio.ensure_future(self._read_parent(parent, attempt))
            if len(self._parents) > PARENTS:
                self._parents.popitem(last=False)
        try:
            return await asyncio.shield(reading)
        except BaseException:
            if self._parents.get(key) is reading:  # whoever comes next asks the store again
                del self._parents[key]
            raise

    async def _read_parent(self, parent: str, attempt: int) -> _RecordedParent:
        return _RecordedParent(await read_rollout(self.store, parent, attempt))


class BranchesStage(CallStage):
    """The first calls of a branch are answered from its parent's record, and the others are held to it."""

    api, after, before = 1, ("providers",), ("conversations",)

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._calls: WeakKeyDictionary[Call, tuple[BranchedAttempt, bool]] = WeakKeyDictionary()

    @cached_property
    def branches(self) -> Branches:
        """The branches at work. Their texts are told against those of their parents."""
        texts = self._parts.line.named(TEXTS)
        return Branches(self._parts.store, texts if isinstance(texts, Texts) else None)

    async def admitted(self, call: Call, request: Request) -> ASGIApp | None:
        """Answer a call of a branch from the record, if that has it."""
        if not call.claims.branch:
            return None
        branch, path = await self.branches.of(call.claims), call.dialect.path
        try:
            asked = await beside(request.scope, partial(exchanges.canonical, request.body))
        except RecursionError:
            raise too_deep() from None
        found = await branch.answer(call.caller.name, path, request.body, asked)
        if found is not None:
            if branch.has_edit:
                await self.branches.keep_edit(branch, call.claims)
            return recorded_answer(found, request.body)
        self._calls[call] = branch, branch.prefix.at.key == (path, asked)
        # An agent acts upon what it has read, and it is not known before the end whether that is of the right version.
        call.withheld = "a branch" if branch.is_live else ""
        if call.dialect.continues(request.body) in branch.recorded_ids:
            call.lineage = branch.owner
        return None

    async def sending(self, call: Call, body: Body) -> None:
        """Give a call that brings the seed of its parent's one of its own."""
        if call in self._calls and isinstance(body.get("seed"), int):
            body["seed"] = BranchedAttempt.own_seed(call.claims, body["seed"])

    async def settled(self, call: Call, answer: Answer) -> None:
        """Void the branch where its parent's prompt or version is not what was answered."""
        if (known := self._calls.get(call)) is None or not answer.status:
            return
        branch, is_branching = known
        if is_branching and answer.outcome is CallStatus.OK:
            branch.check_prompt(call.capture.choice(0).prompt_ids or call.capture.prompt_ids or ())
        if call.capture.choices:
            branch.check_version(call.live.sampled_by)


class ToolRuns:
    """`GET /v1/tool_runs`: the runs of tools that are answered in a branch, for whoever runs its agent; of another attempt
    none."""

    def __init__(self, parts: Parts) -> None:
        self._identity, self._line = parts.identity, parts.line

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        claims, stage = self._identity.claims(scope), self._line.named(BRANCHES)
        runs = await stage.branches.tool_runs(claims) if claims.branch and isinstance(stage, BranchesStage) else []
        await send_bytes(send, 200, orjson.dumps({"tool_runs": [asdict(run) for run in runs]}))


def recorded_answer(call: RecordedCall, body: Mapping[str, Any]) -> Response:
    """A recorded answer, as a stream where one is asked for."""
    reply: Any = call.exchange.reply
    status, kind, content = call.exchange.status, "application/json", b""
    if body.get("stream") is True and status == 200:
        kind, content = "text/event-stream; charset=utf-8", b"".join(stream_of(call.exchange.path, reply, body))
    else:
        content = orjson.dumps(reply)
    return Response(content, status, {"content-type": kind, "x-request-id": call.transition.id})
