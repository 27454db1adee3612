"""A world of one trainer, some gateways, a policy server and a store, in time that is only counted, never waited for.

The gateways' parts are the real ones (`Member`, `Forwarder`, gates, version books), and so is `Owner`. What is made up: a store
whose connections are slow, stall and break; a policy server that notes which version sampled each token; processes that die.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from lightning.errors import PolicyServerError, StoreError
from lightning.gateway.dialects import Capture
from lightning.gateway.http import RefusalError
from lightning.gateway.policy import UNKNOWN, LiveCall
from lightning.gateway.upstream import Forwarder, Upstream
from lightning.policy_server.protocol import Update
from lightning.types import Json, VersionRun
from lightning_server.fleet.member import Member
from lightning_server.fleet.owner import Owner

RUN = "run"
SERVER = Upstream("http://127.0.0.1:1", "tiny")


class _Jumps(selectors.SelectSelector):
    """Instead of waiting for a timer, it is later."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(0)
        if not found and timeout is None:
            raise RuntimeError("everything waits for ever")
        if not found and timeout:
            self.loop.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose seconds cost nothing."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _Jumps()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


async def for_ever() -> None:
    await asyncio.get_running_loop().create_future()


@dataclass
class State:
    """The store's state, and how often it has changed."""

    values: dict[str, Json] = field(default_factory=dict)
    changes: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, key: str, value: Json) -> None:
        self.values[key] = value
        self.changes += 1
        self.changed.set()


class Line:
    """A process's connection to the store. `dead`: its process is; `stalled_until`: nothing moves; `broken`: it refuses."""

    def __init__(self, state: State, rng: random.Random, clock: Callable[[], float], slow: float) -> None:
        self._state, self._rng, self._clock, self._slow = state, rng, clock, slow
        self.dead = self.broken = False
        self.stalled_until = 0.0

    async def pass_(self) -> None:
        """A message is on its way, and arrives unless something is in its way."""
        slow = self._rng.random() < self._slow
        await asyncio.sleep(self._rng.uniform(0, 6.0 if slow else 0.02))
        await self.stand()

    async def stand(self) -> None:
        """Where the process would do something: it does not while it stands still, and never again when it is dead."""
        while self._clock() < self.stalled_until:
            await asyncio.sleep(self.stalled_until - self._clock())
        if self.dead:
            await for_ever()

    async def _do(self, operation: Callable[[], Json]) -> Json:
        await self.pass_()
        if self.broken:
            raise StoreError("no connection")
        done = operation()
        await self.pass_()
        if self.broken:
            raise StoreError("the connection broke before the answer")
        return done

    async def get_state(self, run: str, key: str) -> Json:
        assert run == ""
        return await self._do(lambda: self._state.values.get(key))

    async def put_state(self, run: str, key: str, value: Json, *, once: str | None = "") -> None:
        assert run == ""
        await self._do(lambda: self._state.put(key, value))

    async def keep_state(self, run: str, key: str, value: Json) -> Json:
        assert run == ""

        def keep() -> Json:
            if key not in self._state.values:
                self._state.put(key, value)
            return self._state.values[key]

        return await self._do(keep)

    @asynccontextmanager
    async def watch(self, run: str) -> AsyncIterator[Line]:
        assert run == ""
        self._known = self._state.changes
        yield self

    async def wait(self, timeout: float) -> bool:
        end = self._clock() + timeout
        while True:
            await self.stand()
            if self._state.changes != self._known:
                self._known = self._state.changes
                return True
            left = end - self._clock()
            if left <= 0:
                return False
            self._state.changed.clear()
            try:
                await asyncio.wait_for(self._state.changed.wait(), left)
            except TimeoutError:
                return False


@dataclass
class Request:
    """What the policy server knows of a call: which version sampled each token so far."""

    id: str
    length: int
    truth: list[int] = field(default_factory=list)
    status = 200

    @property
    def headers(self) -> dict[str, str]:
        """Of its answer."""
        return {}


class Server:
    """A policy server with a true version; None while weights are half loaded. It answers health checks, too."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.version: int | None = 0
        self.paused = False
        self.requests: dict[str, Request] = {}
        self.left: dict[str, int] = {}

    async def sample(self, request: Request) -> None:
        """All tokens of a request, one after another."""
        self.requests[request.id] = request
        while len(request.truth) < request.length:
            await asyncio.sleep(self._rng.uniform(0.05, 0.6))
            if not self.paused:
                assert self.version is not None
                request.truth.append(self.version)
        del self.requests[request.id]
        self.left[request.id] = request.length

    async def update(self, version: int, line: Line, *, fails: bool) -> Update:
        """As `policy_server.vllm_server` does it; `line` is the trainer's, which may die between any two of these."""

        async def step() -> None:
            await asyncio.sleep(self._rng.uniform(0, 0.5))
            await line.stand()

        await step()
        self.paused = True
        await step()
        counts = {key: len(request.truth) for key, request in self.requests.items()} | self.left
        counts = {key: n for key, n in counts.items() if n or self._rng.random() < 0.5}  # never scheduled, or just so
        await step()
        if fails:
            self.paused = False
            raise PolicyServerError("the file does not fit")
        self.version = None
        await step()
        self.version = version
        self.left = {}
        await step()
        self.paused = False
        await step()  # the probe
        return Update(version, counts)

    async def attach(self) -> int:
        """A new trainer finds it as a dead one left it."""
        if self.version is None:
            return UNKNOWN
        self.paused = False
        return self.version

    # what the gateway's client session is -----------------------------------------------------------------------
    @asynccontextmanager
    async def get(self, url: object, **_: object) -> AsyncIterator[Any]:
        class Well:
            status = 200

            @property
            def content(self) -> Self:
                return self

            async def iter_any(self) -> AsyncIterator[bytes]:
                yield b'{"data": [{"id": "%s"}]}' % SERVER.model.encode()

        yield Well()


@dataclass
class Call:
    """What became of a call: `refused`, or clean (`versions` are believed), or neither, for all the world knows."""

    started: float
    ended: float | None = None
    dispatched: float | None = None
    refused: str = ""
    clean: bool = False
    truth: list[int] = field(default_factory=list)
    versions: tuple[VersionRun, ...] = ()

    @property
    def believed(self) -> list[int]:
        return [[run.version for run in self.versions if run.start <= i][-1] for i in range(len(self.truth))]


class Gateway:
    """A gateway process: the real member and forwarder; calls as `CallEndpoint` makes them."""

    def __init__(self, world: World, hold_timeout: float) -> None:
        self._world = world
        self.line = world.line()
        self.member = Member(self.line, RUN, hold_timeout, world.loop.time)  # type: ignore[arg-type]
        self._forwarder = Forwarder()
        self._forwarder._session = _Session(world, self)  # type: ignore[assignment]
        self._numbers = iter(range(10**9))
        self.name = f"g{len(world.gateways)}"
        world.spawn(self.member.follow())

    async def call(self, length: int, *, streamed: bool) -> Call:
        loop, policy = self._world.loop, self.member.policy
        call = Call(loop.time())
        self._world.calls.append(call)
        live = LiveCall(f"{self.name}x{next(self._numbers)}", 1, 1, policy.version, Capture("c"))
        policy.calls.add(live)
        try:
            request = await self._forwarder.send(
                policy, "rollout", "/chat", {"length": length, "seed": 0}, [], live, _no_seed
            )
            call.dispatched = loop.time()
            await self._answer(request, live, streamed=streamed)
            await self._forwarder.settle(policy, live)
        except RefusalError as refusal:
            call.refused, call.ended = refusal.code, loop.time()
            return call
        finally:
            policy.calls.discard(live)
        call.truth = list(request.truth)
        call.versions = live.versions(0, len(call.truth))
        call.clean = not live.unsure
        call.ended = loop.time()
        return call

    async def _answer(self, request: Request, live: LiveCall, *, streamed: bool) -> None:
        """Read it as it comes, or when it is whole; and late."""
        choice = live.capture.choice(0)
        sampling = self._world.spawn(self._world.server.sample(request))
        while not sampling.done():
            await asyncio.sleep(0.2)
            if streamed:
                seen = len(request.truth)
                await self.line.stand()
                choice.add([0] * (seen - len(choice.response_ids)), None)
        await self._world.travel()
        await self.line.stand()
        choice.add([0] * (request.length - len(choice.response_ids)), None)


async def _no_seed(seed: int) -> int:
    raise AssertionError("the call has one")


@dataclass
class _Session:
    """aiohttp's client session: a request is on its way for a moment."""

    world: World
    gateway: Gateway

    async def post(self, url: object, *, data: bytes, headers: list[tuple[str, str]], **_: object) -> Request:
        import json

        await self.world.travel()
        return Request(dict(headers)["X-Request-Id"], json.loads(data)["length"])

    def get(self, url: object, **_: object) -> Any:
        return self.world.server.get(url)

    def request(self, verb: str, url: object, **_: object) -> Any:
        assert verb == "GET"
        return self.world.server.get(url)


class World:
    """All of it. Run something in it with `run`, let time pass with `advance`. `slow` is the share of slow messages."""

    def __init__(self, seed: int, slow: float = 0.02) -> None:
        self._slow = slow
        self.loop = VirtualLoop()
        self.rng = random.Random(seed)
        self.state = State()
        self.server = Server(self.rng)
        self.gateways: list[Gateway] = []
        self.calls: list[Call] = []
        self.owner: Owner | None = None
        self.owners: list[Owner] = []
        self.trainer: Line | None = None
        self.updating: asyncio.Task[None] | None = None
        self.version = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self.failures: list[BaseException] = []

    def line(self) -> Line:
        return Line(self.state, self.rng, self.loop.time, self._slow)

    def run(self, doing: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(doing)

    def advance(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))
        if self.failures:
            raise self.failures[0]

    def spawn(self, doing: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self.loop.create_task(doing)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.failures.append(task.exception())  # type: ignore[arg-type]

    async def travel(self) -> None:
        """A message between a gateway and the policy server; now and then a slow one."""
        await asyncio.sleep(self.rng.uniform(0, 2.0 if self.rng.random() < 0.1 else 0.05))

    # the trainer ------------------------------------------------------------------------------------------------
    def start_trainer(self) -> None:
        self.trainer = self.line()
        self.owner = Owner(self.trainer, RUN, clock=self.loop.time)  # type: ignore[arg-type]
        self.owners.append(self.owner)
        self.updating = self.spawn(self._open(self.owner, self.trainer))

    async def _open(self, owner: Owner, line: Line) -> None:
        await owner.open((), UNKNOWN)
        await line.stand()
        found = await self.server.attach()
        await owner.serve([SERVER], found)
        if found == UNKNOWN:
            await self._update(owner, line, fails=False)

    def start_update(self, *, fails: bool = False) -> None:
        if self.owner is not None and (self.updating is None or self.updating.done()):
            assert self.trainer is not None
            self.updating = self.spawn(self._update(self.owner, self.trainer, fails=fails))

    async def _update(self, owner: Owner, line: Line, *, fails: bool) -> None:
        try:
            async with owner.hold() as hold:
                self.version += 1
                hold.update = await self.server.update(self.version, line, fails=fails)
        except PolicyServerError:
            assert fails

    def kill_trainer(self) -> None:
        if self.trainer is not None:
            self.trainer.dead = True
        self.owner = self.trainer = self.updating = None

    def close(self) -> None:
        while tasks := asyncio.all_tasks(self.loop):  # some want to say goodbye, over lines that are dead
            for task in tasks:
                task.cancel()
            self.run(asyncio.sleep(10))
        self.run(self.loop.shutdown_asyncgens())
        self.loop.close()
