"""The policy servers behind the gateway: which one serves a rollout, and which are alive.

The invariant: a rollout stays with one server while that server is alive (its prefix cache is there), a server that cannot be
reached, or in whose place another one answers, gets no requests until it answers again, and a request waits a while before it
is told that none is.

Redirects are followed nowhere.

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
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import aiohttp
import orjson
from yarl import URL

from lightning.errors import GatewayError
from lightning.gateway.http import RefusalError
from lightning.memory_budget import bounded

TIMEOUT = aiohttp.ClientTimeout(total=5.0)
LONGEST_WORD = 1 << 20
"""Bytes of what a server says of itself."""
SHOWN = 3
"""Models of another server that are named."""


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
        verb, slot.url(path), data=None if body is None else orjson.dumps(body), timeout=TIMEOUT, allow_redirects=False
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


log = logging.getLogger(__name__)

GRACE = 30.0
"""Seconds a request waits for a server to come (back) up."""
CHECK_EVERY = 2.0
MISSES = 3
"""Checks in a row that may time out (a busy server answers late) before a server counts as down."""


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
            async with session.get(slot.url("/health"), timeout=TIMEOUT, allow_redirects=False) as answer:
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
