"""One run's policy as a gateway sees it: its policy servers, whether they may be asked now, and which version they have; and
whose policy a call is for.

The invariant: what is dispatched goes to the run's own servers, while the gate is open, with the version they have then. While
a hold is active nothing new is sent, and no call that ends meanwhile is recorded before its tokens' versions are known; when
the last hold ends everything that waited goes on, in the order it came.

A token belongs to the version that its server had loaded when it sampled the token. A call starts with the version of the
server that it is sent to; each update of that server splits it at the number of tokens the old weights had sampled when vLLM
froze. A call of which that cannot be said is never trained on.

A run's calls go to that run's policy servers and to no other's, whatever model they name.
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
from lightning.types import VersionRun

UPDATING = "The policy's weights are being updated"
UNKNOWN = -1
"""The version of weights that nobody can name: an update broke off."""


class Gate:
    """Open unless at least one hold is active. `timeout` is how many seconds a call may wait in all; `waiting` counts calls."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._holds: dict[object, str] = {}
        self._news = asyncio.Event()
        self.waiting = 0

    @property
    def closed(self) -> bool:
        """Whether a hold is active."""
        return bool(self._holds)

    def close(self, holder: object, why: str = UPDATING) -> None:
        """Close the gate until `holder` opens it again; `why` begins the message of those who wait too long."""
        self._holds[holder] = why

    def open(self, holder: object) -> None:
        """End the hold of `holder`, if it has one."""
        if self._holds.pop(holder, None) is not None and not self._holds:
            self._news.set()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Close the gate for the length of the block. Holds may overlap."""
        holder = object()
        self.close(holder)
        try:
            yield
        finally:
            self.open(holder)

    def stir(self) -> None:
        """What calls wait for in `settle` may have come true."""
        self._news.set()

    async def wait(self, spent: float = 0.0) -> float:
        """Return at once when open, else when the hold ends; the answer is how many seconds a call has waited now.

        `spent` are those it had waited before. Raises `RefusalError` (503) when it has waited too long in all.
        """
        if not self._holds:
            return spent
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.waiting += 1
        try:
            await self._until(lambda: not self._holds, self.timeout - spent)
        except TimeoutError:
            why = next(iter(self._holds.values()), UPDATING)
            message = (
                f"{why} and this took longer than {self.timeout:g} s. "
                "Send the request again; if updates are this slow, raise gateway.hold_timeout."
            )
            raise RefusalError(503, "held_too_long", message, [(b"retry-after", b"1")]) from None
        finally:
            self.waiting -= 1
        return spent + loop.time() - began

    async def settle(self, settled: Callable[[], bool]) -> bool:
        """Wait for the same, or until `settled`, but no longer than the timeout; return whether either came true."""
        if self._holds and not settled():
            with contextlib.suppress(TimeoutError):
                await self._until(lambda: not self._holds or settled(), self.timeout)
        return not self._holds or settled()

    async def _until(self, done: Callable[[], bool], seconds: float) -> None:
        async with asyncio.timeout(seconds):
            while not done():  # another hold may have begun before this one woke up
                self._news.clear()
                await self._news.wait()


@dataclass(slots=True, eq=False)
class LiveCall:
    """A call that vLLM may still be sampling.

    `request_id` is what was sent as `X-Request-Id`, `choices` how many completions it makes (`n` for each prompt), `sent`
    says that it reached a server (`upstream`, which was in `slot` then), `seen` how many tokens of each choice had come before
    the last hold. `unsure` calls may have tokens of versions that nobody here has heard of; `unserved` ones failed because no
    server was there, or theirs went away. While `waits_for_bytes`, the last sign of life was at `heard_at` (the loop's clock).
    """

    request_id: str
    choices: int
    n: int
    base: int
    capture: Capture
    runs: dict[int, list[VersionRun]] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    sent: bool = False
    unsure: bool = False
    unserved: bool = False
    slot: Slot | None = None
    upstream: Upstream | None = None
    waits_for_bytes: bool = False
    heard_at: float = 0.0

    def dispatch(self, slot: Slot, now: float) -> None:
        """It is being sent to the server in this slot."""
        self.slot, self.upstream = slot, slot.upstream
        self.base, self.sent, self.unsure = slot.version, True, False
        self.waits_for_bytes, self.heard_at = True, now
        self.runs.clear()
        self.seen.clear()

    def retract(self) -> None:
        """No server has begun to work on it: it may be sent again."""
        self.sent = self.waits_for_bytes = False

    @property
    def replaced(self) -> bool:
        """Whether another server, maybe at the same address, is now in the place of the one that it was sent to."""
        return self.slot is not None and self.slot.upstream is not self.upstream

    def versions(self, choice: int, length: int) -> tuple[VersionRun, ...]:
        """The runs of a choice, clipped to its `length` response tokens."""
        runs = self.runs.get(choice)
        if runs is None:
            return (VersionRun(0, self.base),)
        return (runs[0], *(run for run in runs[1:] if run.start < length))

    def key(self, index: int) -> str:
        """How `Update.in_flight` names a choice (the inverse of `policy_server.control.client_key`)."""
        prompt, choice = divmod(index, self.n)
        if self.n == 1:
            return self.request_id if prompt == 0 else f"{prompt}_{self.request_id}"
        return f"{choice}_{self.request_id}" + (f"-{prompt}" if prompt else "")

    def split(self, choice: int, tokens: int, version: int) -> None:
        """From response token `tokens` on, `choice` is sampled by `version`."""
        runs = self.runs.setdefault(choice, [VersionRun(0, self.base)])
        while runs and runs[-1].start >= tokens:
            runs.pop()
        runs.append(VersionRun(tokens if runs else 0, version))


class Policy:
    """The parts that every call of a run goes through, and the calls that the next update could touch. `hold_timeout` is in
    seconds, `version` that of the weights which its servers have.

    `check` is called before anything is taken for known: the member of a fleet looks at its clock there. With a `seed`
    calls that have none are given one. `used` is when the last call came (the loop's clock);
    `told` whether it has been heard which servers there are.
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
        self.gate = Gate(hold_timeout)
        self.calls: set[LiveCall] = set()
        self.seed, self.check = seed, check
        self.used = 0.0
        self.told = bool(upstreams)
        self._health: asyncio.Task[None] | None = None
        self.pool.on_other = self.lose

    @property
    def version(self) -> int:
        """The newest version of which it was told. While servers are updated one after another some have an older one."""
        return self.pool.version

    @property
    def sampling(self) -> int:
        """How many calls a server may be sampling."""
        return sum(call.waits_for_bytes for call in self.calls)

    def keys(self) -> list[str]:
        """How `Update.in_flight` names every choice that a server may be sampling."""
        return [call.key(index) for call in self.calls if call.sent for index in range(call.choices)]

    def freeze(self) -> None:
        """Note how far every call has come, before an update begins."""
        for call in self.calls:
            call.seen = {index: len(choice.response_ids) for index, choice in call.capture.choices.items()}

    def update(self, update: Update, server: Upstream | None = None) -> None:
        """A server, or each, has new weights: split its calls in flight at the tokens the old weights had sampled. Call it
        inside a hold, after the update.

        Several servers may be updated one after another, each in a hold of its own: name the `server` then. Whoever updates all
        of them in one hold passes one `Update` with their `in_flight` merged.
        A choice that is missing from `in_flight` was never scheduled before the update and is wholly the new version's;
        unless tokens of it had been seen by then, which a server that does not report finished requests leaves out.
        Raises `GatewayError` for a server that is none of the policy's.
        """
        self.pool.updated(update.version, server)
        for call in self.calls:
            if not call.sent or server not in (None, call.upstream):
                continue
            for index in range(call.choices):
                tokens = update.in_flight.get(call.key(index))
                if tokens is not None or not call.seen.get(index):
                    call.split(index, tokens or 0, update.version)

    def lose(self) -> int:
        """Weights may have changed unheard of: whatever a server may be sampling is unsure. Return how many calls that are."""
        lost = [call for call in self.calls if call.sent and not call.unsure]
        for call in lost:
            call.unsure = True
        self.gate.stir()
        return len(lost)

    def check_health(self, session: aiohttp.ClientSession) -> None:
        """Look after the servers from now on, until `close`."""
        if self._health is None:
            self._health = asyncio.create_task(self.pool.watch(session), name="lightning-gateway-health")

    async def close(self) -> None:
        """Look no longer."""
        if self._health is not None:
            await end(self._health)
            self._health = None


@dataclass(slots=True)
class Hold:
    """A hold that every gateway keeps. Set `update` when the weights have changed, those of one `server` or of all, and `lost`
    when nobody knows what they are."""

    update: Update | None = None
    server: Upstream | None = None
    lost: bool = False


class PolicyOwner:
    """What owns the policy of one run: it tells those gateways that are not its own where the policy is served, and holds their
    calls while that changes. This one has none to tell; `Fleet.owner` gives one that has.

    All methods raise `StoreError`; `ConflictError` when another owner has taken over.
    """

    async def open(self, servers: Sequence[Upstream], version: int) -> None:
        """Take the run over, serving `version` (`UNKNOWN`: nothing is sent to the servers before the first update).

        Without servers call `serve` when there are some: until then calls wait.
        """

    async def serve(self, servers: Sequence[Upstream], version: int) -> None:
        """After `open` without servers, and before the first hold: these serve `version` (`UNKNOWN`, as there)."""

    async def close(self) -> None:
        """Say that nobody serves the run any more. What the store refuses then is only logged."""

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[Hold]:
        """For the length of the block no gateway sends anything to the policy servers, and each call in flight is counted.

        When the block ends with a `PolicyServerError` the old version goes on; with any other error, or when it says so, nobody
        knows what the servers have, and they get no calls before the next update. Raises `GatewayError` for an update of a
        server that is none of the run's.
        """
        yield Hold()

    @contextlib.asynccontextmanager
    async def moving(self, servers: Callable[[], Sequence[Upstream]]) -> AsyncIterator[None]:
        """For the length of the block new calls wait, while dead servers are brought back with the weights they had.

        `servers` says where they are then. When the block fails none is left.
        """
        yield


class OtherPolicies(Protocol):
    """The policies of the runs that one gateway answers calls of, and whose trainers are elsewhere."""

    @property
    def known(self) -> Sequence[Policy]:
        """Those that it answers calls of now."""

    def of(self, run: str) -> Policy:
        """The policy of a run; of one that is not known, one whose calls wait until its trainer is found."""

    async def close(self) -> None:
        """Leave every run."""


class Fleet(Protocol):
    """What a plugin registers with `register_fleets`: several gateways before one policy. It keeps nothing itself."""

    def owner(self, store: Store, run: str, seed: int | None) -> PolicyOwner:
        """The trainer's end, for a run whose calls are seeded with `seed` (None: they are not)."""

    def others(self, store: Store, hold_timeout: float, allowed: Allowed) -> OtherPolicies:
        """A gateway's end: what it knows of runs that are not its own. Servers must be `allowed`."""

    async def served_version(self, store: Store, run: str) -> int | None:
        """The version of a run's policy that its owner says to serve; None where it serves none, or nobody can name it. Raises
        `StoreError`."""


def owner_of(store: Store, run: str, seed: int | None) -> PolicyOwner:
    """What owns the policy of a run, by the plugin that knows of other gateways, if there is one."""
    return plugins().fleet("a trainer")().owner(store, run, seed) if plugins().names("fleets") else PolicyOwner()


class Policies:
    """`own` is the policy of `run` (empty: of all), served by whoever made this gateway; None where it has only joined ones."""

    def __init__(self, store: Store, own: Policy | None, run: str, hold_timeout: float, allowed: Allowed) -> None:
        self.own, self._run = own, run
        self.others: OtherPolicies | None = None
        """Those of runs whose trainers are elsewhere, where a plugin knows of them."""
        if plugins().names("fleets"):
            self.others = plugins().fleet("a gateway")().others(store, hold_timeout, allowed)

    @property
    def known(self) -> list[Policy]:
        """The own policy and those of the runs that were joined."""
        return [*([self.own] if self.own else []), *(self.others.known if self.others else ())]

    def of(self, run: str) -> Policy:
        """The policy for keys of this run; of an unknown run, one whose calls wait until its trainer is found.

        Raises `RefusalError`: 401 for a key that names no run where there is no policy of the gateway's own, 501 for one of
        another run where no plugin knows of those.
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
        """Leave the runs of others; look after the own servers no longer."""
        if self.others is not None:
            await self.others.close()
        if self.own is not None:
            await self.own.close()
