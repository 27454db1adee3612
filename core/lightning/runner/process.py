"""Runs each agent in a worker process of its own: a crash, a leak or a hang costs that one rollout and nothing else.

The invariant: a worker runs one rollout at a time. A worker that was killed, timed out or sent no outcome is never used again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from functools import partial

from lightning.config import RunnerConfig
from lightning.errors import DataError, RunnerError
from lightning.memory_budget import LONG, Budget, Holder
from lightning.runner.agent_serialization import pack_agent
from lightning.runner.forkserver import GRACE, ForkServer, Worker, WorkerDiedError
from lightning.runner.outcomes import decode_outcome, decode_request, encode_request, failed, notes_in
from lightning.runner.protocol import Agent
from lightning.runner.stages import AttemptRefusedError, Enclosure, FailedStageError, attempt_line
from lightning.types import LLM, Fault, Lease, Outcome

logger = logging.getLogger(__name__)


class ProcessRunner:
    """A pool of at most `config.concurrency` workers, forked from a process that has the imports done. Where a plugin's stage
    encloses processes, each worker has such a process for itself and is alone in its enclosure.

    Agents see `OPENAI_BASE_URL` and `OPENAI_API_KEY` of their rollout in the environment, and Anthropic's two. What they print
    goes where this process prints; standard input is empty. Only a process that left its process group (a daemon) escapes a
    kill. `agent` may be bytes that `pack_agent` made, also on another machine.
    """

    def __init__(self, agent: Agent | bytes, config: RunnerConfig) -> None:
        self._config = config
        self._shipped = agent if isinstance(agent, bytes) else pack_agent(agent)
        self._server: ForkServer | None = None
        self._idle: list[Worker] = []
        self._slots = asyncio.Semaphore(config.concurrency)
        self._starting = asyncio.Lock()
        self._replies = Budget()
        self._told_of_threads = False
        self._enclosed: dict[Worker, ForkServer] = {}
        self._line = attempt_line(config)
        self.concurrency = config.concurrency
        self.stages = self._line.versions
        self._line.check_packing()
        self._ending: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Load the agent once, in a new process. Raises `RunnerError` when it cannot be loaded there, and `RunnerError` or
        `ConfigError` when a plugin's stage cannot do what the settings ask for. Idempotent."""
        if self._server is None:
            await self._line.begin()
            self._slots = asyncio.Semaphore(self._config.concurrency)
            self._starting = asyncio.Lock()
            self._replies = Budget()
            enclosure = self._line.enclosure("")
            self._server = await self._new_server(enclosure)
            if enclosure is not None:  # it has shown that the agent can be loaded; each worker has its own
                await self._server.close()

    async def run(self, lease: Lease, llm: LLM) -> Outcome:
        """Run the agent on the leased task. Cancelling this kills the agent's process group."""
        return await self.answer(encode_request(lease.rollout.task, llm))

    async def answer(self, request: bytes) -> Outcome:
        """Run the agent on an encoded request (`encode_request`); otherwise as `run`."""
        if self._server is None:
            raise RunnerError("the process runner has not been started: await runner.start() first")
        async with self._slots:
            try:
                worker, request = await self._take(request)
            except (WorkerDiedError, FailedStageError) as error:
                return failed(Fault.INFRASTRUCTURE, str(error))
            started = time.monotonic()
            reusable = False
            holder = Holder(self._replies)
            try:
                async with asyncio.timeout(self._config.timeout):
                    reply = await worker.ask(request, holder)
                outcome = (
                    decode_outcome(reply) if len(reply) <= LONG else await holder.work(partial(decode_outcome, reply))
                )
                reusable = True
                self._line.heard(outcome, notes_in(reply))
            except TimeoutError:
                text = f"the agent ran for more than {self._config.timeout:g} s and was killed (runner.timeout)"
                return failed(Fault.TIMEOUT, text, seconds=time.monotonic() - started)
            except WorkerDiedError as error:
                return failed(Fault.INFRASTRUCTURE, str(error), seconds=time.monotonic() - started)
            except AttemptRefusedError as error:
                return failed(error.fault, str(error), seconds=time.monotonic() - started)
            except DataError as error:
                text = f"what the agent reported cannot be used: {error}"
                return failed(Fault.AGENT, text, seconds=time.monotonic() - started)
            except ValueError as error:
                text = (
                    f"the agent's process sent no outcome ({error}): does the agent write to sockets it did not open?"
                )
                return failed(Fault.AGENT, text, seconds=time.monotonic() - started)
            finally:
                holder.give(holder.held)
                self._give_back(worker, reusable)
            return outcome

    async def close(self) -> None:
        """Kill every worker and the fork servers. Idempotent; `start` may follow."""
        server, self._server = self._server, None
        idle, self._idle = self._idle, []
        for worker in idle:
            worker.hang_up()
        for each in (server, *self._enclosed.values()):
            if each is not None:
                await each.close()
        await asyncio.gather(*self._ending)
        self._enclosed.clear()
        self._replies.close()
        self._line.close()

    async def _take(self, request: bytes) -> tuple[Worker, bytes]:
        """Return an idle worker that still lives, or a new one, and the request for it. In an enclosure the gateway may have
        another URL, so the request is encoded again."""
        if self._line.enclosing:
            return await self._take_enclosed(request)
        while self._idle:
            worker = self._idle.pop()
            if not worker.exited.done():
                return worker, request
            worker.hang_up()
        async with self._starting:
            if self._server is not None and not self._server.alive:
                logger.warning("the fork server of the agents' processes died; starting another one")
                await self._server.close()
                self._server = await self._new_server()
        if self._server is None:
            raise WorkerDiedError("the process runner was closed")
        return await self._server.fork(), request

    async def _take_enclosed(self, request: bytes) -> tuple[Worker, bytes]:
        task, llm = decode_request(request)

        def inside(enclosure: Enclosure) -> bytes:
            return encode_request(task, replace(llm, base_url=enclosure.url(llm.base_url)))

        while self._idle:
            worker = self._idle.pop()
            enclosure = self._enclosed[worker].enclosure
            try:
                if not worker.exited.done() and enclosure is not None and enclosure.reaches(llm.base_url):
                    return worker, inside(enclosure)
            except BaseException:
                self._end_enclosed(worker)
                raise
            self._end_enclosed(worker)
        enclosure = self._line.enclosure(llm.base_url)
        assert enclosure is not None, "a stage stands there"
        moved = inside(enclosure)
        try:
            server = await self._new_server(enclosure)
        except OSError as error:  # the machine's fault: too many open files, no memory
            raise WorkerDiedError(f"the agent's process could not begin: {error}") from error
        try:
            worker = await server.fork()
        except BaseException:
            await server.close()
            raise
        self._enclosed[worker] = server
        return worker, moved

    def _give_back(self, worker: Worker, reusable: bool) -> None:
        reusable = reusable and self._server is not None
        if reusable and worker.served < self._config.rollouts_per_process:
            self._idle.append(worker)
        elif worker in self._enclosed:
            self._end_enclosed(worker)
        elif self._server is None:
            worker.hang_up()
        elif not reusable:
            self._server.kill(worker)
        else:
            worker.hang_up()
            asyncio.get_running_loop().call_later(GRACE, self._server.kill, worker)  # if a thread of the agent keeps it

    def _end_enclosed(self, worker: Worker) -> None:
        worker.hang_up()
        ending = asyncio.create_task(self._enclosed.pop(worker).close())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _new_server(self, enclosure: Enclosure | None = None) -> ForkServer:
        config = self._config
        server = ForkServer(
            self._shipped,
            preload=config.preload,
            adapters=config.adapters,
            reroute=config.reroute,
            line=self._line,
            enclosure=enclosure,
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
