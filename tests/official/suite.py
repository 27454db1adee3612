"""Runs programs as rollouts (worker process, real gateway, real store, a policy server that refuses what vLLM refuses) and
compares what the store has with what the policy server said.

The invariant: nothing is compared with what lightning says of itself. Truth is the policy server's own log and the committed
list of who calls.

    python -m tests.official.suite PROGRAM ...      results as JSON lines; what `make test-official` runs in each environment
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning.config import GatewayConfig, RunnerConfig
from lightning.gateway import Gateway, Upstream
from lightning.runner.attempt_completion import report
from lightning.runner.process import ProcessRunner
from lightning.store.memory import MemoryStore
from lightning.testing import FakeVLLM, Reply
from lightning.testing.vllm_replies import ChatShape, tokenize_reply
from lightning.types import CallStatus, Outcome, Rollout, Run, Status, Task, ToolEvent, Transition

from tests.official.listing import CACHE, Listing, Program, load
from tests.official.plausible import answer
from tests.official.program import run_program
from tests.official.provider import KEY, provider

TIMEOUT = 240.0
CONTEXT = 32_768
"""Tokens of the policy server's context: less than some clients ask for as an answer."""


@dataclass
class Result:
    """What one program did. `problems` are empty where all is as it should be."""

    program: str
    framework: str
    version: str = ""
    calls: int = 0
    refused: int = 0
    callers: dict[str, int] = field(default_factory=dict)
    tools: int = 0
    error: str = ""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    def wrong(self, kind: str) -> bool:
        """Whether there is a problem of a kind: `calls`, `names`, `tools`, `end`."""
        return any(problem.startswith(f"{kind}:") for problem in self.problems)


class Truth:
    """The policy server's own log."""

    def __init__(self) -> None:
        self.said: list[tuple[Mapping[str, Any], Reply]] = []

    def script(self, body: Mapping[str, Any]) -> Reply:
        """Answer, and keep what was said."""
        reply = answer(body)
        self.said.append((body, reply))
        return reply


class Suite:
    """The servers, and programs run one after another."""

    def __init__(self, store: MemoryStore, gateway: Gateway, fake: FakeVLLM, truth: Truth, listing: Listing) -> None:
        self._store, self._gateway, self._fake, self._truth, self._listing = store, gateway, fake, truth, listing
        self._numbers = itertools.count()
        self._keys: dict[str, str] = {}
        self.seen: dict[str, tuple[Sequence[Transition], Outcome]] = {}
        """The calls that were stored of each program, and how its attempt ended."""

    async def run(self, programs: Iterable[Program]) -> AsyncIterator[Result]:
        """Run them; a framework's own fork server for each, which has its imports once."""
        for (_, preload), group in itertools.groupby(programs, key=lambda one: (one.framework, one.preload)):
            config = RunnerConfig(concurrency=1, timeout=TIMEOUT, max_attempts=1, preload=tuple(preload))
            runner = ProcessRunner(run_program, config)
            await runner.start()
            try:
                for program in group:
                    yield await self._one(program, runner)
            finally:
                await runner.close()

    def left_behind(self) -> list[str]:
        """Processes that programs started and that still run, by the key in their environment."""
        found = []
        for place in Path("/proc").glob("[0-9]*/environ"):
            try:
                variables = place.read_bytes()
            except OSError:  # it has ended, or is another user's
                continue
            found += [
                f"{name}: process {place.parent.name}" for name, key in self._keys.items() if key.encode() in variables
            ]
        return found

    async def _one(self, program: Program, runner: ProcessRunner) -> Result:
        path, folders = self._listing.place(program)
        identity = f"program-{next(self._numbers)}"
        output = CACHE / "output" / f"{program.name.replace('/', '-')}.txt"
        output.parent.mkdir(parents=True, exist_ok=True)
        task = Task(
            {
                "path": str(path),
                "module": program.path.removesuffix(".py").replace("/", ".") if program.module else "",
                "folders": folders,
                "arguments": list(program.arguments),
                "input": list(program.input),
                "environment": dict(program.environment),
                "output": str(output),
            }
        )
        await self._store.create_rollouts([Rollout(identity, "official", task, identity)])
        (lease,) = await self._store.lease("official", "suite", ttl=3600.0)
        llm = self._gateway.llm(lease)
        self._keys[program.name] = llm.api_key
        said, aborted = len(self._truth.said), len(self._fake.aborted)
        outcome = await runner.run(lease, llm)
        await report(self._store, identity, lease.attempt, outcome, self._gateway.parts.line)
        calls = await self._store.transitions(identity)
        self.seen[program.name] = calls, outcome
        result = Result(program.name, program.framework, _version(program.distribution), error=outcome.error)
        result.seconds = round(outcome.seconds, 1)
        truth = self._truth.said[said:]
        result.calls = len(truth)
        result.refused = sum(one.status is CallStatus.REFUSED for one in calls)
        if result.refused != program.refused:
            result.problems.append(f"calls: {result.refused} were refused instead of {program.refused}")
        result.problems += _calls(truth, calls)
        result.callers = dict(Counter("/".join(one.caller.path) or one.caller.agent for one in _ok(calls)))
        if result.callers != dict(program.callers):
            result.problems.append(f"names: {result.callers} instead of {dict(program.callers)}")
        result.tools = len(outcome.tool_events)
        result.problems += _tools(program, truth, outcome.tool_events)
        (rollout,) = (await self._store.list_rollouts("official", status=None, limit=10**6)).items[-1:]
        result.problems += _end(program, rollout.error or outcome.error, rollout.status)
        if self._fake.in_flight():
            result.problems.append(f"end: {len(self._fake.in_flight())} calls are still answered")
        if len(self._fake.aborted) > aborted:
            result.problems.append(f"end: {len(self._fake.aborted) - aborted} calls were given up")
        return result


def _ok(calls: Iterable[Transition]) -> list[Transition]:
    return [one for one in calls if one.status is CallStatus.OK]


def _calls(truth: Sequence[tuple[Mapping[str, Any], Reply]], calls: Iterable[Transition]) -> list[str]:
    """Each answer recorded once, token by token."""
    shape = ChatShape()
    said = Counter(
        (tuple(shape.prompts(body)[0]), tuple(token.id for token in tokenize_reply(reply, 0))) for body, reply in truth
    )
    recorded = Counter((tuple(map(int, one.prompt_ids)), tuple(map(int, one.response_ids))) for one in _ok(calls))
    if said == recorded:
        return []
    lost, added = (said - recorded).total(), (recorded - said).total()
    return [f"calls: {lost} answers are not recorded as they were given, {added} records are of no answer"]


def _tools(
    program: Program, truth: Sequence[tuple[Mapping[str, Any], Reply]], events: Iterable[ToolEvent]
) -> list[str]:
    """Each tool whose result the model was shown was reported once, under the id of its call and its name."""
    if program.untold:
        return []
    asked = {call.id: call.name for _, reply in truth for call in reply.tool_calls}
    shown = {
        message.get("tool_call_id")
        for body, _ in truth
        for message in body["messages"]
        if message["role"] == "tool" and message.get("tool_call_id") in asked
    }
    reported = Counter((event.call_id, event.name) for event in events)
    due = {one: asked[one] for one in shown if not _is_none(program, asked[one])}
    problems = [f"tools: {due[one]!r} ran and was not reported" for one in due if (one, due[one]) not in reported]
    for (call_id, name), count in reported.items():
        if not call_id:
            problems.append(f"tools: {name!r} without the id of its call")
        elif asked.get(call_id) != name:
            problems.append(f"tools: {name!r} under the id of {asked.get(call_id, 'no call')!r}")
        elif count > 1:
            problems.append(f"tools: {name!r} reported {count} times")
    return problems


def _is_none(program: Program, name: str) -> bool:
    return any(name == one or (one.endswith("*") and name.startswith(one[:-1])) for one in program.not_tools)


def _end(program: Program, error: str, status: Status) -> list[str]:
    if program.raises:
        return [] if program.raises in error else [f"end: {error[-300:] or 'no error'} instead of {program.raises}"]
    return [] if status is Status.SUCCEEDED else [f"end: {status.value}: {error[-300:]}"]


def _version(distribution: str) -> str:
    try:
        return version(distribution) if distribution else ""
    except PackageNotFoundError:
        return ""


@asynccontextmanager
async def opened(listing: Listing) -> AsyncIterator[Suite]:
    """The suite, with its servers. Raises `AssertionError` where a program left a process behind."""
    store, truth = MemoryStore(), Truth()
    async with AsyncExitStack() as stack:
        url, keys = stack.enter_context(provider())
        # LiteLLM asks the network for prices at its import, which the fork server repeats.
        offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        stack.enter_context(_variables({"OPENAI_BASE_URL": url, "OPENAI_API_KEY": KEY, **offline}))
        await store.open()
        stack.push_async_callback(store.close)
        await store.put_run(Run("official", "official"))
        fake = await stack.enter_async_context(FakeVLLM(script=truth.script, max_model_len=CONTEXT))
        upstream, secret = Upstream(fake.url, fake.model), b"of strangers' programs, 32 bytes"
        gateway = Gateway(store, [upstream], GatewayConfig(), secret=secret)
        await gateway.start()
        stack.push_async_callback(gateway.close)
        suite = Suite(store, gateway, fake, truth, listing)
        yield suite
        assert suite.left_behind() == []
        assert set(keys) <= {KEY}, "a rollout's key went to the provider"


@contextmanager
def _variables(ours: Mapping[str, str]) -> Iterator[None]:
    """Set these, and see that nothing else changes the process's variables."""
    before = dict(os.environ)
    os.environ.update(ours)
    try:
        yield
        changed = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
        assert changed <= set(ours), f"variables of this process were changed: {changed}"
    finally:
        for name in ours:
            del os.environ[name]
        os.environ.update(before)


async def main(names: Sequence[str]) -> None:
    """Run the programs with these names, in the list's order, and write a line of JSON for each."""
    listing = load()
    programs = [one for one in listing.programs if one.name in names]
    async with opened(listing) as suite:
        async for result in suite.run(programs):
            sys.stdout.write(json.dumps(asdict(result)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
