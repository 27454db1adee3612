"""The attempts of trace ids.

The invariant: a trace id gives only the right to add spans to the attempt whose key it was made of, while that key is valid.
The server that issued or saw the key knows the id; where servers share a store, all others know it once it is in the store.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import cast

from lightning.bounded import Aging, Bounded
from lightning.errors import StoreError
from lightning.gateway.identity import Claims
from lightning.instrument.context import trace_id_of
from lightning.store.protocol import TRACES_RUN, Store
from lightning.types import Json

log = logging.getLogger(__name__)

TRACES = 16_384
"""The most trace ids that are remembered, some 400 bytes each; the one whose agent was silent for longest is dropped first."""
UNKNOWN_SECONDS = 10.0
"""Seconds before the store is asked again for an id that it did not know."""
UNKNOWN_IDS = 10_000


class TraceBook:
    """Knows the attempts of trace ids. With `shared` they are stored in the store, too."""

    def __init__(self, store: Store, *, shared: bool) -> None:
        self._store, self._shared = store, shared
        self._known = Bounded[str, Claims](TRACES)
        self._unknown = Aging[str, bool](UNKNOWN_IDS)
        self._writing: set[asyncio.Task[None]] = set()

    def note_key(self, token: str, claims: Claims, issued: bool) -> None:
        """Note the trace id of a key that was issued or seen here (a `KeyWatcher`). It does not wait for the store: a server
        that asks the store too early asks again later."""
        trace_id = trace_id_of(token)
        self._note(trace_id, claims)
        if issued and self._shared and self.known(trace_id) is not None:
            task = asyncio.create_task(self._keep(trace_id, claims))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def _keep(self, trace_id: str, claims: Claims) -> None:
        kept: Json = [claims.rollout, claims.attempt, claims.expires_at]
        try:
            await self._store.put_state(TRACES_RUN, trace_id, kept, once=None)  # every writer writes the same
        except StoreError as error:
            log.warning("other servers will not know the trace of %s: %s", claims.rollout, error)

    def known(self, trace_id: str) -> Claims | None:
        """Return the attempt of a trace id; None unless this process has issued or seen a key of it that is still valid."""
        claims = self._known.get(trace_id)
        if claims is None or claims.expires_at <= time.time():
            return None
        self._known.move_to_end(trace_id)
        return claims

    def _note(self, trace_id: str, claims: Claims) -> None:
        # Without the sampling, a mapping for each id, because thousands are remembered.
        self._known.keep(trace_id, Claims(claims.rollout, claims.attempt, claims.expires_at))
        now = time.time()
        while self._known and next(iter(self._known.values())).expires_at <= now:
            self._known.popitem(last=False)

    async def find(self, trace_ids: Iterable[str]) -> dict[str, Claims]:
        """Return the attempts of the ids whose keys are valid, by id. Raises `StoreError`."""
        found: dict[str, Claims] = {}
        for trace_id in set(trace_ids):
            claims = self.known(trace_id) or await self._ask(trace_id)
            if claims is not None:
                found[trace_id] = claims
        return found

    async def _ask(self, trace_id: str) -> Claims | None:
        if not self._shared or self._unknown.fresh(trace_id, time.monotonic(), UNKNOWN_SECONDS):
            return None
        kept = await self._store.get_state(TRACES_RUN, trace_id)
        if kept is None:
            self._unknown.keep(trace_id, (True, time.monotonic()))
            return None
        rollout, attempt, expires_at = cast("tuple[str, int, float]", kept)
        self._note(trace_id, Claims(rollout, attempt, expires_at))
        return self.known(trace_id)

    async def close(self) -> None:
        """Wait until the pending writes are done."""
        await asyncio.gather(*self._writing, return_exceptions=True)
