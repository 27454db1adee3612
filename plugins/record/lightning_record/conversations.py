"""The conversations of a served model: its key is of a session, in which each conversation is a rollout.

The invariant: the id of an answer says which conversation it is of, so that any server over the store finds it again, after a
restart too. Conversations are told apart by what the client says of them (a header, `previous_response_id`), never by time or
text; a call that says nothing is a conversation of its own.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

import orjson
from lightning.errors import DataError, StoreError
from lightning.gateway.http import Body, RefusalError
from lightning.gateway.identity import NO_RETRY, Claims
from lightning.gateway.stages import CallStage
from lightning.redaction import redacted_json
from lightning.store.protocol import Store
from lightning.types import CONVERSATION_ID, SERVED, Json, Rollout, Status, Task
from starlette.types import Scope

if TYPE_CHECKING:
    from lightning.gateway.call import Call, Request
    from lightning.gateway.calls import Parts

CONVERSATION_HEADER = b"x-lightning-conversation"
"""Names the conversation that a call belongs to: any text of its client's choice."""
LONGEST_NAME = 512
LONGEST_TASK = 65_536
"""Bytes of a request that are kept as the task of a conversation."""
SAID = ("messages", "system", "instructions", "input", "prompt")
"""Where the APIs have what the client says."""
_OF_ANSWER = re.compile(r"s([0-9a-f]{32})r[0-9a-f]+\Z")


def rollout_of_answer(response: str) -> str | None:
    """The rollout of the conversation that an answer's id names; None for an id of any other call."""
    found = _OF_ANSWER.search(response)
    return CONVERSATION_ID + found.group(1) if found else None


def mark_of(rollout: str) -> str:
    """What begins the ids of a conversation's calls; empty for any other rollout."""
    return f"s{rollout.removeprefix(CONVERSATION_ID)}r" if rollout.startswith(CONVERSATION_ID) else ""


class Conversations:
    """Finds or begins the rollout of a call. `keeps_text` is `gateway.record_requests`.

    `resource` names the weights of which the policy's version is a version, so that rewards can be compared by version; empty
    where it is none.
    """

    def __init__(self, store: Store, *, keeps_text: bool) -> None:
        self._store, self._keeps_text = store, keeps_text
        self.resource = ""

    async def of(self, claims: Claims, scope: Scope, body: Body, previous: str | None, version: int) -> Claims:
        """The claims of the call's own conversation; those of a key that is of one attempt as they are.

        Raises `RefusalError`: 400 for a name that is none, 409 for a response whose conversation is over, 503 when the store
        cannot say.
        """
        if not claims.session:
            return claims
        try:
            rollout = await self._found(claims, _name_in(scope), previous, body, version)
        except StoreError as error:
            message = f"The store does not say which conversation the call belongs to: {error}. Send it again."
            raise RefusalError(503, "store_failed", message) from error
        return replace(claims, rollout=rollout, attempt=1)

    async def _found(self, claims: Claims, name: str, previous: str | None, body: Body, version: int) -> str:
        before = rollout_of_answer(previous or "")
        if not name and before is not None:
            known = await self._store.get_rollout(before)
            if known is not None and known.run == claims.session:
                if known.status.ended:
                    message = (
                        f"The conversation of response {previous!r} is over, because its feedback was given. Begin a new one: "
                        "send the whole conversation as input."
                    )
                    raise RefusalError(409, "conversation_over", message, [NO_RETRY])
                return before
        for part in count():
            text = orjson.dumps([claims.session, name, part])
            rollout = CONVERSATION_ID + (hashlib.sha256(text).hexdigest()[:32] if name else secrets.token_hex(16))
            known = await self._store.get_rollout(rollout) if name else None
            if known is None or known.status is Status.PENDING:
                await self._begin(rollout, claims, body, version)
                return rollout
            if not known.status.ended:
                return rollout
        raise AssertionError("there is no last part")

    async def _begin(self, rollout: str, claims: Claims, body: Body, version: int) -> None:
        """Create it and take it: its only attempt lasts as long as the key. Others that wait to be taken are taken as well."""
        session, task = claims.session, self._task(body)
        named = {self.resource: version} if self.resource else {}
        new = Rollout(rollout, session, task, f"{session}/{task.id}", version, SERVED, max_attempts=1, resources=named)
        await self._store.create_rollouts([new])
        ttl = max(1.0, claims.expires_at - time.time())
        taken = await self._store.lease(session, f"{session}/server", limit=64, ttl=ttl)
        while not any(lease.rollout.id == rollout for lease in taken):
            known = await self._store.get_rollout(rollout)
            if known is None or known.status is not Status.PENDING:  # another call took it with its own
                return
            taken = await self._store.lease(session, f"{session}/server", limit=64, ttl=ttl)

    def _task(self, body: Body) -> Task:
        """What the conversation begins with; its digest alone where that is long, or texts are not recorded."""
        said: Mapping[str, Json] = {name: body[name] for name in SAID if body.get(name)}
        text = orjson.dumps(said)
        if self._keeps_text and len(text) <= LONGEST_TASK:
            try:
                return Task(redacted_json(said, "task"))
            except DataError:  # nested too deep to be kept
                pass
        return Task({"sha256": hashlib.sha256(text).hexdigest()})


class ConversationsStage(CallStage):
    """A call with the key of a session belongs to the rollout of its conversation."""

    api, after, before = 1, ("branches",), ("history",)
    answers = ("session",)

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._conversations = Conversations(parts.store, keeps_text=parts.config.record_requests)

    async def admitted(self, call: Call, request: Request) -> None:
        """Find or begin the conversation."""
        if not call.claims.session:
            return
        self._conversations.resource = self._parts.resource
        previous, version = call.dialect.continues(request.body), call.policy.version
        call.claims = await self._conversations.of(call.claims, request.scope, request.body, previous, version)
        call.id_mark = mark_of(call.claims.rollout)


def _name_in(scope: Scope) -> str:
    named: bytes = next((value for name, value in scope["headers"] if name == CONVERSATION_HEADER), b"")
    if len(named) > LONGEST_NAME:
        message = f"The header {CONVERSATION_HEADER.decode()} has {len(named)} bytes; use at most {LONGEST_NAME}."
        raise RefusalError(400, "conversation_name_too_long", message)
    return named.decode("latin-1").strip()
