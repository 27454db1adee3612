"""Sends a call to a policy server: waits out holds, picks the server, fails over while nothing was answered, and ends a call
that is not worth waiting for any longer.

The invariant: a call is sent with the version noted on it that its server has at that moment, to that server and not to another
in its place, never during a hold, and never again once a server has begun to work on it. A kept connection
that ends before a byte of the answer came tells of a server that had just let go of it and never read the call (RFC 9112,
9.3.1): such a call is sent once more.
"""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp
from starlette.types import Message, Receive

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
from lightning.gateway.policy import LiveCall, Policy
from lightning.gateway.upstream.servers import Found, Pool, Slot
from lightning.memory_budget import bounded

log = logging.getLogger(__name__)

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
"""The model name agents use; `policy:NAME` also names the agent that calls."""
UNANSWERED = (aiohttp.ClientError, TimeoutError, OSError, UpstreamError)
"""What asking a policy server raises when it does not answer as itself."""


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
