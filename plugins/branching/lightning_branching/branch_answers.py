"""The branches that a gateway answers, and the records of their parents, read once for branches that come together.

The invariant: a branch first repeats its parent's earlier calls exactly, and gets the recorded answers. Only then is anything
sampled. The number of branches and parents in memory is bounded; the others are read from the store again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, runtime_checkable

from lightning.batch import begins_at
from lightning.bounded import Bounded
from lightning.errors import DataError, StoreError
from lightning.gateway.http import RefusalError
from lightning.gateway.identity import NO_RETRY, Claims
from lightning.store.protocol import Store
from lightning.types import BRANCH_VOID, Transition
from lightning_record import exchanges

from lightning_branching.divergence import diverged
from lightning_branching.recorded import (
    NOT_ASKED,
    OTHER_TOKENS,
    VOID,
    MeantChanges,
    Prefix,
    RecordedCall,
    RecordedCalls,
    RecordedRollout,
    edit_key,
    edited,
    meant_changes,
    prefix_of,
    read_rollout,
)

PATIENCE: Final = 120.0
"""Seconds for which a call waits for the parent's earlier calls to be repeated, counted from the last one that was. Tools may
run between two of them."""


class BranchedAttempt:
    """One attempt of a branch. `meant` are the changes that its `run` declares: with other prompts the branching call may
    differ from the recorded one; with an edit that call is answered with the edited text and is not sampled."""

    def __init__(self, prefix: Prefix, owner: tuple[str, int], run: str, meant: MeantChanges) -> None:
        self.prefix, self.owner, self.run = prefix, owner, run
        self._changed, self._live = meant.prompts, meant.live
        edit = meant.edit
        answered = (*prefix.answered, edited(prefix.at, edit)) if edit is not None else prefix.answered
        self._calls = RecordedCalls(answered)
        self._given: dict[tuple[str, bytes], RecordedCall] = {}
        self._open = {call.key for call in (prefix.at, *prefix.beside)}
        self._missing = len(answered)
        self.recorded_ids = frozenset(call.transition.id for call in answered)
        """The ids of the calls that are answered from the record."""
        self._begun, self._whole, self._taken_at = asyncio.Event(), asyncio.Event(), 0.0
        self._beside, self._void = False, ""
        if not answered:
            self._whole.set()
        self._edited = edit is not None

    async def answer(self, caller: str, path: str, body: Mapping[str, Any], request: bytes) -> RecordedCall | None:
        """Return the recorded call that answers a request, or None for a request that is sampled, as soon as it may be sampled.
        `request` is the canonical JSON of the body. Raises `RefusalError` (409) for a request that makes the branch void, and
        for any request of a void branch."""
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
            await self._wait(self._begun)  # it may follow from a call beside the branching one, which must come first
        return None

    def _taken(self, key: tuple[str, bytes], call: RecordedCall) -> None:
        self._given[key], self._taken_at = call, asyncio.get_running_loop().time()
        self._missing -= 1
        if not self._missing:
            self._whole.set()
            if self._edited:
                self._begin()

    def goes_on(self, calls: Sequence[Transition]) -> None:
        """Take over an attempt that has made these calls of its own at another server: if they show that it branched there,
        everything from now on is sampled."""
        if begins_at(calls, self.prefix.at.transition) or (self._changed and calls):
            self._missing = 0
            self._whole.set()
            self._begin()

    def _begin(self) -> None:
        """Sample everything from now on, and drop the rest of the record, which may be megabytes."""
        self.prefix = replace(self.prefix, answered=(), beside=())
        self._calls, self._open, self._given = RecordedCalls(()), set(), {}
        self._begun.set()

    @staticmethod
    def own_seed(claims: Claims, seed: int) -> int:
        """Return the seed for a sampled call whose request has the seed `seed`. It depends on the rollout and the attempt,
        because an agent that runs again draws its parent's seeds, and with these the model would give its parent's answers."""
        text = f"{seed}/{claims.rollout}/{claims.attempt}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1

    @property
    def has_edit(self) -> bool:
        """Whether the agent got the edited answer, after all recorded answers before it."""
        return self._edited and not self._missing and not self._void

    def check_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Check that the branching call has the recorded prompt, token for token; `prompt_ids` are the policy server's. With
        other prompts nothing is checked. Raises `RefusalError` (409) and voids the branch if a token differs."""
        at = self.prefix.at
        if self._changed:
            return
        recorded = at.transition.prompt_ids
        if list(prompt_ids) != list(recorded):
            pairs = zip(prompt_ids, recorded, strict=False)
            place = next((n for n, (now, then) in enumerate(pairs) if now != then), min(len(prompt_ids), len(recorded)))
            self.refuse(
                f"the prompt of call {at.number} {OTHER_TOKENS}, from token {place} on: the chat template "
                "or the tokenizer has changed. Branch with the model that the rollout ran with"
            )

    @property
    def is_live(self) -> bool:
        """Whether the branch is answered by the policy of the parent's run, which may be updated meanwhile."""
        return self._live is not None

    def check_version(self, sampled_by: set[int] | None) -> None:
        """Check that only the version of the parent's call sampled a call of a live branch. `sampled_by` are the versions that
        did; None if they are unknown. Raises `RefusalError` (409) and voids the branch otherwise."""
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
        """Make the branch void for this reason, and raise `RefusalError` (409)."""
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
                        f"call {first.number} of {first.caller} {NOT_ASKED} within {PATIENCE:g} s: the agent's "
                        "code has changed, or runs otherwise each time; or its calls came to several servers, and a branch's "
                        "have to come to one"
                    )
        self._check()


def void(why: str) -> RefusalError:
    """Return the refusal (409) of a call in a void branch."""
    return RefusalError(409, BRANCH_VOID, f"{VOID} {why}", [NO_RETRY])


REMEMBERED: Final = 1024
"""Most attempts of branches that are kept in memory."""
PARENTS: Final = 8
"""Most records of parents that are kept in memory; the branches of one parent come together."""
TOLD: Final = 4
"""Number of the parent's calls against which the first calls of a branch are packed."""
SAID: Final = 4 * TOLD
"""Most calls of each parent whose texts are kept in memory; a group that is sampled as a tree branches at several calls at
once."""


@runtime_checkable
class Inherits(Protocol):
    """The interface of the stage that stores the texts of calls, as far as branches use it."""

    def inherit(self, attempt: tuple[str, int], calls: Sequence[exchanges.Said]) -> None:
        """Pack the texts of a new attempt of a branch as differences from these calls of its parent."""


@dataclass(slots=True)
class RecordedParent:
    """The record of a parent, and the texts of its calls against which calls of branches are packed. Both are dropped together,
    because a parent that was removed and made again has other texts."""

    recorded: RecordedRollout
    _said: Bounded[int, exchanges.Said] = field(default_factory=lambda: Bounded(SAID))

    def told_against(self, prefix: Prefix) -> list[exchanges.Said]:
        """Return the calls against which the first calls of a branch are packed: the branching call, which the branch mostly
        repeats, and the last `TOLD` - 1 calls that ended before it. Sibling branches get the same objects, because unpacking a
        long rollout takes milliseconds of the event loop, and its requests may be megabytes."""
        last = sorted(prefix.answered, key=lambda call: call.transition.ended_at)[1 - TOLD :]
        numbers = [call.transition.seq for call in (prefix.at, *last)]
        said = {number: self._said[number] for number in numbers if number in self._said}
        if unknown := [number for number in numbers if number not in said]:
            calls = [call.transition for call in self.recorded.calls]
            said.update(zip(unknown, exchanges.said_in_parent(calls, unknown), strict=True))
        return [self._said.keep(number, said[number]) for number in numbers]


@dataclass(slots=True)
class Branches:
    """The branches that this gateway answers, by attempt."""

    store: Store
    texts: Inherits | None
    """The stage that stores the texts of calls; None if none are stored."""
    _known: Bounded[tuple[str, int], BranchedAttempt] = field(default_factory=lambda: Bounded(REMEMBERED))
    _reading: dict[tuple[str, int], asyncio.Task[BranchedAttempt]] = field(default_factory=dict)
    _parents: Bounded[tuple[str, int], asyncio.Task[RecordedParent]] = field(default_factory=lambda: Bounded(PARENTS))

    async def of(self, claims: Claims) -> BranchedAttempt:
        """Return the branch of the attempt in these claims. Raises `RefusalError`: 409 if it is void from the beginning, 503 if
        the store fails."""
        key = (claims.rollout, claims.attempt)
        if (known := self._known.used(key)) is not None:
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
        """Store that the agent gets the edited answer, because it may make no call of its own afterwards. Raises `RefusalError`
        (409) and voids the branch if the store fails, because the answer is given only once."""
        try:
            await self.store.put_state(branch.run, edit_key(claims.rollout, claims.attempt), True, once=None)
        except StoreError as error:
            branch.refuse(f"the store does not keep that its edited answer was given: {error}")

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
        # Kept before this task ends: a call that comes just then must not read again.
        return self._known.keep((name, number), branch)

    async def _parent(self, parent: str, attempt: int) -> RecordedParent:
        key = (parent, attempt)
        reading = self._parents.get(key)
        if reading is None:  # one reading for all branches that come at once: they share what it finds
            reading = self._parents.keep(key, asyncio.ensure_future(self._read_parent(parent, attempt)))
        try:
            return await asyncio.shield(reading)
        except BaseException:
            if self._parents.get(key) is reading:  # whoever comes next asks the store again
                del self._parents[key]
            raise

    async def _read_parent(self, parent: str, attempt: int) -> RecordedParent:
        return RecordedParent(await read_rollout(self.store, parent, attempt))
