"""Whether servers answer, and which process of them: what tells that the one an agent used is gone.

The invariant: the server of an agent that failed is taken to be gone only if its process was known and answers no more, however
many others answer at the same URL.
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
"""Seconds between two kinds of questions going unanswered, below which they do for one reason."""


class Presence:
    """Hears of every question of one client whether a server has answered it."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def away(self, question: str, error: UnavailableError) -> None:
        """No server answered this kind of question."""
        now = time.monotonic()
        known = question in self._since or any(now - since < ONE_FAILURE for since in self._since.values())
        self._since.setdefault(question, now)
        if not known:
            logger.warning("%s. Agents that run go on; this client asks again", error)

    def back(self, question: str) -> None:
        """A server answered this kind of question."""
        since = self._since.pop(question, None)
        if since is not None and not self._since:
            logger.warning("a server answers again after %.0f s", time.monotonic() - since)


TIMEOUT = 5.0
"""Seconds a server has to say who it is."""
QUESTIONS = 8
"""How often nobody but others must answer until a process is gone: servers behind one URL take turns."""


class Servers:
    """Asks servers who they are. Belongs to one event loop; close it."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def process_at(self, url: str) -> str:
        """The word of the process that answers at a server's URL; empty when none does."""
        try:
            async with self._asking().get(f"{url}/health", allow_redirects=False) as reply:
                said = orjson.loads(await reply.read())
        except (aiohttp.ClientError, TimeoutError, OSError, orjson.JSONDecodeError) as error:
            logger.info("the server at %s does not say that it is well: %r", url, error)
            return ""
        return str(said.get("server", "")) if isinstance(said, dict) else ""

    async def is_gone(self, url: str, process: str) -> bool:
        """Whether a process that answered at a URL does so no more; when it is not known which did, whether none does."""
        if not process:
            return await self._is_silent(url)
        if await self.process_at(url) == process:
            return False
        return process not in await asyncio.gather(*(self.process_at(url) for _ in range(QUESTIONS - 1)))

    async def _is_silent(self, url: str) -> bool:
        try:
            async with self._asking().get(f"{url}/health", allow_redirects=False):
                return False
        except (aiohttp.ClientError, TimeoutError, OSError):
            return True

    def _asking(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)  # some share out connections, not requests
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=TIMEOUT))
        return self._session

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None
