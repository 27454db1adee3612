"""The servers of the conformance kit: the real gateway and store before a scripted policy server.

The invariant: the servers live on an event loop in a thread of their own, so an agent may block its own thread. All async
agents of a test session run on one other loop, since frameworks cache clients, which belong to the loop they were made on.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import json
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lightning.config import GatewayConfig
from lightning.gateway import Gateway, Upstream
from lightning.instrument import ActiveAttempt
from lightning.runner.attempt_completion import report
from lightning.runner.outcomes import raised, returned
from lightning.store.memory import MemoryStore
from lightning.store.protocol import Attempt, Store
from lightning.testing.contract_script import ReplyFormat, play
from lightning.testing.fake_vllm import FakeVLLM
from lightning.types import LLM, Json, Lease, Outcome, Rollout, Run, Task, ToolEvent, Transition

T = TypeVar("T")

LIMIT = 60.0
"""Most seconds of any operation of the kit; after them it counts as stuck."""
PAUSE = 20.0
"""Seconds after which a paused model resumes by itself."""


def with_sorted_results(body: str) -> str:
    """Return a request in which results of tools that ran at once are sorted by their calls' ids: some frameworks send them in
    the order in which the tools ended."""
    request = json.loads(body)
    groups = itertools.groupby(request.get("messages") or (), lambda message: message.get("role") == "tool")
    parts = [sorted(part, key=lambda told: told["tool_call_id"]) if is_tool else list(part) for is_tool, part in groups]
    return json.dumps(request | {"messages": [message for part in parts for message in part]} if parts else request)


@dataclass(frozen=True)
class Ran:
    """The record of one rollout. `answer` is the agent's final text; `error` is what the agent raised, or None."""

    answer: str
    error: BaseException | None
    calls: Sequence[Transition]
    events: Sequence[ToolEvent]
    bodies: Sequence[str] = ()
    """The requests as they reached the policy server, as JSON text in the order in which they arrived."""

    @property
    def agents(self) -> list[str]:
        """The agent of each call, in the order in which the calls began."""
        return [call.caller.agent for call in self.calls]


@dataclass
class House:
    """The servers of a test session. The methods block and may be called from any thread but the servers' own."""

    fake: FakeVLLM = field(default_factory=FakeVLLM)
    replies: ReplyFormat = field(default_factory=ReplyFormat)
    """How the framework words the script's requests and replies."""

    def __post_init__(self) -> None:
        if self.fake.script is None:
            self.fake.script = lambda body: play(body, self.replies)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="lightning-contract", daemon=True)
        self._store = MemoryStore()
        self._gateway: Gateway | None = None
        self._numbers = itertools.count()
        self._agents = asyncio.Runner(loop_factory=asyncio.new_event_loop)

    def start(self) -> None:
        """Start the servers."""
        self._thread.start()
        self.do(self._start())

    async def _start(self) -> None:
        await self.fake.start()
        await self._store.open()
        self._gateway = Gateway(
            self._store, [Upstream(self.fake.url, self.fake.model)], GatewayConfig(), secret=b"the conformance kit's"
        )
        await self._gateway.start()

    def close(self) -> None:
        """Stop the servers and the agents' loop."""
        self._agents.close()
        self.do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        if self._gateway is not None:
            await self._gateway.close()
        await self._store.close()
        await self.fake.close()
        await self._loop.shutdown_default_executor()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the servers' loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LIMIT)

    @property
    def store(self) -> Store:
        """The store. Use it in coroutines that `do` runs."""
        return self._store

    def play(self, agents: Coroutine[Any, Any, T]) -> T:
        """Run agents on their loop, in a context that ends with them."""
        return self._agents.run(agents, context=contextvars.copy_context())

    def lease(
        self,
        task: Task | None = None,
        *,
        parent: tuple[str, int, int] | None = None,
        config: Mapping[str, Json] | None = None,
    ) -> tuple[Lease, LLM]:
        """Create and lease a rollout, and return the lease with the agent's `llm`. With a `parent` it is a branch; `config` is
        its run's configuration."""
        name = f"contract-{next(self._numbers)}"
        return self.do(self._lease(name, task or Task(input=name), parent, config or {}))

    async def _lease(
        self, name: str, task: Task, parent: tuple[str, int, int] | None, config: Mapping[str, Json]
    ) -> tuple[Lease, LLM]:
        await self._store.put_run(Run(name, name, config))
        await self._store.create_rollouts([Rollout(id=name, run=name, task=task, group=name, parent=parent)])
        (lease,) = await self._store.lease(name, "contract", ttl=3600.0)
        assert self._gateway is not None, "the house has been started"
        return lease, self._gateway.llm(lease)

    def finish(self, lease: Lease, active: ActiveAttempt, answer: str, error: BaseException | None) -> Ran:
        """Report a rollout as the runner does, and read its record from the store."""
        outcome = returned(1.0, active, 0.0) if error is None else raised(error, active, 0.0)
        _, calls, attempt = self.end(lease, outcome)
        return Ran(answer, error, tuple(calls), tuple(attempt.tool_events))

    def end(self, lease: Lease, outcome: Outcome) -> tuple[Rollout, list[Transition], Attempt]:
        """Report an outcome as a runner does. Return the rollout, its calls and its attempt from the store."""
        rollout, attempt = lease.rollout.id, lease.attempt
        ended = self.do(self._report(rollout, attempt, outcome))
        return ended, self.calls(lease), self.do(self._store.attempts_of([(rollout, attempt)]))[0]

    async def _report(self, rollout: str, attempt: int, outcome: Outcome) -> Rollout:
        assert self._gateway is not None, "the house has been started"
        return await report(self._store, rollout, attempt, outcome, self._gateway.parts.line)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the model from sampling inside the block, at most for `PAUSE`: an agent may block the loop that would leave the
        block."""
        self.do(self._turn(sampling=False))
        try:
            yield
        finally:
            self.do(self._turn(sampling=True))

    async def _turn(self, *, sampling: bool) -> None:
        if sampling:
            self.fake.resume()
        else:
            self.fake.pause()
            self._loop.call_later(PAUSE, self.fake.resume)

    def calls(self, lease: Lease) -> list[Transition]:
        """Return the rollout's calls that are in the store by now."""
        return self.do(self._store.transitions(lease.rollout.id, lease.attempt))

    def bodies(self, start: int = 0) -> list[str]:
        """Return the requests to the policy server, as JSON, without the first `start`."""
        return [json.dumps(request.body) for request in self.fake.requests[start:]]

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait, on any loop, until a condition is true; errors name `what` is awaited. Raises `AssertionError` after
        `LIMIT`."""
        try:
            async with asyncio.timeout(LIMIT):
                while not condition():  # noqa: ASYNC110 — what is waited for happens on another loop
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"after {LIMIT:g} s still waiting for {what}") from None
