"""Runs each agent in a worker process of its own: a crash, a leak or a hang costs that one rollout and nothing else.

The invariant: a worker runs one rollout at a time; one that was killed, timed out or answered nonsense is never used again.
"""

from __future__ import annotations

import asyncio
import logging
import time

from lightning.config import RunnerConfig
from lightning.errors import DataError, RunnerError
from lightning.runner.agent_serialization import pack_agent
from lightning.runner.forkserver import GRACE, ForkServer, Worker, WorkerDiedError
from lightning.runner.outcomes import decode_outcome, encode_request, failed
from lightning.runner.protocol import Agent
from lightning.runner.sandbox import bubblewrap
from lightning.types import LLM, Fault, Lease, Outcome

logger = logging.getLogger(__name__)


class ProcessRunner:
    """A pool of at most `config.concurrency` persistent workers, forked from a process that has the imports done.

    Agents see `OPENAI_BASE_URL` and `OPENAI_API_KEY` of their rollout in the environment, and Anthropic's two; what they
    print goes where this process prints; standard input is empty. Only a process that left its process group (a daemon)
    escapes a kill. `agent` may be packed already (`pack_agent`), on another machine.
    """

    def __init__(self, agent: Agent | bytes, config: RunnerConfig) -> None:
        self._config = config
        self._shipped = agent if isinstance(agent, bytes) else pack_agent(agent)
        self._server: ForkServer | None = None
        self._idle: list[Worker] = []
        self._slots = asyncio.Semaphore(config.concurrency)
        self._starting = asyncio.Lock()
        self._told_of_threads = False

    @property
    def concurrency(self) -> int:
        """Rollouts at once."""
        return self._config.concurrency

    async def start(self) -> None:
        """Load the agent once. Raises `RunnerError` when it cannot be loaded in a new process. Idempotent."""
        if self._server is None:
            self._slots = asyncio.Semaphore(self._config.concurrency)
            self._starting = asyncio.Lock()
            self._server = await self._new_server()

    async def run(self, lease: Lease, llm: LLM) -> Outcome:
        """Run the agent on the leased task. Cancelling this kills the agent's process group."""
        return await self.answer(encode_request(lease.rollout.task, llm))

    async def answer(self, request: bytes) -> Outcome:
        """Run the agent on an encoded request (`encode_request`); otherwise as `run`."""
        if self._server is None:
            raise RunnerError("the process runner has not been started: await runner.start() first")
        async with self._slots:
            try:
                worker = await self._take()
            except WorkerDiedError as error:
                return failed(Fault.INFRASTRUCTURE, str(error))
            started = time.monotonic()
            reusable = False
            try:
                async with asyncio.timeout(self._config.timeout):
                    reply = await worker.ask(request)
                outcome = decode_outcome(reply)
                reusable = True
            except TimeoutError:
                text = f"the agent ran for more than {self._config.timeout:g} s and was killed (runner.timeout)"
                return failed(Fault.TIMEOUT, text, seconds=time.monotonic() - started)
            except WorkerDiedError as error:
                return failed(Fault.INFRASTRUCTURE, str(error), seconds=time.monotonic() - started)
            except DataError as error:
                text = f"what the agent reported cannot be used: {error}"
                return failed(Fault.AGENT, text, seconds=time.monotonic() - started)
            except ValueError as error:
                text = (
                    f"the agent's process sent no outcome ({error}): does the agent write to sockets it did not open?"
                )
                return failed(Fault.AGENT, text, seconds=time.monotonic() - started)
            finally:
                self._give_back(worker, reusable)
            return outcome

    async def close(self) -> None:
        """Kill every worker and the fork server. Idempotent; `start` may follow."""
        server, self._server = self._server, None
        idle, self._idle = self._idle, []
        for worker in idle:
            worker.hang_up()
        if server is not None:
            await server.close()

    async def _take(self) -> Worker:
        """An idle worker that still lives, else a new one."""
        while self._idle:
            worker = self._idle.pop()
            if not worker.exited.done():
                return worker
            worker.hang_up()
        async with self._starting:
            if self._server is not None and not self._server.alive:
                logger.warning("the fork server of the agents' processes died; starting another one")
                await self._server.close()
                self._server = await self._new_server()
        if self._server is None:
            raise WorkerDiedError("the process runner was closed")
        return await self._server.fork()

    def _give_back(self, worker: Worker, reusable: bool) -> None:
        if self._server is None:
            worker.hang_up()
        elif not reusable:
            self._server.kill(worker)
        elif worker.served < self._config.rollouts_per_process:
            self._idle.append(worker)
        else:
            worker.hang_up()
            asyncio.get_running_loop().call_later(GRACE, self._server.kill, worker)  # if a thread of the agent keeps it

    async def _new_server(self) -> ForkServer:
        config = self._config
        sandbox = bubblewrap(config.sandbox_files, config.sandbox_hidden) if config.sandbox == "bwrap" else ()
        server = ForkServer(
            self._shipped, preload=config.preload, adapters=config.adapters, reroute=config.reroute, sandbox=sandbox
        )
        await server.start()
        if server.threads and not self._told_of_threads:
            self._told_of_threads = True
            logger.warning(
                "importing the agent's modules started %s, which the agents' processes, as forks, do not have: an agent that "
                "waits for one hangs until runner.timeout. Start threads inside the agent, or use runner='inline'",
                server.threads,
            )
        return server
