"""One attempt of a branch: which of its calls the record answers, which are sampled, and what makes it void.

The invariant: nothing of a branch is sampled before all that its parent was answered, before the call at which it branches was
sent, has been asked again exactly as it is recorded, and has been answered alike.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from lightning.batch import begins_at
from lightning.gateway.http import RefusalError
from lightning.gateway.identity import NO_RETRY, Claims
from lightning.types import BRANCH_VOID, Transition

from lightning_branching.divergence import diverged
from lightning_branching.recorded import VOID, MeantChanges, Prefix, RecordedCall, RecordedCalls, edited

PATIENCE: Final = 120.0
"""Seconds that a call waits for those of the prefix, since the last of them was asked again: tools run between them."""


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
        self._missing = len(answered)
        self.recorded_ids = frozenset(call.transition.id for call in answered)
        """The ids of the answers that come from the record."""
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


def void(why: str) -> RefusalError:
    """The refusal (409) of a call in a branch that is no branch."""
    return RefusalError(409, BRANCH_VOID, f"{VOID} {why}", [NO_RETRY])
