"""The policy servers behind the gateway: which are alive, how a call is sent to them, and when a call ends without an answer.

`Pool` knows which servers are alive. `Forwarder` sends a call: it waits for holds, picks the rollout's server, and tries
another server as long as none has begun to answer. `Watch` ends a call that nobody waits for, or whose server is dead.

The invariants: a rollout stays with one server, which has its prefix cache, while that server is alive. A server that cannot be
reached, or in whose place another server answers, gets no requests until it answers again. A request waits for a server for a
while before it is refused. A call is sent to a server only with the version that the server has then, never during a hold, and
never again after a server has begun to work on it. If a kept connection ends before a byte of the answer, the server had closed
it and never read the call (RFC 9112, 9.3.1): the call is sent once more. Redirects are never followed.

A server must show that it is the one that a trainer has named. If a trainer is killed, its vLLM ends too, and another run's
vLLM may answer at the port under the same model name with other weights. Therefore a vLLM that a trainer starts serves its
model under a name that is new at each start (`PolicyServer.alias`), and any other vLLM refuses the calls. In a vLLM that
somebody else runs, the trainer leaves a word (`PolicyServer.claim`). The word is gone after a restart of that vLLM, and is
replaced when another trainer attaches.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson
from starlette.types import Message, Receive
from yarl import URL

from lightning.errors import GatewayError
from lightning.gateway.http import (
    Body,
    ClientGoneError,
    RefusalError,
    UpstreamError,
    UpstreamGoneError,
    read_object,
    write_object,
)
from lightning.gateway.identity import NO_RETRY
from lightning.memory_budget import bounded

if TYPE_CHECKING:
    from lightning.gateway.policy import LiveCall, Policy

log = logging.getLogger(__name__)

CHECK_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
LONGEST_WORD = 1 << 20
"""The most bytes that are read of a server's answer about itself."""
SHOWN = 3
"""The most models of another server that a message names."""
GRACE = 30.0
"""The most seconds that a request waits for a server to come up."""
CHECK_EVERY = 2.0
MISSES = 3
"""How many checks in a row must time out before a server counts as down; a busy server answers late."""
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
"""The timeouts of a call. Reading has none, because `Watch` looks after silent servers."""
PLAIN = "identity"
"""The encoding that answers must have: the size of a compressed answer would be unknown."""
LONGEST_ANSWER = 64 << 20
"""The most bytes of an answer that is not a stream."""
KEEP_ALIVE = 4.0
"""Seconds for which an idle connection is kept: less than the 5 s after which vLLM's server closes it."""
LARGE_BODY = 1 << 20
"""The size from which on aiohttp expects a body as a stream."""
MAX_TRIES = 8
MODELS_TIMEOUT = aiohttp.ClientTimeout(total=10.0)
"""The timeout of the model list and the tokenizer, which answer quickly."""
UNANSWERED = (aiohttp.ClientError, TimeoutError, OSError, UpstreamError)
"""The exceptions of a request to a policy server that does not answer, or does not answer like vLLM."""


async def strangeness(slot: Slot, session: aiohttp.ClientSession) -> str:
    """Return how the server in a slot shows that it is another server than was named; empty if it is the named one.

    Raises aiohttp's errors, also for an answer with a status from 500 on, which shows nothing.
    """
    listed = await _ask(session, "GET", slot, "/v1/models")
    served = [str(card.get("id")) for card in _objects(listed, "data")]
    if slot.upstream.model not in served:
        return f"it serves {', '.join(served[:SHOWN]) or 'no model'} and not {slot.upstream.model}"
    if not slot.upstream.claim:
        return ""
    told = await _ask(session, "POST", slot, "/collective_rpc", {"method": "lightning_attach", "args": []})
    claims = {answer.get("claim") for answer in _objects(told, "results")}
    return "" if claims == {slot.upstream.claim} else "it was started again, or another trainer has attached to it"


async def _ask(
    session: aiohttp.ClientSession, verb: str, slot: Slot, path: str, body: dict[str, object] | None = None
) -> object:
    """Return the JSON of a server's answer; None for an answer that is not JSON or has another status than 200. Raises
    aiohttp's errors, also for a status from 500 on."""
    async with session.request(
        verb,
        slot.url(path),
        data=None if body is None else orjson.dumps(body),
        timeout=CHECK_TIMEOUT,
        allow_redirects=False,
    ) as answer:
        if answer.status >= 500:
            answer.raise_for_status()
        if answer.status != 200:
            return None
        try:
            return orjson.loads(await bounded(answer.content.iter_any(), LONGEST_WORD) or b"")
        except orjson.JSONDecodeError:
            return None


def _objects(answer: object, key: str) -> list[dict[str, object]]:
    """Return the list of objects under a key of an answer; empty if there is none."""
    found = answer.get(key) if isinstance(answer, dict) else None
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


@dataclass(frozen=True)
class Upstream:
    """A policy server: its root URL without `/v1`, and the model name that calls carry.

    `claim` is the word that identifies a server whose model name other servers may have, too; empty if the name is unique.
    `models` are pairs of a policy that answers there and the model name that its calls carry; empty: every policy's calls carry
    `model`.
    """

    url: str
    model: str
    claim: str = ""
    models: tuple[tuple[str, str], ...] = ()

    def model_of(self, policy: str) -> str | None:
        """Return the model name that a policy's calls carry; None if the policy does not answer there."""
        return dict(self.models).get(policy) if self.models else self.model

    def answers(self, policy: str | None) -> bool:
        """Whether a policy answers there; of None, which is any policy, always."""
        return policy is None or self.model_of(policy) is not None


class Found(Enum):
    """The result of a check of a server."""

    WELL = "well, and the one that was named"
    LATE = "nothing: it is busy, and what was known of it holds"
    OUT = "that it gets no calls"


@dataclass(slots=True, eq=False)
class Slot:
    """A place for a policy server. The server may be replaced; the slot, and the rollouts that stay with it, remain. `version`
    is that of the server's weights."""

    number: int
    upstream: Upstream
    base: URL
    version: int
    healthy: bool = True
    misses: int = 0
    missed_at: float = 0.0  # monotonic seconds: a check that began before then is not counted as another miss
    asked: bool = False  # whether a check has ended; before, `healthy` is an assumption
    other: str = ""  # how another server that answers there has shown itself
    vacant: bool = False  # whether its server has died and the next one is not named yet

    def vacate(self) -> None:
        """Mark the slot as vacant, because its server is started again. A server that answers at its address is ignored until
        it is named, by `Pool.assign` or `Pool.replace`."""
        self.vacant, self.healthy, self.asked = True, False, True

    def url(self, path: str) -> URL:
        """Return the address of a path on this server."""
        return URL(f"{self.base}{path}", encoded=True)


class Pool:
    """The slots of a policy's servers. It checks their health in the background and waits for a healthy one.

    A newly named server has the weights of `version`. `on_other` is called with a named server in whose place another one is
    found, because that may be answering calls in flight.
    """

    def __init__(
        self, upstreams: Sequence[Upstream], grace: float = GRACE, check_every: float = CHECK_EVERY, version: int = 0
    ) -> None:
        self.version = version
        self.slots = self._places(upstreams)
        self.grace, self.check_every = grace, check_every
        self._changed, self._assigned = asyncio.Event(), asyncio.Event()
        self.on_other: Callable[[Upstream], object] = lambda server: None
        self._out_since: float | None = None  # since when no request has found a server; None until that is logged

    def assign(self, upstreams: Sequence[Upstream], away: Collection[Upstream] = ()) -> None:
        """Set the servers, of which those that are `away` are started again. A server that was there before keeps its version
        and its health.

        Raises `GatewayError`, and changes nothing, for a URL that is not a server's.
        """
        if [(slot.upstream, slot.vacant) for slot in self.slots] == [(item, item in away) for item in upstreams]:
            return
        slots, known = self._places(upstreams), {slot.upstream: slot for slot in self.slots if not slot.vacant}
        for slot in slots:
            if slot.upstream in away:
                slot.vacate()
            elif (old := known.get(slot.upstream)) is not None:
                slot.healthy, slot.misses, slot.asked, slot.other = old.healthy, old.misses, old.asked, old.other
                slot.version = old.version
        self.slots = slots
        self._changed.set()
        self._assigned.set()

    def _places(self, upstreams: Sequence[Upstream]) -> list[Slot]:
        return [Slot(number, item, base_url(item), self.version) for number, item in enumerate(upstreams)]

    def updated(self, version: int, server: Upstream | None = None) -> None:
        """Note that this server, or with None each server, has the weights of `version`. Raises `GatewayError` for an unknown
        server."""
        slots = self.slots if server is None else [self.slot_of(server)]
        self.version = version
        for slot in slots:
            slot.version = version

    async def pick(
        self, rollout: str, home: int | None = None, *, tried: Sequence[Slot] = (), policy: str | None = None
    ) -> Slot:
        """Return the rollout's server, of the healthy servers where this `policy` answers (None: any) and that were not `tried`
        yet: that in the slot `home`, else one by rendezvous hashing.

        If there is none, wait up to `grace` seconds for a healthy server. Raises `RefusalError`: 503 if none comes up, 404 if
        the policy answers nowhere.
        """
        found = self.choose(rollout, home, tried=tried, policy=policy)
        if found is not None:
            return found
        if self.slots and not any(slot.upstream.answers(policy) for slot in self.slots):
            message = f"No policy server answers for the policy {policy!r} of this run."
            raise RefusalError(404, "no_such_policy", message, [NO_RETRY])
        try:
            async with asyncio.timeout(self.grace):
                while (found := self.choose(rollout, home, policy=policy)) is None:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self._say_out()
            message = (
                f"No policy server has answered for {self.grace:g} s ({len(self.slots)} known). It, or the trainer that "
                "owns it, may be restarting: send the request again. If it stays so, see the policy server's log file."
            )
            raise RefusalError(503, "no_policy_server", message, [(b"retry-after", b"2")]) from None
        return found

    def choose(
        self, rollout: str, home: int | None = None, *, tried: Sequence[Slot] = (), policy: str | None = None
    ) -> Slot | None:
        """Return the server that `pick` returns at once; None if `pick` would wait or raise."""
        well = (slot for slot in self.slots if slot.healthy and slot not in tried)
        candidates = [slot for slot in well if slot.upstream.answers(policy)]
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        at_home = next((slot for slot in candidates if slot.number == home), None)
        return at_home or max(candidates, key=lambda slot: score(rollout, slot.number))

    def _say_out(self) -> None:
        """Log that there is no healthy server, once until one is healthy again."""
        if self._out_since is None:
            self._out_since = time.monotonic() - self.grace
            names = ", ".join(slot.upstream.url for slot in self.slots) or "none is known"
            log.warning("no policy server was healthy for %g s: %s", self.grace, names)

    def replace(self, old: Upstream, new: Upstream, version: int | None = None) -> None:
        """Put the restarted server `new`, which has the weights of `version` (None: the policy's newest), in the slot of `old`,
        and send waiting requests to it. Raises `GatewayError` for an unknown server."""
        slot = self.slot_of(old)
        slot.upstream, slot.base, slot.misses, slot.vacant = new, base_url(new), 0, False
        slot.version = self.version if version is None else version
        self._mark(slot, healthy=True)

    def slot_of(self, server: Upstream) -> Slot:
        """Return the slot of a server. Raises `GatewayError` for an unknown server."""
        for slot in self.slots:
            if slot.upstream == server:
                return slot
        raise GatewayError(f"{server} is not one of the gateway's upstreams: {[slot.upstream for slot in self.slots]}")

    def is_vacant(self, number: int) -> bool:
        """Whether the slot of this number has no server now."""
        return number >= len(self.slots) or self.slots[number].vacant

    def unreachable(self, slot: Slot, why: object) -> None:
        """Mark a server that a request could not reach as not healthy, and log `why`."""
        if slot.healthy:
            log.warning("policy server %s cannot be reached: %s", slot.upstream.url, why)
        self._mark(slot, healthy=False)

    def _found_other(self, slot: Slot, why: str) -> None:
        """Mark a slot in which another server than the named one answers as not healthy, and log `why`."""
        if not slot.other:
            log.warning(
                "another server answers at %s, where the policy server was: %s. It gets no calls; they wait until the trainer "
                "names a server",
                slot.upstream.url,
                why,
            )
            self.on_other(slot.upstream)
        self._mark(slot, healthy=False, other=why)

    @property
    def healthy(self) -> int:
        """The number of servers that seem to be up."""
        return sum(slot.healthy for slot in self.slots)

    @property
    def sure(self) -> bool:
        """Whether `healthy` rests on checks: every server was checked, or a checked one is up."""
        return all(slot.asked for slot in self.slots) or any(slot.asked and slot.healthy for slot in self.slots)

    async def watch(self, session: aiohttp.ClientSession) -> None:
        """Check every server's `/health` again and again; newly assigned servers at once."""
        while True:
            self._assigned.clear()
            await asyncio.gather(*(self.check(slot, session) for slot in self.slots))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._assigned.wait(), self.check_every)

    async def check(self, slot: Slot, session: aiohttp.ClientSession) -> Found:
        """Check now whether the server in a slot is well and is the named one."""
        asked, began, other, late, why = slot.upstream, time.monotonic(), "", False, "it does not answer"
        if slot.vacant:
            return Found.OUT
        try:
            async with session.get(slot.url("/health"), timeout=CHECK_TIMEOUT, allow_redirects=False) as answer:
                why = "" if answer.status == 200 else f"/health answered {answer.status}"
            why = why or (other := await strangeness(slot, session))
        except TimeoutError:
            if not why and slot.healthy:
                return Found.LATE  # too busy to show who it is, because it loads weights
            late, why = True, f"it did not answer {slot.misses + 1} times"
        except (aiohttp.ClientError, OSError) as error:
            why = str(error)
        # The server was replaced, maybe at the same address, or given up during the check.
        if slot.upstream is not asked or slot.vacant:
            return Found.OUT
        slot.asked = True
        if not late:
            slot.misses = 0
        elif began >= slot.missed_at:  # checks of calls that failed together count once
            slot.misses, slot.missed_at = slot.misses + 1, time.monotonic()
        if late and slot.healthy and slot.misses < MISSES:
            return Found.LATE
        if other:
            self._found_other(slot, other)
        elif why:
            self.unreachable(slot, why)
        else:
            self._mark(slot, healthy=True)
        return Found.OUT if why else Found.WELL

    def _mark(self, slot: Slot, *, healthy: bool, other: str = "") -> None:
        if healthy and not slot.healthy:
            log.info("policy server %s is up", slot.upstream.url)
        slot.healthy, slot.other = healthy, other
        if not healthy:
            return
        if self._out_since is not None:
            log.warning("a policy server is healthy again after %.0f s", time.monotonic() - self._out_since)
            self._out_since = None
        self._changed.set()


def base_url(upstream: Upstream) -> URL:
    """Return the root URL of a policy server. Raises `GatewayError` for anything but an absolute http URL."""
    root = upstream.url.rstrip("/").removesuffix("/v1")
    url = URL(root)
    if url.scheme not in {"http", "https"} or not url.host:
        raise GatewayError(f"{upstream.url!r} is not a policy server's URL; write it like http://127.0.0.1:8000")
    return url


def score(rollout: str, number: int) -> bytes:
    """Return the rendezvous weight of a slot for a rollout. A server that is added or lost moves only its share of rollouts."""
    return hashlib.blake2b(f"{number}|{rollout}".encode(), digest_size=8).digest()


class Forwarder:
    """Sends requests to policy servers, over one client session without a limit of connections. The health of a policy's
    servers is checked from its first request on, or from `look_after` on."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    def look_after(self, policy: Policy) -> aiohttp.ClientSession:
        """Check the health of a policy's servers from now on. Return the client session; the first call makes it on the running
        loop."""
        if self._session is None:
            watching = aiohttp.TraceConfig()
            watching.on_connection_reuseconn.append(_note_reuse)
            self._session = aiohttp.ClientSession(
                trace_configs=[watching],
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=TIMEOUT,
                headers={"Content-Type": "application/json", "Accept-Encoding": PLAIN},
                auto_decompress=False,
            )
        policy.check_health(self._session)
        return self._session

    async def send(
        self,
        policy: Policy,
        rollout: str,
        path: str,
        body: Body,
        headers: list[tuple[str, str]],
        live: LiveCall,
        draw_seed: Callable[[int], Awaitable[int]],
    ) -> aiohttp.ClientResponse:
        """Send a call and return the answer when its headers have come; the caller closes it.

        Raises `UpstreamError` if a server breaks off before, and `RefusalError` if a hold lasts too long or no server is up
        (503) or no server can be reached (502).
        """
        loop, pool, session = asyncio.get_running_loop(), policy.pool, self.look_after(policy)
        tried: list[Slot] = []
        renewed = False
        headers = [*headers, ("X-Request-Id", live.request_id)]
        policy.check()
        waited = await policy.gate.wait(0.0)
        if policy.seed is not None and body.get("seed") is None:  # the seed is known once the gate has been open
            body["seed"] = await draw_seed(policy.seed)
        while len(tried) < MAX_TRIES:
            slot, waited = await self._open_server(policy, rollout, live, tried, waited)
            body["model"] = slot.upstream.model_of(live.policy)
            payload, url, connection = write_object(body), slot.url(f"/v1{path}"), _Connection()
            data = payload if len(payload) < LARGE_BODY else io.BytesIO(payload)
            live.dispatch(slot, loop.time())
            try:
                response = await session.post(
                    url, data=data, headers=headers, allow_redirects=False, trace_request_ctx=connection
                )
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                live.retract()
                pool.unreachable(slot, error)
                tried.append(slot)
                continue
            except (aiohttp.ClientError, OSError) as error:
                if connection.reused and not renewed and _is_silent_end(error):
                    live.retract()
                    renewed = True
                    continue
                raise UpstreamGoneError(f"its connection was lost before it answered ({error!r})") from error
            if not await _is_anothers(response, pool, slot, session):
                return _at_its_place(response)
            live.retract()
            tried.append(slot)
        message = f"Connecting to a policy server failed {len(tried)} times in a row; see the policy server's log file."
        raise RefusalError(502, "upstream_unreachable", message)

    async def _open_server(
        self, policy: Policy, rollout: str, live: LiveCall, tried: Sequence[Slot], waited: float
    ) -> tuple[Slot, float]:
        """Return the server that gets a call, when no hold is in its way, and the seconds for which the call has `waited` for
        holds. Until the caller awaits anything, no hold begins. Raises `RefusalError` (503)."""
        loop, gate, pool = asyncio.get_running_loop(), policy.gate, policy.pool
        while True:
            policy.check()
            waited = await gate.wait(waited)
            asked = loop.time()
            try:
                slot = await pool.pick(rollout, live.home, tried=tried, policy=live.policy)
            except RefusalError:
                waited += loop.time() - asked
                # A restart is under way, which may take longer than `grace`.
                if gate.closed or (gate.held and waited < gate.timeout):
                    continue
                raise
            policy.check()
            if not gate.closes(slot.number):
                return slot, waited
            # It is being updated, and the rollout stays with it unless it dies.
            waited = await gate.wait(waited, slot.number, partial(pool.is_vacant, slot.number))

    async def is_gone(self, policy: Policy, live: LiveCall) -> bool:
        """Return whether the server to which a call was sent is gone or no longer well."""
        if live.slot is None or live.replaced:
            return True
        return await policy.pool.check(live.slot, self.look_after(policy)) is Found.OUT

    async def works(self, policy: Policy, live: LiveCall) -> bool:
        """Return whether the engine of a call's server still makes steps, so that a call without new bytes is still worked on.

        `/health` tells only that the engine has not died. A method of the worker extension is answered between two steps, so
        its answer shows that a step has ended. For a vLLM without the extension `/health` is enough. While weights are loaded
        there are no steps, and the result is True.
        """
        slot = live.slot
        if slot is None or policy.gate.closes(slot.number):
            return True
        session = self.look_after(policy)
        if live.replaced or await policy.pool.check(slot, session) is Found.OUT:
            return False
        payload = io.BytesIO(write_object({"method": "lightning_attach", "args": []}))
        try:
            async with session.post(slot.url("/collective_rpc"), data=payload, allow_redirects=False):
                return True
        except (aiohttp.ClientError, OSError):
            return policy.gate.closes(slot.number)

    async def settle(self, policy: Policy, live: LiveCall) -> None:
        """Wait, after the answer was read, until no update of its server is under way, so that the versions of its tokens are
        known.

        Mark the call as unsure if they do not become known in time.
        """
        live.waits_for_bytes = False
        policy.check()
        slot = None if live.slot is None else live.slot.number
        if not await policy.gate.settle(lambda: live.unsure, slot):
            live.unsure = True

    async def models(self, policy: Policy, rollout: str, names: Mapping[str, str]) -> bytes:
        """Return a list of models with these `names`, each with the policy that answers it (empty: any). A name has the fields
        of its server's model, also where adapters answer: vLLM knows no context of these. It has none while its server is
        down, as long as another one is well: programs ask for the list when they start. Raises aiohttp's errors,
        `UpstreamError`, and `RefusalError` (503; 404 for a policy that answers nowhere)."""
        session, pool, lists = self.look_after(policy), policy.pool, dict[Upstream, Body]()
        slots = {name: pool.choose(rollout, policy=of or None) for name, of in names.items()}
        if not any(slots.values()):
            first = next(iter(names))
            slots[first] = await pool.pick(rollout, policy=names[first] or None)
        cards: list[Body] = []
        for name, slot in slots.items():
            card: Body = {"object": "model"}
            if slot is not None:
                server = slot.upstream
                if server not in lists:
                    lists[server] = await self._listed(session, slot)
                found = [one for one in lists[server].get("data", []) if one.get("id") == server.model]
                if not found:
                    raise UpstreamError(f"it does not serve {server.model}")
                card = found[0]
            cards.append({**card, "id": name})
        return write_object({"object": "list", **next(iter(lists.values()), {}), "data": cards})

    async def _listed(self, session: aiohttp.ClientSession, slot: Slot) -> Body:
        """Return a server's own list of models."""
        url = slot.url("/v1/models")
        async with session.get(url, timeout=MODELS_TIMEOUT, allow_redirects=False) as response:
            _at_its_place(response).raise_for_status()
            return read_object(await read_answer(response))

    async def tokenize(self, policy: Policy, rollout: str, name: str | None, body: Body) -> tuple[int, bytes]:
        """Return the status and the body of vLLM's `/tokenize` for a prompt, from a server of the policy with this name (None:
        any), whose model may have a tokenizer of its own. Raises the same errors as `models`."""
        session, slot = self.look_after(policy), await policy.pool.pick(rollout, policy=name)
        payload = io.BytesIO(write_object({**body, "model": slot.upstream.model}))
        url = slot.url("/tokenize")
        async with session.post(url, data=payload, timeout=MODELS_TIMEOUT, allow_redirects=False) as response:
            if await _is_anothers(response, policy.pool, slot, session):
                raise UpstreamError("another server answers there")
            return _at_its_place(response).status, await read_answer(response)

    async def close(self) -> None:
        """Close all connections, also those in use."""
        if self._session is not None:
            await self._session.close()
            self._session = None


@dataclass(slots=True)
class _Connection:
    """The connection of one try: whether it was used before."""

    reused: bool = False


async def _note_reuse(
    session: aiohttp.ClientSession, context: Any, params: aiohttp.TraceConnectionReuseconnParams
) -> None:
    if isinstance(connection := context.trace_request_ctx, _Connection):
        connection.reused = True


async def _is_anothers(
    response: aiohttp.ClientResponse, pool: Pool, slot: Slot, session: aiohttp.ClientSession
) -> bool:
    """Return whether an answer (404) came from another server, which does not have the model or the route. Such an answer is
    closed."""
    if response.status != 404:
        return False
    other = True
    try:
        other = await pool.check(slot, session) is not Found.WELL  # a late server does not show who it is
    finally:
        if other:
            response.close()
    return other


async def read_answer(response: aiohttp.ClientResponse, cure: str = "") -> bytes:
    """Return the body of an answer. Raises `UpstreamError`, with the `cure` if there is one, for an answer that is too long."""
    payload = await bounded(response.content.iter_any(), LONGEST_ANSWER)
    if payload is None:
        why = f"its answer has more than {LONGEST_ANSWER} bytes, or more JSON values than fit in memory"
        raise UpstreamError(f"{why}: {cure}" if cure else why)
    return payload


def _at_its_place(response: aiohttp.ClientResponse) -> aiohttp.ClientResponse:
    """Return an answer unchanged. Raises `UpstreamError` for a redirect, which a policy server must not send, and for a
    compressed answer."""
    if (encoding := response.headers.get("Content-Encoding", PLAIN).lower()) != PLAIN:
        response.close()
        raise UpstreamError(f"its answer is encoded as {encoding!r:.40}, which was not asked for")
    if 300 <= response.status < 400:
        response.close()
        raise UpstreamError(f"it answered with a redirect ({response.status}), which is not followed")
    return response


def _is_silent_end(error: Exception) -> bool:
    """Return whether a connection ended before the first byte of the answer."""
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return isinstance(error.message, str)  # else: the beginning of an answer
    return isinstance(error, aiohttp.ClientOSError)


class Watch:
    """Ends a call if the agent hangs up, or if vLLM sends no bytes and its engine does not work.

    Use `with Watch(receive, call, patience, works): ...` around everything between the request and the end of vLLM's answer. In
    the block a hang-up or a dead engine cancels the task at once, and the block raises `ClientGoneError` or `UpstreamError`, as
    `asyncio.timeout` raises its error. Behind the block nothing is cancelled, because the call is being made durable; a hang-up
    is only noted (`agent_is_gone`).

    If vLLM has sent nothing for `patience` seconds since `LiveCall.heard_at`, `works` is asked and has `patience` seconds to
    return True; then vLLM may be silent for `patience` seconds again. A call has one timer, which looks again when it fires:
    aiohttp's read timeout would set a new one for every packet, which takes 5 % of a call's CPU.

    Silence alone proves nothing. vLLM sends no byte of a whole answer before its last token, and no byte of a call that waits
    for its turn. To ask for a stream and join it would change answers: vLLM parses tool calls and reasoning differently in
    streams, so that malformed text of the model becomes arguments in one and text in the other. Therefore a silent server is
    asked whether its engine works.
    """

    def __init__(self, receive: Receive, call: LiveCall, patience: float, works: Callable[[], Awaitable[bool]]) -> None:
        self._receive, self._call, self._patience, self._works = receive, call, patience, works
        self._asking: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._over = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = task.get_loop()
        self._listener: asyncio.Future[Message] = asyncio.ensure_future(self._receive())
        self._listener.add_done_callback(self._heard_agent)
        self._timer = self._loop.call_later(self._patience, self._look)

    def _heard_agent(self, listener: asyncio.Future[Message]) -> None:
        if self._over or listener.cancelled():
            return
        if listener.exception() is not None or listener.result()["type"] == "http.disconnect":
            self._end(ClientGoneError())

    def _look(self) -> None:
        silent = self._loop.time() - self._call.heard_at if self._call.waits_for_bytes else 0.0
        if silent >= self._patience:
            self._asking = self._loop.create_task(self._ask())
        else:
            self._timer = self._loop.call_later(self._patience - silent, self._look)

    async def _ask(self) -> None:
        """Ask the silent server whether it works on the call, and end the call if it does not."""
        heard_at, works = self._call.heard_at, False
        failed = "did not answer when it was asked"
        try:
            async with asyncio.timeout(self._patience):
                works = await self._works()
        except TimeoutError:
            pass
        except Exception as error:  # otherwise no timer would be left, and the call would wait for ever
            log.exception("whether the engine of a silent call works could not be asked")
            failed = f"could not be asked ({type(error).__name__})"
        if self._over:
            return
        if works:
            self._call.heard_at = self._loop.time()
        if works or self._call.heard_at != heard_at or not self._call.waits_for_bytes:
            self._look()
            return
        silent = f"no byte came for {self._patience:g} s (gateway.upstream_timeout)"
        self._end(UpstreamError(f"{silent}, and its engine {failed}"))

    @property
    def agent_is_gone(self) -> bool:
        """Whether the agent has hung up, which is noticed until `close`."""
        return self._listener.done()

    def close(self) -> None:
        """Stop noticing whether the agent hangs up."""
        self._listener.cancel()

    def _end(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()
        if self._error is not None and self._task.uncancel() == 0 and isinstance(error, asyncio.CancelledError):
            raise self._error from error
