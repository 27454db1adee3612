"""A recorded rollout is run again: the agent's own code in this process, its model calls answered from the record.

The invariant: no model is asked, and nothing is stored. What the agent did otherwise than it is recorded is in the result.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from lightning.instrument import emit, install_tap
from lightning.instrument.recorded_tools import answer_tools
from lightning.plugins import plugins
from lightning.runner.protocol import Agent
from lightning.runner.seeding import seed_process
from lightning.runner.worker import run_agent
from lightning.types import Fault, Json, Outcome, ToolEvent

from lightning_debug.divergence import Divergence
from lightning_debug.recorded import RecordedRollout
from lightning_debug.replay_server import ReplayServer


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay showed. `answered` of `calls` recorded calls were asked for; `missing` are the callers of those that were
    not. `outcome` is the agent's, None where a program of another language ran (`--serve`). `stopped` says that it was ended
    after the calls that were asked for (`until`). `changes` are differences of the outcome and of the tools, in words."""

    calls: int
    answered: int
    missing: tuple[str, ...]
    divergences: tuple[Divergence, ...]
    changes: tuple[str, ...] = ()
    outcome: Outcome | None = None
    stopped: bool = False

    @property
    def same(self) -> bool:
        """Whether the agent did what is recorded, as far as it was replayed."""
        return not self.divergences and not self.changes and (self.stopped or not self.missing)

    def __str__(self) -> str:
        lines = [f"{self.answered} of {self.calls} recorded calls were asked for and answered; 0 calls of a model"]
        if self.missing and not self.stopped:
            lines.append(f"{len(self.missing)} recorded calls were not asked for: {_counted(self.missing)}")
        lines += [str(each) for each in self.divergences]
        lines += self.changes
        return "\n".join(
            [*lines, "the replay is the recorded rollout" if self.same else "the replay is another rollout"]
        )


def replay_agent(
    recorded: RecordedRollout,
    agent: Agent,
    *,
    until: int | None = None,
    recorded_tools: bool = True,
    adapters: Sequence[str] | None = None,
    reroute: Sequence[str] = (),
    prompts: Mapping[str, str] | None = None,
    seed: int | None = None,
) -> ReplayResult:
    """Run an agent once more on its task.

    `until` ends the replay after so many calls. With `recorded_tools` each `lightning.tool` gives what it gave; other tools
    run. `prompts` and `seed` are those of the recorded rollout (`how_it_ran`). `random`, numpy, torch and `uuid.uuid4` are
    seeded while the agent runs, and are random again afterwards. The agent runs in this thread, or in another one while an
    event loop runs here.
    """
    with ExitStack() as closing:
        server = closing.enter_context(served(ReplayServer(recorded, until, prompts=prompts or {}, seed=seed)))
        closing.callback(install_tap(reroute))
        closing.callback(plugins().install_adapters(emit, adapters))
        if recorded_tools:
            closing.enter_context(answer_tools(_Tools(recorded.tool_events).take))
        closing.callback(seed_process, None)
        seed_process(seed)
        outcome = _run(recorded, agent, server)
    return result_of(server, outcome)


@contextmanager
def served(server: ReplayServer) -> Iterator[ReplayServer]:
    """The server on an event loop in a thread of its own, so that the agent may block this one."""
    ready, done = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    async def serve() -> None:
        async with server:
            ready.set()
            await asyncio.to_thread(done.wait)

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:  # noqa: BLE001 — raised where the server was asked for
            failed.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="lightning-replay", daemon=True)
    thread.start()
    ready.wait()
    try:
        if failed:
            raise failed[0]
        server.count_threads()
        yield server
    finally:
        done.set()
        thread.join()


def _run(recorded: RecordedRollout, agent: Agent, server: ReplayServer) -> Outcome:
    def run() -> Outcome:
        with asyncio.Runner() as loop:
            return run_agent(agent, recorded.rollout.task, server.llm, loop)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    with ThreadPoolExecutor(1, "lightning-agent") as pool:
        return pool.submit(contextvars.copy_context().run, run).result()


def result_of(server: ReplayServer, outcome: Outcome | None = None) -> ReplayResult:
    """What a server has seen, and the outcome of the agent that asked it."""
    stopped = server.stopped and not server.divergences
    changes = () if outcome is None or stopped else tuple(_changes(server.recorded, outcome, server.divergences))
    return ReplayResult(
        calls=len(server.recorded.calls),
        answered=len(server.served),
        missing=tuple(call.caller for call in server.left),
        divergences=tuple(server.divergences),
        changes=changes,
        outcome=outcome,
        stopped=stopped,
    )


def _changes(recorded: RecordedRollout, outcome: Outcome, divergences: Sequence[Divergence]) -> Iterator[str]:
    """How an outcome differs from the recorded one. After a divergence the agent's failure is no news."""
    before = recorded.rollout
    if outcome.fault is not None and before.reward is not None:
        if not divergences:
            yield f"the agent failed, and was rewarded with {before.reward:g} when it was recorded: {outcome.error}"
        return
    if outcome.reward is not None and before.reward is None and before.fault in (Fault.AGENT, Fault.POLICY):
        yield f"the agent was rewarded with {outcome.reward:g}, and failed when it was recorded: {before.error}"
        return
    if before.reward is not None and (outcome.reward, outcome.rewards) != (before.reward, dict(before.rewards)):
        yield f"the reward is {outcome.reward:g} {dict(outcome.rewards)}, and was {before.reward:g} {dict(before.rewards)}"
    ran, had = Counter(map(_tool_run, outcome.tool_events)), Counter(map(_tool_run, recorded.tool_events))
    for name, arguments, status, output in (had - ran) + (ran - had):
        run = (name, arguments, status, output)
        when = "more often when it was recorded" if had[run] > ran[run] else "more often now"
        yield f"the tool {name}({arguments[:120]}) gave {status} {output[:120]!r} {when}"


def _tool_run(event: ToolEvent) -> tuple[str, str, str, str]:
    return event.name, _text(event.arguments), event.status, event.output or event.error


def _text(value: Json) -> str:
    return json.dumps(value, sort_keys=True)


class _Tools:
    """The recorded runs of tools, each given once: in their order for equal arguments."""

    def __init__(self, events: Sequence[ToolEvent]) -> None:
        self._left = list(events)
        self._lock = threading.Lock()

    def take(self, name: str, arguments: Json) -> ToolEvent | None:
        """The first run of this tool with these arguments that has not been given."""
        with self._lock:
            wanted = (name, _text(arguments))
            found = next((event for event in self._left if (event.name, _text(event.arguments)) == wanted), None)
            if found is not None:
                self._left.remove(found)
            return found


def _counted(callers: Sequence[str]) -> str:
    return ", ".join(f"{caller} ({count})" for caller, count in Counter(callers).items())
