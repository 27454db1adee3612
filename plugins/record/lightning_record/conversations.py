"""Conversations: which one a call of a served model belongs to, whose key is of a session, in which each conversation is a
rollout; and what `previous_response_id` refers to, the chat messages up to the end of a response.

The invariants: the id of an answer says which conversation it is of, so that any server over the store finds it again, after a
restart too. Conversations are told apart by what the client says of them (a header, `previous_response_id`), never by time or
text; a call that says nothing is a conversation of its own.

An attempt sees its own responses only, and each that it was given is found by every gateway over the store, but for those that
may not be stored. What is kept in memory never exceeds a fixed number of bytes: the attempts used least recently go first, and
are found in the store. A response is stored as what it adds to an earlier one of its attempt, in the row of its call: an agent
that sends its whole conversation with every call, as most do, would otherwise store all of it each time.
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
from lightning.redaction import redacted_json, storable
from lightning.store.protocol import Store
from lightning.types import CONVERSATION_ID, SERVED, CallStatus, Conversation, Json, Rollout, Status, Task, Transition
from starlette.types import Scope

from lightning_record.conversation import CONVERSATION, conversation_in, pack
from lightning_record.texts import well_shaped

if TYPE_CHECKING:
    from lightning.gateway.call import Answer, Call, Request
    from lightning.gateway.calls import Parts

log = logging.getLogger(__name__)

CONVERSATION_HEADER = b"x-lightning-conversation"
"""Names the conversation that a call belongs to: any text of its client's choice."""
LONGEST_NAME = 512
LONGEST_TASK = 65_536
"""Bytes of a request that are kept as the task of a conversation."""
SAID = ("messages", "system", "instructions", "input", "prompt")
"""Where the APIs have what the client says."""
_OF_ANSWER = re.compile(r"s([0-9a-f]{32})r[0-9a-f]+\Z")
MOST_BYTES = 64 << 20
NODE_BYTES = 200
"""What a message takes besides its text."""
SHORT = 16 * 1024
"""Bytes of text up to which it is looked through where the calls are answered, since that takes less than a thread."""
MANY_MESSAGES = 1000
"""Messages from which on it does."""
LONGEST_STORED = 1 << 20
"""Bytes of text that a response may add to a stored conversation: looking through more takes seconds of CPU time."""
Attempt = tuple[str, int]
"""Rollout and number."""


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
    answers = only_for = ("session",)

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._conversations = Conversations(parts.store, keeps_text=parts.config.record_requests)

    async def admitted(self, call: Call, request: Request) -> None:
        """Find or begin the conversation."""
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
    """A response that is to be kept: its conversation message by message, and what of it goes into the store."""

    attempt: Attempt
    id: str
    said: tuple[bytes, ...]
    stored: Conversation | None


@dataclass(slots=True, eq=False)
class Known:
    """The conversations of an attempt as a tree: a node is a message after those before it, node 0 the empty conversation.

    `owners` are responses that the store has and whose conversations lead through a node; empty where there is none. `barred`
    are the ends of conversations that may not be stored, and so no longer one may.
    """

    nodes: dict[tuple[int, bytes], int] = field(default_factory=dict)
    messages: list[bytes] = field(default_factory=lambda: [b""])
    before: list[int] = field(default_factory=lambda: [0])
    owners: list[str] = field(default_factory=lambda: [""])
    ends: dict[str, int] = field(default_factory=dict)
    barred: set[int] = field(default_factory=set)
    size: int = 0

    def is_barred(self, said: Sequence[bytes]) -> bool:
        """Whether it is known that a conversation may not be stored."""
        at = 0
        for message in said if self.barred else ():
            at = self.nodes.get((at, message), -1)
            if at in self.barred:
                return True
        return False

    def shared(self, said: Sequence[bytes]) -> tuple[str, int]:
        """A stored response that begins as this conversation does, and for how many messages; the one with the most."""
        at, owner, kept = 0, "", 0
        for message in said:
            at = self.nodes.get((at, message), 0)
            if not self.owners[at]:
                break
            owner, kept = self.owners[at], kept + 1
        return owner, kept

    def add(self, response: str, said: Sequence[bytes], *, stored: bool) -> None:
        """Keep a conversation under the response that ends it."""
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
        """The messages up to the end of a response; None for one that is not known here."""
        at = self.ends.get(response)
        if at is None:
            return None
        said: list[Body] = []
        while at:
            said.append(read_object(self.messages[at]))
            at = self.before[at]
        return said[::-1]


class History:
    """The conversations of all attempts: in memory those used last, in the store all."""

    def __init__(self, store: Store, most_bytes: int = MOST_BYTES) -> None:
        self._store, self._most = store, most_bytes
        self._attempts: OrderedDict[Attempt, Known] = OrderedDict()
        self._bytes = 0
        # Not the loop's own threads: agents of the inline runner may hold all of them, and wait for this answer.
        self._threads = ThreadPoolExecutor(1, "lightning-redact")

    def close(self) -> None:
        """Let go of the thread."""
        self._threads.shutdown(wait=False)

    async def before(self, attempt: Attempt, response: str) -> list[Body]:
        """The messages up to the end of a response. Raises `RefusalError`: 404 for one that the attempt has not, 503 when the
        store cannot tell."""
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
        """What is to be stored with the call that made a response, and to be kept once it is."""
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
        """The call is durable."""
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
    """A request that goes on with an earlier response is sent with the messages up to that one."""

    api, after, before = 1, ("conversations",), ("texts",)

    def __init__(self, parts: Parts) -> None:
        self._history = History(parts.store)
        parts.closing.callback(self._history.close)
        self._entries: WeakKeyDictionary[Call, Entry] = WeakKeyDictionary()

    async def admitted(self, call: Call, request: Request) -> None:
        """Find the messages before the request."""
        if (previous := call.dialect.continues(request.body)) is not None:
            call.before = await self._history.before(call.lineage or call.attempt, previous)

    async def settled(self, call: Call, answer: Answer) -> None:
        """What later requests may go on with is stored with the call."""
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
        """Later requests may go on with it."""
        if (entry := self._entries.pop(call, None)) is not None:
            self._history.keep(entry)


def _written(messages: Sequence[Body]) -> tuple[bytes, ...]:
    return tuple(compact(write_object(message)) for message in messages)


def put_together(calls: Sequence[Transition], response: str) -> list[Body] | None:
    """The conversation of a response, from what it and those before it have added; None when one of them is not stored."""
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
