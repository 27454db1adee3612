"""The policy of a run in a gateway: its policy servers, whether calls may be sent to them now, and the versions of their
weights. Also finds the policy for a call.

The invariant: a call is sent only to servers of its run, only while the gate is open, and with the version that its server has
then. During a hold nothing new is sent, and a call that ends is not recorded before the versions of its tokens are known. When
the last hold ends, waiting calls go on in the order in which they came.

A token belongs to the version that its server had loaded when it sampled the token. A call starts with the version of its
server. Each update of that server splits the call at the number of tokens that the old weights had sampled when vLLM paused. If
that number is unknown, the call is never trained on.

A run's calls go only to that run's policy servers, whatever model they name.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp

from lightning.addresses import Allowed
from lightning.asyncio_utils import end
from lightning.gateway.dialects import Capture
from lightning.gateway.http import RefusalError
from lightning.gateway.identity import NO_RETRY
from lightning.gateway.upstream import GRACE, Pool, Slot, Upstream
from lightning.plugins import plugins
from lightning.policy_server.protocol import Update
from lightning.store.protocol import Store
from lightning.types import POLICY, VersionRun

UPDATING = "The policy's weights are being updated"
RESTARTING = "The policy server is being restarted"
UNKNOWN = -1
"""The version of weights that are unknown, because an update broke off."""


class Gate:
    """Lets calls wait during holds. A hold is of all calls, or of the calls of the server in one slot, which has a number.
    `timeout` is the most seconds that a call may wait in all; `waiting` is the number of waiting calls. `slots` returns how
    many slots there are."""

    def __init__(self, timeout: float, slots: Callable[[], int] = lambda: 1) -> None:
        self.timeout = timeout
        self._slots = slots
        self._holds: dict[object, tuple[str, int | None]] = {}
        self._news = asyncio.Event()
        self.waiting = 0

    @property
    def held(self) -> bool:
        """Whether a hold is active, of whatever calls."""
        return bool(self._holds)

    @property
    def closed(self) -> bool:
        """Whether the calls of every server wait."""
        numbers = {number for _, number in self._holds.values()}
        return bool(numbers) and (None in numbers or numbers.issuperset(range(self._slots())))

    def closes(self, slot: int | None) -> bool:
        """Whether the calls of the server in the slot of this number wait; with None, whether those of every server do."""
        return self.closed if slot is None else any(number in (None, slot) for _, number in self._holds.values())

    def close(self, holder: object, why: str = UPDATING, slot: int | None = None) -> None:
        """Close the gate, to all calls or to those of one slot's server, until `holder` opens it again. `why` begins the error
        of a call that waits too long."""
        self._holds[holder] = why, slot

    def open(self, holder: object) -> None:
        """End the hold of `holder`, if it has one."""
        if self._holds.pop(holder, None) is not None:
            self._news.set()

    @contextlib.contextmanager
    def hold(self, slot: int | None = None, why: str = UPDATING) -> Iterator[None]:
        """Close the gate during the block, to all calls or to those of one slot's server. Holds may overlap."""
        holder = object()
        self.close(holder, why, slot)
        try:
            yield
        finally:
            self.open(holder)

    def stir(self) -> None:
        """Let the calls in `settle` check their condition again."""
        self._news.set()

    async def wait(
        self, spent: float = 0.0, slot: int | None = None, no_longer: Callable[[], bool] = lambda: False
    ) -> float:
        """Wait until the gate is open to the calls of this slot's server; with None, to those of any server; or until
        `no_longer()` is true. Return how many seconds the call has waited in all.

        `spent` are the seconds that it had waited before. Raises `RefusalError` (503) if it waits too long in all.
        """
        if not self.closes(slot):
            return spent
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.waiting += 1
        try:
            await self._until(lambda: not self.closes(slot) or no_longer(), self.timeout - spent)
        except TimeoutError:
            why, _ = next(iter(self._holds.values()), (UPDATING, None))
            message = (
                f"{why} and this took longer than {self.timeout:g} s. "
                "Send the request again; if updates are this slow, raise gateway.hold_timeout."
            )
            raise RefusalError(503, "held_too_long", message, [(b"retry-after", b"1")]) from None
        finally:
            self.waiting -= 1
        return spent + loop.time() - began

    async def settle(self, settled: Callable[[], bool], slot: int | None = None) -> bool:
        """Wait until the gate is open to the calls of this slot's server or `settled()` is true, at most `timeout` seconds.
        Return whether one of both is true."""
        if self.closes(slot) and not settled():
            with contextlib.suppress(TimeoutError):
                await self._until(lambda: not self.closes(slot) or settled(), self.timeout)
        return not self.closes(slot) or settled()

    async def _until(self, done: Callable[[], bool], seconds: float) -> None:
        async with asyncio.timeout(seconds):
            while not done():  # another hold may have begun before this call woke up
                self._news.clear()
                await self._news.wait()


@dataclass(slots=True, eq=False)
class LiveCall:
    """A call that vLLM may still be sampling.

    `request_id` is its `X-Request-Id`, `choices` the number of its completions (`n` for each prompt), and `base` the version of
    its server's weights when it was sent. `home` is the number of the slot where its rollout's calls go while the server there
    is well; None leaves the choice to `Pool.pick`. `sent` says that it may have reached a server: `upstream`, which was in
    `slot` then. `runs` has the versions of each choice that an update has split. `seen` is the number of tokens of each choice
    that had come before the last hold. An `unsure` call may have tokens of an unknown version; an `unserved` call failed
    because no server was there or its server went away. `policy` is the name of the policy that answers, and `frozen` says that
    its weights never change, so that its version is 0. While `waits_for_bytes`, the last sign of life was at `heard_at` (the
    loop's clock).
    """

    request_id: str
    choices: int
    n: int
    base: int
    capture: Capture
    home: int | None = None
    runs: dict[int, list[VersionRun]] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    sent: bool = False
    unsure: bool = False
    unserved: bool = False
    slot: Slot | None = None
    upstream: Upstream | None = None
    waits_for_bytes: bool = False
    heard_at: float = 0.0
    policy: str = POLICY
    frozen: bool = False

    def dispatch(self, slot: Slot, now: float) -> None:
        """Note that the call is sent to the server in this slot."""
        self.slot, self.upstream = slot, slot.upstream
        self.base, self.sent, self.unsure = slot.version, True, False
        self.waits_for_bytes, self.heard_at = True, now
        self.runs.clear()
        self.seen.clear()

    def retract(self) -> None:
        """Note that no server has begun to work on the call, so that it may be sent again."""
        self.sent = self.waits_for_bytes = False

    @property
    def replaced(self) -> bool:
        """Whether the slot now has another server than the call was sent to, maybe at the same address."""
        return self.slot is not None and self.slot.upstream is not self.upstream

    def versions(self, choice: int, length: int) -> tuple[VersionRun, ...]:
        """Return the versions of a choice with `length` response tokens: each version with the token at which it starts."""
        if self.frozen:
            return (VersionRun(0, 0, self.policy),)
        runs = self.runs.get(choice)
        if runs is None:
            return (VersionRun(0, self.base, self.policy),)
        return (runs[0], *(run for run in runs[1:] if run.start < length))

    def key(self, index: int) -> str:
        """Return the name of a choice in `Update.in_flight` (the inverse of `policy_server.control.client_key`)."""
        prompt, choice = divmod(index, self.n)
        if self.n == 1:
            return self.request_id if prompt == 0 else f"{prompt}_{self.request_id}"
        return f"{choice}_{self.request_id}" + (f"-{prompt}" if prompt else "")

    def split(self, choice: int, tokens: int, version: int) -> None:
        """Note that `choice` is sampled by `version` from response token `tokens` on."""
        runs = self.runs.setdefault(choice, [VersionRun(0, self.base, self.policy)])
        while runs and runs[-1].start >= tokens:
            runs.pop()
        runs.append(VersionRun(tokens if runs else 0, version, self.policy))


class Policy:
    """The servers and the gate of a run's calls, and the calls that the next update may split. `hold_timeout` is in seconds;
    `version` is that of the servers' weights.

    `check` is called before the servers or versions are relied on; a member of a fleet looks at its clock there. With a `seed`
    a call without a seed gets one. `used` is the time of the last call (the loop's clock). `told` says whether the servers are
    known.
    """

    def __init__(
        self,
        upstreams: Sequence[Upstream],
        hold_timeout: float,
        *,
        version: int = 0,
        seed: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.pool = Pool(upstreams, grace=min(GRACE, hold_timeout), version=version)
        self.gate = Gate(hold_timeout, lambda: len(self.pool.slots))
        self.calls: set[LiveCall] = set()
        self.seed, self.check = seed, check
        self.used = 0.0
        self.told = bool(upstreams)
        self._health: asyncio.Task[None] | None = None
        self.pool.on_other = self.lose

    @property
    def version(self) -> int:
        """The newest version of any server. While servers are updated one after another, some have an older version."""
        return self.pool.version

    @property
    def sampling(self) -> int:
        """The number of calls that a server may be sampling."""
        return sum(call.waits_for_bytes for call in self.calls)

    def keys(self) -> list[str]:
        """Return the names in `Update.in_flight` of all choices that a server may be sampling."""
        return [call.key(index) for call in self.calls if call.sent for index in range(call.choices)]

    def freeze(self) -> None:
        """Note how many tokens of every call have come, before an update begins."""
        for call in self.calls:
            call.seen = {index: len(choice.response_ids) for index, choice in call.capture.choices.items()}

    def update(self, update: Update, server: Upstream | None = None) -> None:
        """Split the calls in flight after an update of one server, or of all, at the tokens that the old weights had sampled.
        Call it inside a hold, after the update.

        If servers are updated one after another, each in its own hold, name the `server`. If all are updated in one hold, merge
        their `in_flight` into one `Update`. A choice that is missing from `in_flight` was not scheduled before the update and
        is wholly of the new version. If some of its tokens had been seen, it had finished, which a server may leave out: then
        it is not split. Raises `GatewayError` for a server that the policy does not have.
        """
        self.pool.updated(update.version, server)
        for call in self.calls:
            if not call.sent or server not in (None, call.upstream):
                continue
            for index in range(call.choices):
                tokens = update.in_flight.get(call.key(index))
                if tokens is not None or not call.seen.get(index):
                    call.split(index, tokens or 0, update.version)

    def lose(self, server: Upstream | None = None) -> int:
        """Mark all calls that this server, or with None any server, may be sampling as unsure, because its weights may have
        changed unnoticed. Return how many calls this is."""
        lost = [call for call in self.calls if call.sent and not call.unsure and server in (None, call.upstream)]
        for call in lost:
            call.unsure = True
        self.gate.stir()
        return len(lost)

    def check_health(self, session: aiohttp.ClientSession) -> None:
        """Check the health of the servers in the background, until `close`."""
        if self._health is None:
            self._health = asyncio.create_task(self.pool.watch(session), name="lightning-gateway-health")

    async def close(self) -> None:
        """End the health checks."""
        if self._health is not None:
            await end(self._health)
            self._health = None


@dataclass(slots=True)
class Hold:
    """A hold of all gateways. Set `update` if weights have changed, and `lost` if those of every server are unknown. `away` are
    servers that get no calls from now on, because they did not take the update; the versions of their calls are unknown."""

    update: Update | None = None
    lost: bool = False
    away: tuple[Upstream, ...] = ()


class PolicyOwner:
    """The owner of a run's policy. It tells other gateways where the policy is served, and holds their calls during changes.
    This class has no other gateways; `Fleet.owner` returns one that has.

    All methods raise `StoreError`, and `ConflictError` if another owner has taken over.
    """

    async def open(self, servers: Sequence[Upstream], version: int) -> None:
        """Take over the run, whose servers have `version`; with `UNKNOWN` nothing is sent to them before the first update.

        Without servers calls wait until `serve`.
        """

    async def serve(self, servers: Sequence[Upstream], version: int) -> None:
        """Name the servers and their `version`, after `open` without servers and before the first hold."""

    async def close(self) -> None:
        """Tell other gateways that nobody serves the run any more. An error of the store is only logged."""

    @contextlib.asynccontextmanager
    async def hold(self, server: Upstream | None = None) -> AsyncIterator[Hold]:
        """During the block no gateway sends calls to this policy server, or with None to any, and the tokens of each call in
        flight are counted. An update in the block is of this server, or of all.

        If the block raises `PolicyServerError`, the old version goes on. After any other error, or with `Hold.lost`, the
        weights are unknown and the servers get no calls before the next update. Raises `GatewayError` for a server that the run
        does not have.
        """
        yield Hold()

    async def away(self, server: Upstream) -> None:
        """Tell that this server is started again: it gets no calls before `back`, and the others go on. Calls wait while every
        server is away."""

    async def back(self, server: Upstream, now: Upstream, version: int) -> None:
        """Tell that the server that was `away` is `now` this one, with the weights of `version`."""


class OtherPolicies(Protocol):
    """The policies of the runs whose calls a gateway answers although their trainers are elsewhere."""

    @property
    def known(self) -> Sequence[Policy]:
        """The policies whose calls it answers now."""

    def of(self, run: str) -> Policy:
        """Return the policy of a run. The calls of an unknown run wait until its trainer is found."""

    async def close(self) -> None:
        """Leave every run."""


class Fleet(Protocol):
    """Several gateways in front of one policy, as a plugin registers them with `register_fleets`. It has no state of its
    own."""

    def owner(self, store: Store, run: str, seed: int | None) -> PolicyOwner:
        """Return the trainer's part, for a run whose calls get seeds from `seed`; with None they get none."""

    def others(self, store: Store, hold_timeout: float, allowed: Allowed) -> OtherPolicies:
        """Return a gateway's part: the policies of other trainers' runs. Their servers must be `allowed`."""

    async def served_version(self, store: Store, run: str) -> int | None:
        """Return the version of a run's policy that its owner serves; None if it serves none or the version is unknown. Raises
        `StoreError`."""


def owner_of(store: Store, run: str, seed: int | None) -> PolicyOwner:
    """Return the owner of a run's policy: that of a plugin for several gateways if there is one, else one without other
    gateways."""
    return plugins().fleet("a trainer")().owner(store, run, seed) if plugins().names("fleets") else PolicyOwner()


class Policies:
    """The policies whose calls a gateway answers. `own` is the policy of `run` (empty: of all runs), served by the process that
    made the gateway; None if the gateway has none of its own."""

    def __init__(self, store: Store, own: Policy | None, run: str, hold_timeout: float, allowed: Allowed) -> None:
        self.own, self._run = own, run
        self.others: OtherPolicies | None = None
        """The policies of other trainers' runs; None without a plugin for them."""
        if plugins().names("fleets"):
            self.others = plugins().fleet("a gateway")().others(store, hold_timeout, allowed)

    @property
    def known(self) -> list[Policy]:
        """The gateway's own policy and those of other trainers' runs."""
        return [*([self.own] if self.own else []), *(self.others.known if self.others else ())]

    def of(self, run: str) -> Policy:
        """Return the policy for a key of this run. The calls of an unknown run wait until its trainer is found.

        Raises `RefusalError`: 401 for a key without a run if the gateway has no policy of its own, 501 for a key of another run
        without a plugin for such runs.
        """
        if self.own is not None and (not run or self._run in ("", run)):
            return self.own
        if not run:
            message = (
                "This server has no policy of its own, and the API key does not say which run it is of: get a new key."
            )
            raise RefusalError(401, "key_without_run", message)
        if self.others is None:
            why = plugins().missing(
                "fleets", f"a key of the run {run!r}, which is not served by this gateway's trainer,"
            )
            raise RefusalError(501, "run_elsewhere", why, [NO_RETRY])
        return self.others.of(run)

    async def close(self) -> None:
        """Leave other trainers' runs, and end the health checks of the own servers."""
        if self.others is not None:
            await self.others.close()
        if self.own is not None:
            await self.own.close()
