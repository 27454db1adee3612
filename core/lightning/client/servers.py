"""Which process of a server answers: what tells that the one an agent used is gone.

The invariant: an agent that failed is taken to be at fault only if the very process that its model calls went to still answers.
"""

from __future__ import annotations

import logging

import aiohttp
import orjson

logger = logging.getLogger(__name__)

TIMEOUT = 5.0
"""Seconds a server has to say who it is."""


class Servers:
    """Asks servers who they are. Belongs to one event loop; close it."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def process_at(self, url: str) -> str:
        """The word of the process that answers at a server's URL; empty when none does."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT))
        try:
            async with self._session.get(f"{url}/health", allow_redirects=False) as reply:
                said = orjson.loads(await reply.read())
        except (aiohttp.ClientError, TimeoutError, OSError, orjson.JSONDecodeError) as error:
            logger.info("the server at %s does not say that it is well: %r", url, error)
            return ""
        return str(said.get("server", "")) if isinstance(said, dict) else ""

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None
