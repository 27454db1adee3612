"""The gateway: an OpenAI-compatible front of vLLM that records every call it answers.

The invariant: what an agent gets is what vLLM would have given it, and each call it got is a transition in the store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

from lightning.errors import GatewayError
from lightning.gateway.forward import MODEL, Forwarder
from lightning.gateway.hold import Gate
from lightning.gateway.identity import Identity
from lightning.gateway.recorder import Recorder
from lightning.gateway.routes import build_front
from lightning.gateway.serving import Serving, bind
from lightning.gateway.stats import Counters, GatewayStats
from lightning.gateway.tokens import TokenSigner
from lightning.gateway.traces import TraceEndpoint
from lightning.gateway.upstreams import GRACE, Pool, Upstream
from lightning.gateway.versions import VersionBook
from lightning.types import LLM, Lease

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import ASGIApp

    from lightning.config import GatewayConfig
    from lightning.policy_server.protocol import Update
    from lightning.store.protocol import Store


class Gateway:
    """The front of one or more policy servers. All methods belong to the event loop that runs it.

    `secret` signs the tokens (at least 16 bytes; keep it for the run, so that tokens survive a restart), `version` is
    the weight version the policy servers have now. `app` may be mounted elsewhere instead of calling `start`; then set
    `url` to where it can be reached.
    """

    def __init__(
        self,
        store: Store,
        upstreams: Sequence[Upstream],
        config: GatewayConfig,
        *,
        secret: bytes,
        version: int = 0,
    ) -> None:
        self.url = ""
        self._config = config
        self._signer = TokenSigner(secret)
        self._book = VersionBook(version)
        self._counters = Counters()
        self._gate = Gate(config.hold_timeout)
        self._pool = Pool(upstreams, grace=min(GRACE, config.hold_timeout))
        self._forwarder = Forwarder(self._pool, self._gate, self._book)
        self._serving: Serving | None = None
        self._recorder = Recorder(store, config.token_ttl)
        identity = Identity(self._signer)
        traces = TraceEndpoint(config, identity, self._signer, store, self._counters)
        self._front = build_front(config, identity, self._forwarder, self._book, self._recorder, self._counters, traces)
        self.app = self._front.app

    def mount(self, control: ASGIApp) -> None:
        """Let another application answer everything below `/api/` on the gateway's port."""
        self._front.control = control

    async def start(self) -> None:
        """Bind and serve on the running loop. Raises `GatewayError` when the address cannot be had."""
        if self._serving is not None:
            return
        listener = bind(self._config.host, self._config.port)
        self._serving = Serving(self._front, listener, self._config.limits)
        await self._serving.start()
        self.url = self._serving.url

    def issue(
        self,
        rollout: str,
        attempt: int,
        *,
        sampling: Mapping[str, float | int] | None = None,
        ttl: float | None = None,
    ) -> str:
        """Sign the API key of one attempt. `sampling` overrides what the agent asks for; `ttl` is in seconds."""
        return self._signer.issue(rollout, attempt, self._config.token_ttl if ttl is None else ttl, sampling)

    def llm(self, lease: Lease, *, sampling: Mapping[str, float | int] | None = None) -> LLM:
        """What the agent of a leased rollout needs. Raises `GatewayError` before `start`."""
        if not self.url:
            raise GatewayError("The gateway has no address yet; await gateway.start() first.")
        self._recorder.expect(lease.rollout.id, lease.attempt)
        token = self.issue(lease.rollout.id, lease.attempt, sampling=sampling)
        return LLM(base_url=f"{self.url}/v1", api_key=token, model=MODEL)

    def hold(self) -> AbstractAsyncContextManager[None]:
        """For the length of the block new requests wait; those already at vLLM go on. Blocks may overlap."""
        return self._hold()

    @asynccontextmanager
    async def _hold(self) -> AsyncIterator[None]:
        with self._gate.hold():
            self._book.freeze()
            yield

    def policy_updated(self, update: Update) -> None:
        """Call it inside the hold, after the update: calls in flight are split at the tokens of the old version.

        With several policy servers, update all of them in one hold and pass one `Update` with their `in_flight` merged.
        """
        self._book.update(update)

    def replace_upstream(self, old: Upstream, new: Upstream) -> None:
        """A policy server was restarted at another address; requests that waited for it go on."""
        self._pool.replace(old, new)

    def stats(self) -> GatewayStats:
        """Counts since the start."""
        return self._counters.snapshot(self._gate.waiting)

    async def close(self) -> None:
        """Let the calls in flight end (for a while), then stop. Idempotent."""
        if self._serving is not None:
            await self._serving.stop()
            self._serving = None
        await self._forwarder.close()
