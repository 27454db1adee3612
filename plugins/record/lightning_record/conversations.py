"""Two stages about conversations. One assigns each call of a served model to its conversation: the call's key belongs to a
session, and each conversation of a session is a rollout. The other finds the chat messages that `previous_response_id` means.

The invariants: the id of an answer names its conversation, so that any server with the same store finds it, also after a
restart. Only the client's words assign a call to a conversation (a header, `previous_response_id`), never time or text; a call
without either is a conversation of its own.

An attempt sees only its own responses. Every gateway with the same store finds them, except those that may not be stored.
Memory is bounded: the attempts used least recently are dropped first, and are then read from the store. A response is stored,
with its call, as what it adds to an earlier one of its attempt, because most agents send their whole conversation with every
call.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import orjson
from lightning.errors import DataError, StoreError
from lightning.gateway.http import Body, RefusalError, read_object, write_object
from lightning.gateway.identity import NO_RETRY, Claims
from lightning.gateway.stages import CallStage
from lightning.memory_budget import compact
from lightning.redaction import redacted_json
from lightning.store.protocol import Store
from lightning.types import CONVERSATION_ID, SERVED, CallStatus, Conversation, Json, Rollout, Status, Task, Transition
from starlette.types import Scope

from lightning_record.config import RecordConfig
from lightning_record.conversation import CONVERSATION, conversation_in, pack, storable
from lightning_record.texts import well_shaped

if TYPE_CHECKING:
    from lightning.gateway.call import Answer, Call, Request
    from lightning.gateway.calls import Parts

log = logging.getLogger(__name__)

CONVERSATION_HEADER = b"x-lightning-conversation"
"""The request header that names a call's conversation, with any text of the client's choice."""
LONGEST_NAME = 512
LONGEST_TASK = 65_536
"""Most bytes of a first request that are kept as the task of its conversation; of a longer one its digest is kept."""
SAID = ("messages", "system", "instructions", "input", "prompt")
"""The fields of requests, in all APIs, that have the client's messages."""
_OF_ANSWER = re.compile(r"s([0-9a-f]{32})r[0-9a-f]+\Z")
MOST_BYTES = 64 << 20
NODE_BYTES = 200
"""Estimated bytes of memory that a message takes besides its text."""
SHORT = 16 * 1024
"""Up to this many bytes, new text is checked for credentials in the event loop, which is faster than in a thread."""
MANY_MESSAGES = 1000
"""Conversations with more messages than this are encoded in a thread."""
LONGEST_STORED = 1 << 20
"""Most bytes of text that a response may add to a stored conversation: checking more for credentials takes seconds of CPU."""
Attempt = tuple[str, int]
"""An attempt: the rollout's id and the attempt's number."""


def rollout_of_answer(response: str) -> str | None:
    """Return the id of the rollout (conversation) that an answer's id names; None for the id of any other call."""
    found = _OF_ANSWER.search(response)
    return CONVERSATION_ID + found.group(1) if found else None


def mark_of(rollout: str) -> str:
    """Return the prefix of the ids of a conversation's answers; empty for any other rollout."""
    return f"s{rollout.removeprefix(CONVERSATION_ID)}r" if rollout.startswith(CONVERSATION_ID) else ""


class Conversations:
    """Finds or creates the rollout of a call's conversation. `keeps_text` is the setting `gateway.record_requests`.

    `resource` is the name of the weights that the policy's version belongs to, so that rewards can be compared by version;
    empty if the policy is not a stored resource.
    """

    def __init__(self, store: Store, *, keeps_text: bool) -> None:
        self._store, self._keeps_text = store, keeps_text
        self.resource = ""

    async def of(self, claims: Claims, scope: Scope, body: Body, previous: str | None, version: int) -> Claims:
        """Return the claims with the rollout of the call's conversation. The claims of an attempt's key stay as they are.

        Raises `RefusalError`: 400 for a name that is too long, 409 for a `previous` response whose conversation has ended, 503
        if the store fails.
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
        """Create the rollout and lease it; its only attempt lasts as long as the key. Leasing may also take other conversations
        of the session that wait for it."""
        session, task = claims.session, self._task(body)
        named = {self.resource: version} if self.resource else {}
        new = Rollout(rollout, session, task, f"{session}/{task.id}", version, SERVED, max_attempts=1, resources=named)
        await self._store.create_rollouts([new])
        ttl = max(1.0, claims.expires_at - time.time())
        taken = await self._store.lease(session, f"{session}/server", limit=64, ttl=ttl)
        while not any(lease.rollout.id == rollout for lease in taken):
            known = await self._store.get_rollout(rollout)
            if known is None or known.status is not Status.PENDING:  # another call has leased it
                return
            taken = await self._store.lease(session, f"{session}/server", limit=64, ttl=ttl)

    def _task(self, body: Body) -> Task:
        """Return the conversation's first request as its task; only a digest of it if it is long or texts are not recorded."""
        said: Mapping[str, Json] = {name: body[name] for name in SAID if body.get(name)}
        text = orjson.dumps(said)
        if self._keeps_text and len(text) <= LONGEST_TASK:
            try:
                return Task(redacted_json(said, "task"))
            except DataError:  # nested too deep to be kept
                pass
        return Task({"sha256": hashlib.sha256(text).hexdigest()})


class ConversationsStage(CallStage):
    """The call stage that assigns a call with a session's key to the rollout of its conversation."""

    api, after, before = 1, ("branches",), ("history",)
    answers = only_for = ("session",)

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._conversations = Conversations(parts.store, keeps_text=RecordConfig.of(parts.config).record_requests)

    async def admitted(self, call: Call, request: Request) -> None:
        """Set the call's claims to those of its conversation, which is created if it is new."""
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


@dataclass(frozen=True, slots=True)
class Entry:
    """A response to remember: its conversation, message by message as JSON, and the part to store (None: nothing)."""

    attempt: Attempt
    id: str
    said: tuple[bytes, ...]
    stored: Conversation | None


@dataclass(slots=True, eq=False)
class Known:
    """The conversations of an attempt as a prefix tree of messages. Node 0 is the empty conversation; `messages[i]` and
    `before[i]` are the message and the parent of node i; `ends` has the last node of each response.

    `owners[i]` is a stored response whose conversation goes through node i; empty if there is none. `barred` are the last nodes
    of conversations that may not be stored; a longer conversation through one of them may not be stored, either.
    """

    nodes: dict[tuple[int, bytes], int] = field(default_factory=dict)
    messages: list[bytes] = field(default_factory=lambda: [b""])
    before: list[int] = field(default_factory=lambda: [0])
    owners: list[str] = field(default_factory=lambda: [""])
    ends: dict[str, int] = field(default_factory=dict)
    barred: set[int] = field(default_factory=set)
    size: int = 0

    def is_barred(self, said: Sequence[bytes]) -> bool:
        """Return whether a conversation begins with one that may not be stored."""
        at = 0
        for message in said if self.barred else ():
            at = self.nodes.get((at, message), -1)
            if at in self.barred:
                return True
        return False

    def shared(self, said: Sequence[bytes]) -> tuple[str, int]:
        """Find the stored response that shares most messages with the beginning of this conversation, and their number."""
        at, owner, kept = 0, "", 0
        for message in said:
            at = self.nodes.get((at, message), 0)
            if not self.owners[at]:
                break
            owner, kept = self.owners[at], kept + 1
        return owner, kept

    def add(self, response: str, said: Sequence[bytes], *, stored: bool) -> None:
        """Add a conversation under the id of its last response."""
        at = 0
        for message in said:
            found = self.nodes.get((at, message))
            if found is None:
                found = self.nodes[at, message] = len(self.messages)
                self.messages.append(message)
                self.before.append(at)
                self.owners.append("")
                self.size += len(message) + NODE_BYTES
            at = found
            if stored:
                self.owners[at] = self.owners[at] or response
        self.ends[response] = at
        if not stored:
            self.barred.add(at)

    def conversation(self, response: str) -> list[Body] | None:
        """Return the messages up to and with a response; None if it is not known here."""
        at = self.ends.get(response)
        if at is None:
            return None
        said: list[Body] = []
        while at:
            said.append(read_object(self.messages[at]))
            at = self.before[at]
        return said[::-1]


class History:
    """The conversations of all attempts: the recently used ones in memory, all in the store."""

    def __init__(self, store: Store, most_bytes: int = MOST_BYTES) -> None:
        self._store, self._most = store, most_bytes
        self._attempts: OrderedDict[Attempt, Known] = OrderedDict()
        self._bytes = 0
        # Not the loop's own threads: agents of the inline runner may occupy all of them while they wait for this answer.
        self._threads = ThreadPoolExecutor(1, "lightning-redact")

    def close(self) -> None:
        """Stop the thread."""
        self._threads.shutdown(wait=False)

    async def before(self, attempt: Attempt, response: str) -> list[Body]:
        """Return the messages up to and with a response of an attempt. Raises `RefusalError`: 404 if the attempt has no such
        response, 503 if the store fails."""
        known = self._attempts.get(attempt)
        said = None if known is None else known.conversation(response)
        if said is not None:
            self._attempts.move_to_end(attempt)
            return said
        try:
            said = put_together(await self._store.transitions(*attempt), response)
        except StoreError as error:
            message = (
                f"The store does not say what was said before response {response!r}: {error}. Send the call again."
            )
            raise RefusalError(503, "store_failed", message) from error
        if said is None:
            message = (
                f"Response {response!r} is not known: it was not made by this attempt, had 'store': false, or its conversation "
                "has a text that may not be stored, such as a credential, and this server has not made it or keeps it no "
                "longer. Send the whole conversation as input instead."
            )
            raise RefusalError(404, "previous_response_not_found", message, param="previous_response_id")
        self._keep(attempt, response, _written(said), stored=True)
        return said

    async def entry(self, attempt: Attempt, response: str, messages: Sequence[Body]) -> Entry:
        """Prepare what to store with the call that made a response, and to `keep` after the call is stored."""
        loop = asyncio.get_running_loop()
        said = (
            _written(messages)
            if len(messages) <= MANY_MESSAGES
            else await loop.run_in_executor(self._threads, _written, messages)
        )
        known = self._attempts.get(attempt)
        if known is not None and known.is_barred(said):
            return Entry(attempt, response, said, None)
        after, kept = ("", 0) if known is None else known.shared(said)
        added = Conversation(tuple(messages[kept:]), after, kept)
        size = sum(map(len, said[kept:]))
        stored: Conversation | None = None
        if size <= SHORT:
            stored = storable(added)
        elif size <= LONGEST_STORED:
            stored = await loop.run_in_executor(self._threads, storable, added)
        if stored is None:
            log.info(
                "response %s is known to this gateway only: its conversation has a text that is not stored as it is, "
                "or it adds more than %d bytes",
                response,
                LONGEST_STORED,
            )
        return Entry(attempt, response, said, stored)

    def keep(self, entry: Entry) -> None:
        """Remember a response whose call is now durable."""
        self._keep(entry.attempt, entry.id, entry.said, stored=entry.stored is not None)

    def _keep(self, attempt: Attempt, response: str, said: Sequence[bytes], *, stored: bool) -> None:
        known = self._attempts.setdefault(attempt, Known())
        self._attempts.move_to_end(attempt)
        size = known.size
        known.add(response, said, stored=stored)
        self._bytes += known.size - size
        while self._bytes > self._most:
            self._bytes -= self._attempts.popitem(last=False)[1].size


class HistoryStage(CallStage):
    """The call stage for `previous_response_id`: it adds the messages up to that response to a request."""

    api, after, before = 1, ("conversations",), ("texts",)

    def __init__(self, parts: Parts) -> None:
        self._history = History(parts.store)
        parts.closing.callback(self._history.close)
        self._entries: WeakKeyDictionary[Call, Entry] = WeakKeyDictionary()

    async def admitted(self, call: Call, request: Request) -> None:
        """Find the messages before a request that continues an earlier response."""
        if (previous := call.dialect.continues(request.body)) is not None:
            call.before = await self._history.before(call.lineage or call.attempt, previous)

    async def settled(self, call: Call, answer: Answer) -> None:
        """Add the conversation of a finished answer to the call's extras, so that later requests can continue it."""
        self._entries.pop(call, None)
        is_answered = answer.status and answer.outcome is CallStatus.OK
        said = (
            well_shaped(call.sent.translator.conversation) if call.sent.translator is not None and is_answered else None
        )
        if said is not None:
            self._entries[call] = entry = await self._history.entry(call.attempt, call.capture.id, said)
            if entry.stored is not None:
                call.extras[CONVERSATION] = pack(entry.stored)

    async def kept(self, call: Call, transitions: Sequence[Transition]) -> None:
        """Remember the conversation of a stored call."""
        if (entry := self._entries.pop(call, None)) is not None:
            self._history.keep(entry)


def _written(messages: Sequence[Body]) -> tuple[bytes, ...]:
    return tuple(compact(write_object(message)) for message in messages)


def put_together(calls: Sequence[Transition], response: str) -> list[Body] | None:
    """Rebuild the conversation of a response from what it and the responses before it added; None if one is not stored."""
    if not response:
        return None
    stored = {call.id: call for call in calls}
    chain: list[Conversation] = []
    while response:
        call = stored.pop(response, None)
        added = None if call is None else conversation_in(call)
        if added is None:
            return None
        chain.append(added)
        response = added.after
    messages: list[Body] = []
    for added in reversed(chain):
        messages[added.kept :] = cast("tuple[Body, ...]", added.messages)
    return messages
