"""Whether servers answer, and which server process does: by this a client finds out that the server which its agent used is
gone.

The invariant: the server of a failed agent counts as gone only if its process was known and no longer answers, however many
other processes answer at the same URL.
"""

from __future__ import annotations

import asyncio
import logging
import time

import aiohttp
import orjson
from lightning.errors import UnavailableError

logger = logging.getLogger(__name__)

ONE_FAILURE = 30.0
"""When two kinds of requests fail within this many seconds, they count as one outage, which is logged once."""


class Presence:
    """Logs when servers stop answering one client and when they answer again. The client reports each request to it."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def away(self, question: str, error: UnavailableError) -> None:
        """Note that no server answered a kind of request; the first failure of an outage is logged."""
        now = time.monotonic()
        known = question in self._since or any(now - since < ONE_FAILURE for since in self._since.values())
        self._since.setdefault(question, now)
        if not known:
            logger.warning("%s. Agents that run go on; this client asks again", error)

    def back(self, question: str) -> None:
        """Note that a server answered a kind of request; the end of an outage is logged."""
        since = self._since.pop(question, None)
        if since is not None and not self._since:
            logger.warning("a server answers again after %.0f s", time.monotonic() - since)


TIMEOUT = 5.0
"""Seconds that a server has to answer at `/health`."""
QUESTIONS = 8
"""A process counts as gone when it gives none of this many answers at its URL: servers behind one URL take turns."""


class Servers:
    """Asks servers which process they are. It belongs to the event loop that makes it, and must be closed."""

    def __init__(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)  # some share out connections, not requests
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=TIMEOUT))

    async def process_at(self, url: str) -> str:
        """Return the name of the process that answers at a server's URL; empty when none answers."""
        try:
            async with self._session.get(f"{url}/health", allow_redirects=False) as reply:
                said = orjson.loads(await reply.read())
        except (aiohttp.ClientError, TimeoutError, OSError, orjson.JSONDecodeError) as error:
            logger.info("the server at %s does not say that it is well: %r", url, error)
            return ""
        return str(said.get("server", "")) if isinstance(said, dict) else ""

    async def is_gone(self, url: str, process: str) -> bool:
        """Return whether the process that answered at a URL before answers there no longer. With an empty `process` (it was
        never known): whether nothing answers there."""
        if not process:
            return await self._is_silent(url)
        if await self.process_at(url) == process:
            return False
        return process not in await asyncio.gather(*(self.process_at(url) for _ in range(QUESTIONS - 1)))

    async def _is_silent(self, url: str) -> bool:
        try:
            async with self._session.get(f"{url}/health", allow_redirects=False):
                return False
        except (aiohttp.ClientError, TimeoutError, OSError):
            return True

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._session.close()
