"""The gateway: an OpenAI-compatible front of vLLM that records every call it answers.

The invariant: what an agent gets is what vLLM would have given it, and each call it got is a transition in the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from lightning.addresses import Allowed
from lightning.errors import GatewayError
from lightning.gateway.calls import Parts
from lightning.gateway.connections import Serving, bind
from lightning.gateway.identity import MODEL, Identity, TokenSigner
from lightning.gateway.policy import Policies, Policy
from lightning.gateway.recorder import Recorder
from lightning.gateway.routes import OWN_PATHS, build_front, line_of
from lightning.gateway.stages import CONTRACT
from lightning.gateway.upstream.client import Forwarder
from lightning.gateway.upstream.servers import Upstream
from lightning.types import LLM, Lease

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import ASGIApp

    from lightning.config import GatewayConfig
    from lightning.policy_server.protocol import Update
    from lightning.store.protocol import Store

log = logging.getLogger(__name__)

DRAIN_LOOK = 0.005
SURE_SECONDS = 1.5
"""Seconds that `Gateway.served` takes at most: who asks waits for it."""


class Gateway:
    """The front of policy servers. All methods belong to the event loop that runs it.

    `upstreams` are the policy servers of its own, with `version` as their weights' version now and `run` as the run they are
    for (empty: any run); a gateway that has none gets no `upstreams`. Keys of other runs are answered by those runs' policy
    servers, which their trainers name in the store. `secret` signs the keys (at least 16 bytes): all servers over a store have
    one, that of `identity.gateway_secret`. With `shared` other servers answer for the rollouts of this one's keys, so that what
    they must know of them is kept in the store. With a `seed` calls without one are given one (`gateway.seed_calls`). `app` may
    be mounted elsewhere instead of calling `start`; then set `url` to where it can be reached.
    """

    def __init__(
        self,
        store: Store,
        upstreams: Sequence[Upstream],
        config: GatewayConfig,
        *,
        secret: bytes,
        version: int = 0,
        run: str = "",
        shared: bool = False,
        seed: int | None = None,
    ) -> None:
        self.url = ""
        self._config = config
        self._signer = TokenSigner(secret)
        own = Policy(upstreams, config.hold_timeout, version=version, seed=seed) if upstreams else None
        self._policies = Policies(store, own, run, config.hold_timeout, Allowed(config.allowed_upstreams))
        self._forwarder = Forwarder()
        self._serving: Serving | None = None
        self._recorder = Recorder(store, config.token_ttl)
        self._identity = identity = Identity(self._signer)
        self._closing = closing = AsyncExitStack()
        self.parts = Parts(config, identity, self._policies, self._forwarder, self._recorder, store, shared, closing)
        self.parts.line = line_of(self.parts)
        self._front = build_front(self.parts)
        self.app = self._front.app

    @property
    def stages(self) -> Mapping[str, str]:
        """The stages that stand in the line of its calls, in their order, with the versions of their distributions."""
        return self.parts.line.versions

    def mount(self, app: ASGIApp, name: str = "api") -> None:
        """Let another application answer everything below `/NAME` on the gateway's port. Raises `GatewayError` for a name
        that is taken, and for one of the gateway's own."""
        if name in OWN_PATHS or name in self._front.mounted:
            raise GatewayError(f"nothing can be mounted at /{name}: something answers there already")
        self._front.mounted[name] = app

    async def start(self) -> None:
        """Bind and serve on the running loop. Raises `GatewayError` when the address cannot be had."""
        if self._serving is not None:
            return
        if why := CONTRACT.why_idle(self.parts.line.stages, self._config, "record_requests"):
            log.warning("what agents send and get is not kept: %s", why)
        listener = bind(self._config.host, self._config.port)
        self._serving = Serving(self._front, listener, self._config.limits, self._identity.key_of)
        await self._serving.start()
        self.url = self._serving.url

    def issue(
        self,
        rollout: str,
        attempt: int,
        *,
        sampling: Mapping[str, float | int] | None = None,
        ttl: float | None = None,
        run: str = "",
        session: str = "",
        branch: bool = False,
    ) -> str:
        """Sign the API key of one attempt. `sampling` overrides what the agent asks for; `ttl` is in seconds.

        `run` says whose policy it is for; empty: the gateway's own. With a `session`, a run, the key is of many conversations,
        each of which becomes a rollout of that run; requests that are refused are recorded with `rollout`. In a `branch` the
        first calls are answered from the record of the rollout's parent.
        """
        ttl = self._config.token_ttl if ttl is None else ttl
        return self._signer.issue(rollout, attempt, ttl, sampling, run, session, branch=branch)

    def llm(self, lease: Lease, *, sampling: Mapping[str, float | int] | None = None, run: str = "") -> LLM:
        """What the agent of a leased rollout needs; `run` is whose policy answers it, where that is not its own run's. Raises
        `GatewayError` before `start`, and for a branch where no stage answers those."""
        if not self.url:
            raise GatewayError("The gateway has no address yet; await gateway.start() first.")
        rollout, branch = lease.rollout, lease.rollout.parent is not None
        if branch and (why := self.parts.line.why_not("branch")):
            raise GatewayError(f"the rollout {rollout.id} is a branch, and {why}")
        self._recorder.expect(rollout.id, lease.attempt)
        token = self.issue(rollout.id, lease.attempt, sampling=sampling, run=run or rollout.run, branch=branch)
        return LLM(base_url=f"{self.url}/v1", api_key=token, model=MODEL, extras=self.parts.line.told(rollout))

    async def served(self, run: str) -> bool:
        """Whether a call of this run would find a policy server that is up. Takes `SURE_SECONDS` at most, and that only until
        the run's servers have been asked for the first time; without an answer it is False."""
        policy = self._policies.of(run)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SURE_SECONDS):
                while not policy.told:  # noqa: ASYNC110 — short, once, and what is awaited has no one event
                    await asyncio.sleep(SURE_SECONDS / 100)
                self._forwarder.look_after(policy)
                while not policy.pool.sure:  # noqa: ASYNC110
                    await asyncio.sleep(SURE_SECONDS / 100)
        return policy.told and policy.pool.sure and policy.pool.healthy > 0

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """For the length of the block new requests for its own policy wait; those already at vLLM go on. Blocks may overlap.

        Gateways elsewhere that serve the run, too, are held by `lightning.gateway.policy.PolicyOwner`.
        """
        with self._own.gate.hold():
            self._own.freeze()
            yield

    async def drain(self, seconds: float) -> bool:
        """Call it inside the hold: wait until vLLM has answered every call that was sent, so that its tokens are all of the
        present version. Whether it has in time."""
        own = self._own
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while own.sampling:  # noqa: ASYNC110 — each call tells by itself, once an update
                    await asyncio.sleep(DRAIN_LOOK)
        own.freeze()
        return not own.sampling

    def policy_updated(self, update: Update, server: Upstream | None = None) -> None:
        """Call it inside the hold, after the update: calls in flight are split at the tokens of the old version.

        Several policy servers may be updated one after another, each in a hold of its own: name the `server` then. Whoever
        updates all of them in one hold passes one `Update` with their `in_flight` merged. Raises `GatewayError` for a server
        that is none of its own.
        """
        self._own.update(update, server)

    def policy_lost(self) -> None:
        """Call it inside the hold when an update broke off, so that nobody knows what sampled the calls in flight."""
        self._own.lose()

    def expect_restart(self) -> None:
        """Its policy server has died and is being started again: call `replace_upstream` when it is there."""
        self._own.pool.vacate()

    def replace_upstream(self, old: Upstream, new: Upstream) -> None:
        """A policy server was restarted at another address; requests that waited for it go on."""
        self._own.pool.replace(old, new)

    async def hidden_tools(self) -> int:
        """How many calls had tools that its own policy's chat template does not show the model, as far as that is known."""
        return await self._own.tools.hidden()

    @property
    def _own(self) -> Policy:
        if self._policies.own is None:
            raise GatewayError(
                "this gateway has no policy server of its own; make it with at least one Upstream(url, model)"
            )
        return self._policies.own

    async def close(self) -> None:
        """Let the calls in flight end (for a while), then stop. Idempotent."""
        if self._serving is not None:
            await self._serving.stop()
            self._serving = None
        await self._policies.close()
        await self._forwarder.close()
        await self._closing.aclose()
