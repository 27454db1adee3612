"""The policy servers behind the gateway, one of which serves a rollout's calls: `Pool` knows which are alive, `Forwarder`
sends a call (it waits out holds, picks the server, and fails over while nothing was answered), and `Watch` ends a call that is
not worth waiting for any longer.

The invariants: a rollout stays with one server while that server is alive (its prefix cache is there). A server that cannot be
reached, or in whose place another one answers, gets no requests until it answers again, and a request waits a while before it
is told that none is. A call is sent with the version noted on it that its server has at that moment, to that server and not to
another in its place, never during a hold, and never again once a server has begun to work on it. A kept connection that ends
before a byte of the answer came tells of a server that had just let go of it and never read the call (RFC 9112, 9.3.1): such a
call is sent once more. Redirects are followed nowhere.

A server that does not show that it is the one that a trainer has named is taken for another. A trainer that is killed takes its
vLLM along, and then the port is anybody's: another run's vLLM may answer there under the same name, with weights of its own. A
vLLM that its trainer has started serves its model under a name that no other start has (`PolicyServer.alias`), so that any
other vLLM refuses each call by itself. In a vLLM that somebody else runs the trainer leaves a word (`PolicyServer.claim`). It
is gone when that vLLM starts again, and is another one as soon as another trainer attaches.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
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
from lightning.gateway.identity import MODEL
from lightning.memory_budget import bounded

if TYPE_CHECKING:
    from lightning.gateway.policy import LiveCall, Policy

log = logging.getLogger(__name__)

CHECK_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
LONGEST_WORD = 1 << 20
"""Bytes of what a server says of itself."""
SHOWN = 3
"""Models of another server that are named."""
GRACE = 30.0
"""Seconds a request waits for a server to come (back) up."""
CHECK_EVERY = 2.0
MISSES = 3
"""Checks in a row that may time out (a busy server answers late) before a server counts as down."""
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
"""Reading has none here: `Watch` looks after servers that fall silent."""
PLAIN = "identity"
"""How answers are encoded: what is packed tells nothing of its size."""
LONGEST_ANSWER = 64 << 20
"""Bytes of an answer that is no stream."""
KEEP_ALIVE = 4.0
"""Seconds an idle connection is kept; below the 5 s after which vLLM's server closes its end."""
LARGE_BODY = 1 << 20
"""From this size on aiohttp wants bodies as a stream."""
MAX_TRIES = 8
MODELS_TIMEOUT = aiohttp.ClientTimeout(total=10.0)
"""For the model list and the tokenizer, which answer at once."""
UNANSWERED = (aiohttp.ClientError, TimeoutError, OSError, UpstreamError)
"""What asking a policy server raises when it does not answer as itself."""


async def strangeness(slot: Slot, session: aiohttp.ClientSession) -> str:
    """What shows that another server answers; empty for the one that was named.

    Raises what aiohttp raises, also for an answer of 500 and above, which tells nothing.
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
    """The answer's JSON; None when it is no answer of this route."""
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
    """The list of objects under a key; empty where there is none."""
    found = answer.get(key) if isinstance(answer, dict) else None
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


@dataclass(frozen=True)
class Upstream:
    """A policy server: its root URL without `/v1`, and the model name that calls carry.

    `claim` is the word by which a server is known that others serve under the same name, too; empty where the name is enough.
    """

    url: str
    model: str
    claim: str = ""


class Found(Enum):
    """What a server that was asked has shown."""

    WELL = "well, and the one that was named"
    LATE = "nothing: it is busy, and what was known of it holds"
    OUT = "that it gets no calls"


@dataclass(slots=True, eq=False)
class Slot:
    """A place for a policy server; the server in it may be replaced, the place (and who is sticky to it) stays. `version` is
    that of the weights that the server has."""

    number: int
    upstream: Upstream
    base: URL
    version: int
    healthy: bool = True
    misses: int = 0
    missed_at: float = 0.0  # monotonic seconds: what was asked before then is no further miss
    asked: bool = False  # whether a check has ended: until then `healthy` is a hope
    other: str = ""  # what shows that another server answers there
    vacant: bool = False  # its server has died, and the one that follows it has not been named yet

    def url(self, path: str) -> URL:
        """The address of a path on this server."""
        return URL(f"{self.base}{path}", encoded=True)


class Pool:
    """The slots, with health checks in the background and a way to wait until one is healthy.

    A server that is named has the weights of `version`. `on_other` is called when another server was found in the place of one
    of them: calls in flight there may be its own.
    """

    def __init__(
        self, upstreams: Sequence[Upstream], grace: float = GRACE, check_every: float = CHECK_EVERY, version: int = 0
    ) -> None:
        self.version = version
        self.slots = self._places(upstreams)
        self.grace, self.check_every = grace, check_every
        self._changed, self._assigned = asyncio.Event(), asyncio.Event()
        self.on_other: Callable[[], object] = lambda: None
        self._out_since: float | None = None  # from when on no request found a server, once that was said

    def assign(self, upstreams: Sequence[Upstream]) -> None:
        """These are the servers now. Of one that was there before its version and its health are known.

        Raises `GatewayError` for what is not a server's address; nothing has changed then.
        """
        if [slot.upstream for slot in self.slots if not slot.vacant] == list(upstreams):
            return
        slots, known = self._places(upstreams), {slot.upstream: slot for slot in self.slots if not slot.vacant}
        for slot in slots:
            if (old := known.get(slot.upstream)) is not None:
                slot.healthy, slot.misses, slot.asked, slot.other = old.healthy, old.misses, old.asked, old.other
                slot.version = old.version
        self.slots = slots
        self._changed.set()
        self._assigned.set()

    def _places(self, upstreams: Sequence[Upstream]) -> list[Slot]:
        return [Slot(number, item, base_url(item), self.version) for number, item in enumerate(upstreams)]

    def updated(self, version: int, server: Upstream | None = None) -> None:
        """This server, or each, has the weights of this version now. Raises `GatewayError` for one that is not there."""
        slots = [slot for slot in self.slots if server in (None, slot.upstream)]
        if server is not None and not slots:
            raise self._unknown(server)
        self.version = version
        for slot in slots:
            slot.version = version

    async def pick(self, rollout: str, *, tried: Sequence[Slot] = ()) -> Slot:
        """The rollout's server, by rendezvous hashing over the healthy ones that were not `tried` yet.

        Waits up to the grace for one. Raises `RefusalError` (503) when none came.
        """
        found = self._choose(rollout, tried)
        if found is not None:
            return found
        try:
            async with asyncio.timeout(self.grace):
                while (found := self._choose(rollout, ())) is None:
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

    def _choose(self, rollout: str, tried: Sequence[Slot]) -> Slot | None:
        candidates = [slot for slot in self.slots if slot.healthy and slot not in tried]
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        return max(candidates, key=lambda slot: score(rollout, slot.number))

    def _say_out(self) -> None:
        """Say that there is no server: once, however many requests find none."""
        if self._out_since is None:
            self._out_since = time.monotonic() - self.grace
            names = ", ".join(slot.upstream.url for slot in self.slots) or "none is known"
            log.warning("no policy server was healthy for %g s: %s", self.grace, names)

    def vacate(self) -> None:
        """Servers that are known by a name of one start are being started again by whoever named them.

        What answers at their addresses is nobody's concern before it is named, by `assign` or `replace`.
        """
        for slot in self.slots:
            if not slot.upstream.claim:
                slot.vacant, slot.healthy, slot.asked = True, False, True

    def replace(self, old: Upstream, new: Upstream) -> None:
        """Put a restarted server, which has the policy's newest weights, in its predecessor's place and let waiting requests go
        to it."""
        for slot in self.slots:
            if slot.upstream == old:
                slot.upstream, slot.base, slot.misses, slot.vacant = new, base_url(new), 0, False
                slot.version = self.version
                self._mark(slot, healthy=True)
                return
        raise self._unknown(old)

    def _unknown(self, server: Upstream) -> GatewayError:
        known = [slot.upstream for slot in self.slots]
        return GatewayError(f"{server} is not one of the gateway's upstreams: {known}")

    def unreachable(self, slot: Slot, why: object) -> None:
        """A request could not reach this server."""
        if slot.healthy:
            log.warning("policy server %s cannot be reached: %s", slot.upstream.url, why)
        self._mark(slot, healthy=False)

    def _found_other(self, slot: Slot, why: str) -> None:
        """What answers is not the server that was named."""
        if not slot.other:
            log.warning(
                "another server answers at %s, where the policy server was: %s. It gets no calls; they wait until the trainer "
                "names a server",
                slot.upstream.url,
                why,
            )
            self.on_other()
        self._mark(slot, healthy=False, other=why)

    @property
    def healthy(self) -> int:
        """How many servers are believed to be up."""
        return sum(slot.healthy for slot in self.slots)

    @property
    def sure(self) -> bool:
        """Whether `healthy` is known: every server was asked, or one is up for sure."""
        return all(slot.asked for slot in self.slots) or any(slot.asked and slot.healthy for slot in self.slots)

    async def watch(self, session: aiohttp.ClientSession) -> None:
        """Check every server's `/health` for ever, new ones at once."""
        while True:
            self._assigned.clear()
            await asyncio.gather(*(self.check(slot, session) for slot in self.slots))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._assigned.wait(), self.check_every)

    async def check(self, slot: Slot, session: aiohttp.ClientSession) -> Found:
        """Ask a server now: whether it is well, and the one that was named."""
        asked, began, other, late, why = slot.upstream, time.monotonic(), "", False, "it does not answer"
        if slot.vacant:
            return Found.OUT
        try:
            async with session.get(slot.url("/health"), timeout=CHECK_TIMEOUT, allow_redirects=False) as answer:
                why = "" if answer.status == 200 else f"/health answered {answer.status}"
            why = why or (other := await strangeness(slot, session))
        except TimeoutError:
            if not why and slot.healthy:
                return Found.LATE  # too busy to say who it is: it loads weights
            late, why = True, f"it did not answer {slot.misses + 1} times"
        except (aiohttp.ClientError, OSError) as error:
            why = str(error)
        # Replaced, maybe at its address, or given up, while the old one was being asked.
        if slot.upstream is not asked or slot.vacant:
            return Found.OUT
        slot.asked = True
        if not late:
            slot.misses = 0
        elif began >= slot.missed_at:  # calls that fail together ask together
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
    """The upstream's root. Raises `GatewayError` for what is not an absolute http URL."""
    root = upstream.url.rstrip("/").removesuffix("/v1")
    url = URL(root)
    if url.scheme not in {"http", "https"} or not url.host:
        raise GatewayError(f"{upstream.url!r} is not a policy server's URL; write it like http://127.0.0.1:8000")
    return url


def score(rollout: str, number: int) -> bytes:
    """Rendezvous weight of a slot for a rollout: adding or losing a server moves only that server's share."""
    return hashlib.blake2b(f"{number}|{rollout}".encode(), digest_size=8).digest()


class Forwarder:
    """One client session for everything, with no limit on connections. The health of a policy's servers is checked from its
    first request on, or from `look_after`."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    def look_after(self, policy: Policy) -> aiohttp.ClientSession:
        """Check the health of a policy's servers from now on. Returns the session, made on the running loop when it is first
        needed."""
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
        """The answer, from its headers on; the caller closes it. Raises `UpstreamError` when a server broke off before.

        Raises `RefusalError` (503) when a hold lasts too long or no server is up.
        """
        loop, gate, pool = asyncio.get_running_loop(), policy.gate, policy.pool
        session = self.look_after(policy)
        tried: list[Slot] = []
        renewed, waited = False, 0.0
        headers = [*headers, ("X-Request-Id", live.request_id)]
        while len(tried) < MAX_TRIES:
            policy.check()
            waited = await gate.wait(waited)
            if policy.seed is not None and body.get("seed") is None:  # known as soon as the gate has been open
                body["seed"] = await draw_seed(policy.seed)
            asked = loop.time()
            try:
                slot = await pool.pick(rollout, tried=tried)
            except RefusalError:
                waited += loop.time() - asked
                if gate.closed:  # a restart is under way, and may take longer than a server is waited for
                    continue
                raise
            policy.check()
            if gate.closed:  # a hold began while this call waited for a server
                continue
            body["model"] = slot.upstream.model
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

    async def is_gone(self, policy: Policy, live: LiveCall) -> bool:
        """Whether the server that a call was sent to is not there any more, or no longer well."""
        if live.slot is None or live.replaced:
            return True
        return await policy.pool.check(live.slot, self.look_after(policy)) is Found.OUT

    async def works(self, policy: Policy, live: LiveCall) -> bool:
        """Whether the engine of the server that a call was sent to turns, so that a silent call of it is still being worked on.

        `/health` tells only that the engine has not died. A method of the worker extension is answered between two steps, so
        its answer shows that one has ended; a vLLM without the extension is believed for its `/health`. While weights are
        loaded there are no steps.
        """
        slot = live.slot
        if slot is None or policy.gate.closed:
            return True
        session = self.look_after(policy)
        if live.replaced or await policy.pool.check(slot, session) is Found.OUT:
            return False
        payload = io.BytesIO(write_object({"method": "lightning_attach", "args": []}))
        try:
            async with session.post(slot.url("/collective_rpc"), data=payload, allow_redirects=False):
                return True
        except (aiohttp.ClientError, OSError):
            return policy.gate.closed

    async def settle(self, policy: Policy, live: LiveCall) -> None:
        """The answer has been read: wait until no update is under way, so that its tokens' versions are known.

        Where they do not become known in time the call is unsure.
        """
        live.waits_for_bytes = False
        policy.check()
        if not await policy.gate.settle(lambda: live.unsure):
            live.unsure = True

    async def models(self, policy: Policy, rollout: str) -> bytes:
        """The model list of the rollout's server. Raises what aiohttp raises, or `RefusalError` (503)."""
        session, slot = self.look_after(policy), await policy.pool.pick(rollout)
        url = slot.url("/v1/models")
        async with session.get(url, timeout=MODELS_TIMEOUT, allow_redirects=False) as response:
            _at_its_place(response).raise_for_status()
            listed = read_object(await read_answer(response))
        cards = [card for card in listed.get("data", []) if card.get("id") == slot.upstream.model]
        if not cards:
            raise UpstreamError(f"it does not serve {slot.upstream.model}")
        return write_object({**listed, "data": [{**card, "id": MODEL} for card in cards]})

    async def tokenize(self, policy: Policy, rollout: str, body: Body) -> tuple[int, bytes]:
        """What vLLM's `/tokenize` says to a prompt: status and body. Raises as `models` does."""
        session, slot = self.look_after(policy), await policy.pool.pick(rollout)
        payload = io.BytesIO(write_object({**body, "model": slot.upstream.model}))
        url = slot.url("/tokenize")
        async with session.post(url, data=payload, timeout=MODELS_TIMEOUT, allow_redirects=False) as response:
            if await _is_anothers(response, policy.pool, slot, session):
                raise UpstreamError("another server answers there")
            return _at_its_place(response).status, await read_answer(response)

    async def close(self) -> None:
        """Close idle connections and those still in use."""
        if self._session is not None:
            await self._session.close()
            self._session = None


@dataclass(slots=True)
class _Connection:
    """What one try was sent over."""

    reused: bool = False


async def _note_reuse(
    session: aiohttp.ClientSession, context: Any, params: aiohttp.TraceConnectionReuseconnParams
) -> None:
    if isinstance(connection := context.trace_request_ctx, _Connection):
        connection.reused = True


async def _is_anothers(
    response: aiohttp.ClientResponse, pool: Pool, slot: Slot, session: aiohttp.ClientSession
) -> bool:
    """Whether an answer is of another server, which has no such model or no such route; then it is closed."""
    if response.status != 404:
        return False
    other = True
    try:
        other = await pool.check(slot, session) is not Found.WELL  # one that is late does not show who it is
    finally:
        if other:
            response.close()
    return other


async def read_answer(response: aiohttp.ClientResponse, cure: str = "") -> bytes:
    """The whole of an answer. Raises `UpstreamError` for one that is too long, with the `cure` if there is one."""
    payload = await bounded(response.content.iter_any(), LONGEST_ANSWER)
    if payload is None:
        why = f"its answer has more than {LONGEST_ANSWER} bytes, or more JSON values than fit in memory"
        raise UpstreamError(f"{why}: {cure}" if cure else why)
    return payload


def _at_its_place(response: aiohttp.ClientResponse) -> aiohttp.ClientResponse:
    """An answer that is no redirect, since a policy server chooses no other, and that can be read as it comes. Raises
    `UpstreamError`."""
    if (encoding := response.headers.get("Content-Encoding", PLAIN).lower()) != PLAIN:
        response.close()
        raise UpstreamError(f"its answer is encoded as {encoding!r:.40}, which was not asked for")
    if 300 <= response.status < 400:
        response.close()
        raise UpstreamError(f"it answered with a redirect ({response.status}), which is not followed")
    return response


def _is_silent_end(error: Exception) -> bool:
    """Whether a connection ended without a byte of the answer."""
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return isinstance(error.message, str)  # else: the beginning of an answer
    return isinstance(error, aiohttp.ClientOSError)


class Watch:
    """Ends a call when the agent hung up, or vLLM fell silent and its engine does not answer.

    `with Watch(receive, call, patience, works): ...` around everything between the request and the end of vLLM's answer. That
    the agent hangs up later it only tells (`agent_is_gone`): the call is being made durable.

    Works like `asyncio.timeout`: it cancels the task from outside and turns that cancellation into its own error. When vLLM
    was silent for `patience` seconds, by `LiveCall.heard_at`, `works` has as long again to say that it works on; then it may
    be silent for another `patience` seconds. There is one timer for a call, which looks
    again when it fires: aiohttp's own read timeout sets a new one for every packet, 5 % of a call's CPU.

    Within the block either of the two cancels what is being awaited at once and ends the block with `ClientGoneError` or
    `UpstreamError`; after the block nothing is cancelled any more.

    Silence alone proves nothing: vLLM sends no byte of an answer that is not streamed before its last token, nor of any call
    that still waits for its turn. Asking for a stream and putting it together would not tell the agent the same: vLLM reads
    tool calls and reasoning by one parser in a stream and by another in a whole answer, and what the model wrote badly comes
    out as arguments of one and as text of the other. So a server that was silent for too long is asked whether its engine
    still works.
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
        """Let the silent server show that it works on, or end the call."""
        heard_at, works = self._call.heard_at, False
        failed = "did not answer when it was asked"
        try:
            async with asyncio.timeout(self._patience):
                works = await self._works()
        except TimeoutError:
            pass
        except Exception as error:  # nobody would look again, and the call would wait for ever
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
        """Whether the agent has hung up. It is listened to until `close`."""
        return self._listener.done()

    def close(self) -> None:
        """Listen no longer."""
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
