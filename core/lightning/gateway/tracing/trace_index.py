"""Whose trace an id is, also when another server issued the key.

The invariant: an id is found by the server that issued or saw the key, and, where servers share a store, by every other one
once the store has it; an id alone gives nothing but the right to add spans to that attempt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import cast

from lightning.errors import StoreError
from lightning.gateway.auth.api_keys import Claims, TokenSigner
from lightning.spans.trace import trace_id_of
from lightning.store.protocol import Store
from lightning.types import Json

log = logging.getLogger(__name__)

PLACE = "gateway/traces"
"""The name under which the store's state has them; no run has it, since a run's id is a folder's name. Pruning a database
removes those that have expired (`lightning.maintenance.queries`)."""
UNKNOWN_SECONDS = 10.0
"""How long an id that the store did not know is not asked for again."""
UNKNOWN_IDS = 10_000


class TraceBook:
    """Trace ids of attempts. With `shared` they are kept in the store, too."""

    def __init__(self, store: Store, signer: TokenSigner, *, shared: bool) -> None:
        self._store, self._signer, self._shared = store, signer, shared
        self._unknown: OrderedDict[str, float] = OrderedDict()
        self._writing: set[asyncio.Task[None]] = set()

    def issued(self, token: str) -> None:
        """A key was issued here. Does not wait for the store: a server that is asked too early asks it again later."""
        if self._shared and (claims := self._signer.of_trace(trace_id := trace_id_of(token))) is not None:
            task = asyncio.create_task(self._keep(trace_id, claims))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def _keep(self, trace_id: str, claims: Claims) -> None:
        kept: Json = [claims.rollout, claims.attempt, claims.expires_at]
        try:
            await self._store.put_state(PLACE, trace_id, kept, once=None)  # whoever writes it, it is the same
        except StoreError as error:
            log.warning("other servers will not know the trace of %s: %s", claims.rollout, error)

    async def find(self, trace_ids: Iterable[str]) -> dict[str, Claims]:
        """The attempts of those ids that belong to one whose key has not expired. Raises `StoreError`."""
        found: dict[str, Claims] = {}
        for trace_id in set(trace_ids):
            claims = self._signer.of_trace(trace_id) or await self._ask(trace_id)
            if claims is not None:
                found[trace_id] = claims
        return found

    async def _ask(self, trace_id: str) -> Claims | None:
        if not self._shared or self._unknown.get(trace_id, 0.0) > time.monotonic():
            return None
        kept = await self._store.get_state(PLACE, trace_id)
        if kept is None:
            self._unknown[trace_id] = time.monotonic() + UNKNOWN_SECONDS
            if len(self._unknown) > UNKNOWN_IDS:
                self._unknown.popitem(last=False)
            return None
        rollout, attempt, expires_at = cast("tuple[str, int, float]", kept)
        return self._signer.learn(trace_id, Claims(rollout, attempt, expires_at))

    async def close(self) -> None:
        """Wait for what is being written."""
        await asyncio.gather(*self._writing, return_exceptions=True)
