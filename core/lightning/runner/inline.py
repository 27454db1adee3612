"""Runs agents inside this process: async ones as tasks, sync ones in threads. `run_here` runs one attempt in the caller's
thread.

The invariant: what an agent raises or returns never reaches another rollout. `InlineRunner` says what it cannot contain: for
agents that may crash or hang, use `ProcessRunner`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import os
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import NamedTuple

from lightning.asyncio_utils import to_its_end
from lightning.config import RunnerConfig
from lightning.errors import RunnerError
from lightning.instrument import ActiveAttempt, activate, emit, install_tap
from lightning.instrument.providers import own, remember
from lightning.plugins import plugins
from lightning.runner.agent_serialization import check_agent
from lightning.runner.outcomes import failed, raised, returned, sanitized
from lightning.runner.protocol import Agent, Reward
from lightning.runner.stages import AttemptLine, AttemptRefusedError, attempt_line, enter
from lightning.runner.worker import in_loop, is_async, run_agent, without_children
from lightning.types import LLM, Fault, Lease, Outcome, Task

GRACE = 1.0
"""Seconds that a cancelled async agent has to clean up; then it is abandoned."""


class InlineRunner:
    """Runs agents in this process: for debugging with breakpoints, for notebooks, and for agents that cannot be sent elsewhere.

    Its limits: a sync agent that hangs is counted as timed out, but its thread goes on until the process ends, and so does an
    async agent that swallows its cancellation. An async agent that blocks its thread blocks every other one, timeouts included.
    A crash (`os._exit`, a segmentation fault) ends this process. `OPENAI_BASE_URL` and `OPENAI_API_KEY` are not set, since all
    agents share one environment: use `llm.base_url` and `llm.api_key`. A plugin's stage that encloses agents (`sandbox`) is
    refused.
    """

    def __init__(self, agent: Agent, config: RunnerConfig) -> None:
        check_agent(agent)
        self._agent = agent
        self._config = config
        self._slots = asyncio.Semaphore(config.concurrency)
        self._installed: Callable[[], None] | None = None
        self._line = attempt_line(config)
        self.concurrency = config.concurrency
        self.stages = self._line.versions
        self._line.refuse_enclosing()

    async def start(self) -> None:
        """Install the tap, the stages of plugins and the adapters. Raises `RunnerError` or `ConfigError` when a stage cannot do
        what the settings ask for. Idempotent."""
        if self._installed is not None:
            return
        await self._line.begin()
        self._slots = asyncio.Semaphore(self._config.concurrency)
        remember(own(os.environ))
        self._installed = _install(self._line, self._config)

    async def run(self, lease: Lease, llm: LLM) -> Outcome:
        """Run the agent on the leased task. Cancelling this cancels an async agent and abandons a sync one."""
        if self._installed is None:
            raise RunnerError("the inline runner has not been started: await runner.start() first")
        async with self._slots:
            with activate(llm) as attempt:
                outcome = sanitized(await self._attempt(lease.rollout.task, llm, attempt))
        try:
            self._line.heard(outcome, self._line.noted(outcome))
        except AttemptRefusedError as error:
            return failed(error.fault, str(error), seconds=outcome.seconds)
        return outcome

    async def close(self) -> None:
        """Remove the tap and the adapters. Idempotent; `start` may follow."""
        installed, self._installed = self._installed, None
        if installed is not None:
            installed()
            self._line.close()

    async def _attempt(self, task: Task, llm: LLM, attempt: ActiveAttempt) -> Outcome:
        started = time.monotonic()
        running = asyncio.create_task(self._guarded(task, llm, attempt))
        try:
            done, _ = await asyncio.wait({running}, timeout=self._config.timeout)
            if done:
                return running.result()
            text = f"the agent ran for more than {self._config.timeout:g} s (runner.timeout)"
            return failed(Fault.TIMEOUT, text, attempt, time.monotonic() - started)
        finally:
            running.cancel()
            await asyncio.wait({running}, timeout=GRACE)

    async def _guarded(self, task: Task, llm: LLM, attempt: ActiveAttempt) -> Outcome:
        started = time.monotonic()
        try:
            around = self._line.around(task, llm)
            if not around:
                return await self._outcome(task, llm, attempt)
            context, contexts = contextvars.copy_context(), contextlib.ExitStack()
            try:
                await to_its_end(asyncio.to_thread(context.run, enter, contexts, around, llm))
                return await asyncio.create_task(self._outcome(task, llm, attempt), context=context)
            finally:
                context.run(contexts.close)
        except AttemptRefusedError as error:
            return failed(error.fault, str(error), attempt, time.monotonic() - started)

    async def _outcome(self, task: Task, llm: LLM, attempt: ActiveAttempt) -> Outcome:
        started = time.monotonic()
        try:
            return returned(await self._call(task, llm, attempt), attempt, time.monotonic() - started)
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            return raised(error, attempt, time.monotonic() - started)
        except BaseException as error:  # noqa: BLE001 — isolates the user's agent, and the object that it returned
            return raised(error, attempt, time.monotonic() - started)

    async def _call(self, task: Task, llm: LLM, attempt: ActiveAttempt) -> Reward:
        agent = self._agent

        def call() -> Reward | Awaitable[Reward]:
            attempt.calls.begin()
            with without_children():
                return agent(task, llm)

        result = call() if is_async(agent) else await _in_thread(call)
        if not inspect.isawaitable(result):
            return result
        return await in_loop(lambda: result, attempt)  # after a thread, here


def _install(line: AttemptLine, config: RunnerConfig) -> Callable[[], None]:
    """Install the tap, the stages of plugins and the adapters in this process; return the undo."""
    with contextlib.ExitStack() as installing:
        installing.callback(install_tap(config.reroute))
        installing.callback(line.install())
        installing.callback(plugins().install_adapters(emit, config.adapters))
        return installing.pop_all().close


def run_here(agent: Agent, task: Task, llm: LLM, loop: asyncio.Runner, config: RunnerConfig) -> Outcome:
    """Run one attempt in this thread, with the tap, the adapters and the plugins' stages that a runner with these settings has.
    Raises `RunnerError` for a stage that cannot begin."""
    line = attempt_line(config)
    loop.run(line.begin())
    with contextlib.ExitStack() as installed:
        installed.callback(_install(line, config))
        return run_agent(agent, task, llm, loop, line)


async def _in_thread(function: Callable[[], Reward | Awaitable[Reward]]) -> Reward | Awaitable[Reward]:
    """Run a function in a daemon thread of its own with a copy of the context, and return its result.

    Not in a pool: threads of hung agents would use it up, and the interpreter waits for a pool's threads when it ends.
    """
    finished: Future[_Ended] = Future()
    finished.set_running_or_notify_cancel()  # the thread cannot be stopped, so neither can this
    context = contextvars.copy_context()

    def call() -> None:
        try:
            ended = _Ended(context.run(function))
        except BaseException as error:  # noqa: BLE001 — carried over to the loop
            ended = _Ended(error=error)
        finished.set_result(ended)

    threading.Thread(target=call, name="lightning-agent", daemon=True).start()
    ended = await asyncio.wrap_future(finished)
    if ended.error is not None:
        raise ended.error
    return ended.result


class _Ended(NamedTuple):
    """The result or the error of a sync agent. A future carries this object, since it cannot carry every error
    (`StopIteration`)."""

    result: Reward | Awaitable[Reward] = 0.0
    error: BaseException | None = None
