"""What the conformance kit runs agents against: the real gateway and store before a policy server with a script (`play`), a
model that plays every agent the kit asks for.

The invariant: the servers live on an event loop in a thread of their own, so an agent may block its own thread; and all
async agents of a test session run on one loop, since frameworks cache clients which belong to the loop they were made on.
An answer of the script is a function of the request alone, tool call ids included, so that two runs of one agent send the
same requests; what it cannot play is answered with a 400 that tells the adapter's author what the agent lacks.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import json
import re
import threading
import zlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lightning.config import GatewayConfig
from lightning.gateway import Gateway, Upstream
from lightning.instrument import Session
from lightning.runner.attempt_completion import report
from lightning.runner.outcomes import raised, returned
from lightning.store.memory import MemoryStore
from lightning.store.protocol import Attempt
from lightning.testing.fake_vllm import FakeVLLM
from lightning.testing.vllm_replies import Reply, ToolCall
from lightning.types import LLM, Lease, Outcome, Rollout, Run, Task, ToolEvent, Transition

T = TypeVar("T")

LIMIT = 60.0
"""Seconds that anything in the kit may take before it counts as stuck."""


@dataclass(frozen=True)
class Ran:
    """What one rollout left behind. `answer` is the agent's final text, or `error` is what it raised."""

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
    """The servers of a test session. Methods block and may be called from any thread but the servers' own."""

    fake: FakeVLLM = field(default_factory=lambda: FakeVLLM(script=play))

    def __post_init__(self) -> None:
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

    def play(self, agents: Coroutine[Any, Any, T]) -> T:
        """Run agents on their loop, in a context that ends with them."""
        return self._agents.run(agents, context=contextvars.copy_context())

    def lease(self, task: Task | None = None) -> tuple[Lease, LLM]:
        """A new rollout, leased, and what its agent needs."""
        name = f"contract-{next(self._numbers)}"
        return self.do(self._lease(name, task or Task(input=name)))

    async def _lease(self, name: str, task: Task) -> tuple[Lease, LLM]:
        await self._store.put_run(Run(name, name))
        await self._store.create_rollouts([Rollout(id=name, run=name, task=task, group=name)])
        (lease,) = await self._store.lease(name, "contract", ttl=3600.0)
        assert self._gateway is not None, "the house has been started"
        return lease, self._gateway.llm(lease)

    def finish(self, lease: Lease, session: Session, answer: str, error: BaseException | None) -> Ran:
        """Report a rollout as the runner does, and read from the store what it left there."""
        outcome = returned(1.0, session, 0.0) if error is None else raised(error, session, 0.0)
        rollout, attempt = lease.rollout.id, lease.attempt
        self.do(self._store.complete(rollout, attempt, outcome))
        events = self.do(self._store.attempts_of([(rollout, attempt)]))[0].tool_events
        return Ran(answer, error, tuple(self.calls(lease)), tuple(events))

    def end(self, lease: Lease, outcome: Outcome) -> tuple[Rollout, list[Transition], Attempt]:
        """Report an outcome as a runner does; what the store has then."""
        rollout, attempt = lease.rollout.id, lease.attempt
        ended = self.do(report(self._store, rollout, attempt, outcome))
        return ended, self.calls(lease), self.do(self._store.attempts_of([(rollout, attempt)]))[0]

    def calls(self, lease: Lease) -> list[Transition]:
        """The rollout's calls that are in the store by now."""
        return self.do(self._store.transitions(lease.rollout.id, lease.attempt))

    def bodies(self, start: int = 0) -> list[str]:
        """The requests that have reached the policy server since it had `start` of them."""
        return [json.dumps(request.body) for request in self.fake.requests[start:]]

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait, on any loop, for something to come true. Raises `AssertionError` after `LIMIT`."""
        try:
            async with asyncio.timeout(LIMIT):
                while not condition():  # noqa: ASYNC110 — what is waited for happens on another loop
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"after {LIMIT:g} s still waiting for {what}") from None


ANSWER = "The answer is 42."
HANG = "hang"
"""A user text with this word is answered after `HANG_SECONDS`."""
HANG_SECONDS = 60.0
REFUSE = "refuse"
"""A user text with this word is answered with a 400, which clients do not retry."""
BAD = "bad"
"""A user text with this word makes the solver call its tool with an expression that fails, and then with a good one."""

NAMED = re.compile(r"You are (\w+)\.")


def play(body: Mapping[str, Any]) -> Reply:
    """What the model says to a chat request, by the agent's instructions and the last user message."""
    messages = body["messages"]
    system = " ".join(text_of(item) for item in messages if item["role"] in ("system", "developer"))
    found = NAMED.search(system)
    if found is None:
        return _refusal(f"the system message is {system!r}; the kit's agents say 'You are NAME.' and nothing else")
    said = [number for number, item in enumerate(messages) if item["role"] == "user"]
    text = text_of(messages[said[-1]]) if said else ""
    results = sum(item["role"] == "tool" for item in messages[said[-1] if said else 0 :])
    if REFUSE in text:
        return _refusal("the kit's model refuses, as it was told to")
    parts = {"solver": _solver, "boss": _boss, "writer": _writer, "checker": _checker, "echo": _echo}
    part = parts.get(found[1])
    if part is None:
        return _refusal(f"the agent {found[1]!r} is not in the kit: there are {', '.join(parts)}")
    reply = part(body, text, results)
    return Reply(reply.text, delay=HANG_SECONDS) if HANG in text else reply


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message, whose content is a string or a list of parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else " ".join(str(part.get("text", "")) for part in content)


def _solver(body: Mapping[str, Any], text: str, results: int) -> Reply:
    expressions = ["bad", "6 * 7"] if BAD in text else ["6 * 7"]
    if results >= len(expressions):
        return Reply(ANSWER)
    return _calls(body, {"calculator": expressions[results]}, only="expression")


def _boss(body: Mapping[str, Any], text: str, results: int) -> Reply:
    return Reply("Both have answered.") if results else _calls(body, {"ask_math": text, "ask_echo": text})


def _writer(_body: Mapping[str, Any], text: str, _results: int) -> Reply:
    return Reply(f"A draft about {text}")


def _checker(_body: Mapping[str, Any], _text: str, _results: int) -> Reply:
    return Reply("Approved by the checker.")


def _echo(_body: Mapping[str, Any], text: str, _results: int) -> Reply:
    return Reply(f"Echo of {text}")


def _calls(body: Mapping[str, Any], wanted: Mapping[str, str], only: str = "") -> Reply:
    """Tool calls, in parallel, each with a text as its first parameter (or the one called `only`)."""
    offered = {item["function"]["name"]: item["function"] for item in body.get("tools") or ()}
    missing = sorted(set(wanted) - set(offered))
    if missing:
        return _refusal(f"the agent offers the tools {sorted(offered)}; the kit needs it to have {missing}")
    calls = []
    for number, (name, text) in enumerate(wanted.items()):
        schema = offered[name].get("parameters") or {}
        parameters: Sequence[str] = list(schema.get("required") or schema.get("properties") or ())
        if not parameters or (only and only not in parameters):
            return _refusal(f"the tool {name} has the parameters {parameters}; the kit needs {only or 'a text'!r}")
        arguments = json.dumps({only or parameters[0]: text})
        calls.append(ToolCall(name, arguments, _call_id(body["messages"], number)))
    return Reply(tool_calls=calls)


def _call_id(messages: Sequence[Mapping[str, Any]], number: int) -> str:
    """Different in each turn of a conversation, the same when the conversation is repeated."""
    seed = json.dumps([messages, number], sort_keys=True).encode()
    return f"chatcmpl-tool-{zlib.crc32(seed):08x}{len(messages):02x}{number:02x}"


def _refusal(message: str) -> Reply:
    return Reply(status=400, message=message)
