"""Sends a call to a policy server: waits out holds, picks the server, fails over while nothing was answered.

The invariant: a call is sent with the version that is current at that moment noted on it, to the server that has this version
and not to another in its place, never during a hold, and never again once a server has begun to work on it. A kept connection
that ends before a byte of the answer came tells of a server that had just let go of it and never read the call (RFC 9112,
9.3.1): such a call is sent once more.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from yarl import URL

from lightning.gateway.body import read_object, write_object
from lightning.gateway.errors import RefusalError, UpstreamError, UpstreamGoneError
from lightning.gateway.fleet.versions import LiveCall
from lightning.gateway.policy_state import Policy
from lightning.gateway.sampling import Body
from lightning.gateway.upstream.servers import Found, Pool, Slot

TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
"""Reading has none here: `Watch` looks after servers that fall silent."""
KEEP_ALIVE = 4.0
"""Seconds an idle connection is kept; below the 5 s after which vLLM's server closes its end."""
LARGE_BODY = 1 << 20
"""From this size on aiohttp wants bodies as a stream."""
MAX_TRIES = 8
MODELS_TIMEOUT = aiohttp.ClientTimeout(total=10.0)
MODEL = "policy"
"""The model name agents use; `policy:NAME` also names the agent that calls."""


class Forwarder:
    """One client session for everything, with no limit on connections. The health of a policy's servers is checked from its
    first request on, or from `look_after`."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    def look_after(self, policy: Policy) -> None:
        """Check the health of a policy's servers from now on."""
        self._session_for(policy)

    def _session_for(self, policy: Policy) -> aiohttp.ClientSession:
        """The session, made on the running loop when it is first needed."""
        if self._session is None:
            watching = aiohttp.TraceConfig()
            watching.on_connection_reuseconn.append(_note_reuse)
            self._session = aiohttp.ClientSession(
                trace_configs=[watching],
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=TIMEOUT,
                headers={"Content-Type": "application/json"},
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
        session = self._session_for(policy)
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
            payload = write_object(body)
            connection = _Connection()
            live.dispatch(policy.book.current, loop.time())
            live.slot, live.upstream = slot, slot.upstream
            try:
                response = await _post(session, slot.url(f"/v1{path}"), payload, headers, connection)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                live.sent = live.waits_for_bytes = False
                pool.unreachable(slot, error)
                tried.append(slot)
                continue
            except (aiohttp.ClientError, OSError) as error:
                if connection.reused and not renewed and _is_silent_end(error):
                    live.sent = live.waits_for_bytes = False
                    renewed = True
                    continue
                raise UpstreamGoneError(f"its connection was lost before it answered ({error!r})") from error
            if not await _is_anothers(response, pool, slot, session):
                return _at_its_place(response)
            live.sent = live.waits_for_bytes = False
            tried.append(slot)
        message = f"Connecting to a policy server failed {len(tried)} times in a row; see the policy server's log file."
        raise RefusalError(502, "upstream_unreachable", message)

    async def is_gone(self, policy: Policy, live: LiveCall) -> bool:
        """Whether the server that a call was sent to is not there any more, or no longer well."""
        if live.slot is None or live.replaced:
            return True
        return await policy.pool.check(live.slot, self._session_for(policy)) is Found.OUT

    async def works(self, policy: Policy, live: LiveCall) -> bool:
        """Whether the engine of the server that a call was sent to turns, so that a silent call of it is still being worked on.

        `/health` tells only that the engine has not died. A method of the worker extension is answered between two steps, so
        its answer shows that one has ended; a vLLM without the extension is believed for its `/health`. While weights are
        loaded there are no steps.
        """
        slot = live.slot
        if slot is None or policy.gate.closed:
            return True
        session = self._session_for(policy)
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
        session, slot = self._session_for(policy), await policy.pool.pick(rollout)
        url = slot.url("/v1/models")
        async with session.get(url, timeout=MODELS_TIMEOUT, allow_redirects=False) as response:
            _at_its_place(response).raise_for_status()
            listed = read_object(await response.read())
        cards = [card for card in listed.get("data", []) if card.get("id") == slot.upstream.model]
        if not cards:
            raise UpstreamError(f"it does not serve {slot.upstream.model}")
        return write_object({**listed, "data": [{**card, "id": MODEL} for card in cards]})

    async def tokenize(self, policy: Policy, rollout: str, body: Body) -> tuple[int, bytes]:
        """What vLLM's `/tokenize` says to a prompt: status and body. Raises as `models` does."""
        session, slot = self._session_for(policy), await policy.pool.pick(rollout)
        payload = io.BytesIO(write_object({**body, "model": slot.upstream.model}))
        url = slot.url("/tokenize")
        async with session.post(url, data=payload, timeout=MODELS_TIMEOUT, allow_redirects=False) as response:
            if await _is_anothers(response, policy.pool, slot, session):
                raise UpstreamError("another server answers there")
            return _at_its_place(response).status, await response.read()

    async def close(self) -> None:
        """Close idle connections and those still in use."""
        if self._session is not None:
            await self._session.close()
            self._session = None


@dataclass(slots=True)
class _Connection:
    """What one try was sent over."""

    reused: bool = False


async def _post(
    session: aiohttp.ClientSession, url: URL, payload: bytes, headers: list[tuple[str, str]], connection: _Connection
) -> aiohttp.ClientResponse:
    return await session.post(
        url,
        data=payload if len(payload) < LARGE_BODY else io.BytesIO(payload),
        headers=headers,
        allow_redirects=False,
        trace_request_ctx=connection,
    )


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


def _at_its_place(response: aiohttp.ClientResponse) -> aiohttp.ClientResponse:
    """An answer that is no redirect: a policy server chooses no other. Raises `UpstreamError`."""
    if 300 <= response.status < 400:
        response.close()
        raise UpstreamError(f"it answered with a redirect ({response.status}), which is not followed")
    return response


def _is_silent_end(error: Exception) -> bool:
    """Whether a connection ended without a byte of the answer."""
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return isinstance(error.message, str)  # else: the beginning of an answer
    return isinstance(error, aiohttp.ClientOSError)
