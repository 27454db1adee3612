"""The parent's side of the fork server: starts it, has it fork and kill workers, and exchanges messages with the workers.

The invariant: every worker is a process group of its own that dies when the `ForkServer` is closed, when the fork server dies,
or when this process dies. A worker sends data, never code. No command is lost because the fork server is busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from lightning.asyncio_utils import cancel
from lightning.errors import RunnerError
from lightning.instrument.providers import for_import, own
from lightning.memory_budget import Holder
from lightning.processes import kill_group
from lightning.runner import socket_framing
from lightning.runner.agent_serialization import pack_stages
from lightning.runner.stages import NO_STAGES, AttemptLine, Enclosure
from lightning.runner.worker import without_proxy

logger = logging.getLogger(__name__)

GRACE = 5.0
"""Seconds to wait until a process that was told to end has ended, or until its end is reported."""

FORKS = 32
"""The most fork requests at one time. The fork server handles one after the other, and each takes room in the socket and file
descriptors."""

_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Set to 1 in agents, because many agents share the cores, and because a fork server must have no threads when it forks."""

_OURS = frozenset({"LIGHTNING_TOKEN", "LIGHTNING_VLLM_SECRET"})
_STORE = "LIGHTNING_STORE"
"""The variable in which deployments give the store's URL. If it is set, `PGPASSWORD` is the store's, and agents do not get
it."""

_INIT = 1
"""The process id of a fork server's parent, inside an enclosure."""

_LOOPBACK = "http://127.0.0.1"

_COMMAND = """import json, sys
sys.path[:], sys.argv[:] = json.loads(sys.argv[1])
from lightning.runner.forkserver_main import main
main({descriptor}, {parent})
"""


class WorkerDiedError(RunnerError):
    """A worker process ended in the middle of a rollout, or could not be forked; the message says how."""


class Worker:
    """One worker process. `served` counts its rollouts."""

    def __init__(
        self,
        pid: int,
        exited: asyncio.Future[int | None],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        unattended: Callable[[], None] | None = None,
    ) -> None:
        self.pid, self.served = pid, 0
        self.exited = exited
        self._unattended = unattended  # ends what serves its enclosure
        self._reader, self._writer = reader, writer

    async def ask(self, request: bytes, holder: Holder) -> bytes:
        """Send a request and return the reply, for which `holder` reserves memory. Raises `WorkerDiedError`, and `ValueError`
        for bytes that are no message or that answer another request."""
        self.served += 1
        reading = asyncio.create_task(self._exchange(request, holder))
        both: set[asyncio.Future[Any]] = {reading, self.exited}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            # A worker's last words may arrive after the news of its death; a child of the agent may keep the socket open.
            await asyncio.wait({reading}, timeout=GRACE)
            if reading.done():
                return reading.result()
        except (EOFError, OSError):
            await asyncio.wait({self.exited}, timeout=GRACE)
        finally:
            await cancel(reading)
        ended = _how_it_ended(self.exited.result()) if self.exited.done() else "closed its connection to the runner"
        raise WorkerDiedError(f"the agent's process (pid {self.pid}) {ended} in the middle of the rollout")

    def hang_up(self) -> None:
        """Close the connection and the service of the worker's enclosure. An idle worker then ends by itself."""
        self._writer.close()
        if self._unattended is not None:
            self._unattended()

    async def _exchange(self, request: bytes, holder: Holder) -> bytes:
        name = self.served.to_bytes(socket_framing.NAME)
        self._writer.write(socket_framing.pack(name + request))
        await self._writer.drain()
        return await socket_framing.read_reply(self._reader, holder, name)


class ForkServer:
    """A fork server, from `start` to `close`, in one event loop. With an `enclosure` it and all its workers run inside that."""

    def __init__(
        self,
        shipped: bytes,
        *,
        preload: Sequence[str] = (),
        adapters: Sequence[str] | None = None,
        reroute: Sequence[str] = (),
        line: AttemptLine = NO_STAGES,
        enclosure: Enclosure | None = None,
    ) -> None:
        self._shipped, self.enclosure = shipped, enclosure
        self._line = pack_stages((line, enclosure and enclosure.inside))
        self._setup = {
            "preload": list(preload),
            "adapters": None if adapters is None else list(adapters),
            "reroute": list(reroute),
            "own": own(os.environ if enclosure is None else enclosure.environment),
        }
        self.warmed: int | None = None  # how many modules of the first rollout it has imported since, for later ones
        self.threads = ""  # once started: those that importing the agent's modules started, in words; workers lack them
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._listener: asyncio.Task[None] | None = None
        self._requests = itertools.count()
        self._forks: dict[int, asyncio.Future[tuple[int, asyncio.Future[int | None]]]] = {}
        self._exits: dict[int, asyncio.Future[int | None]] = {}
        self._room, self._sending = asyncio.Semaphore(FORKS), asyncio.Lock()
        self._kills: set[asyncio.Task[None]] = set()

    @property
    def alive(self) -> bool:
        """Whether the fork server can still fork."""
        return self._listener is not None and not self._listener.done()

    async def start(self) -> None:
        """Start the process and wait until the agent is loaded there. Raises `RunnerError` with the reason if it is not."""
        try:
            self._control, theirs = socket.socketpair()
            with theirs:
                self._process = self._start_process(theirs.fileno())
            self._control.setblocking(False)
            loop = asyncio.get_running_loop()
            setup = json.dumps(self._setup).encode()
            incoming = _Incoming(self._control)
            try:
                for each in (setup, self._line, self._shipped):
                    await loop.sock_sendall(self._control, socket_framing.pack(each))
                answer = await incoming.next()
            except ConnectionAbortedError as error:
                raise RunnerError(f"no agent can be run: {error}") from error
            except OSError:
                answer = None
            if answer is None:
                status = await asyncio.to_thread(self._process.wait)
                raise RunnerError(
                    f"the process that prepares agents {_how_it_ended(status)} while it imported the agent's modules; "
                    "its own output, above, has the reason"
                )
            if answer.get("error"):
                raise RunnerError(f"no agent can be run: {answer['error']}")
            self.threads = str(answer["threads"])
            self._listener = asyncio.create_task(self._listen(incoming))
        except BaseException:
            await self.close()
            raise

    def _start_process(self, control: int) -> subprocess.Popen[bytes]:
        code = _COMMAND.format(descriptor=control, parent=_INIT if self.enclosure else os.getpid())
        threads = dict.fromkeys(_ONE_THREAD, "1")
        if self.enclosure is not None:  # our arguments may hold passwords, and its processes can read their own
            command = [sys.executable, "-c", code, json.dumps([sys.path, sys.argv[:1]])]
            return self.enclosure.start(command, [control], {**for_import(self.enclosure.environment), **threads})
        return subprocess.Popen(  # noqa: S603 — our own code; a thread could end and take it along
            [sys.executable, "-c", code, json.dumps([sys.path, sys.argv])],
            pass_fds=(control,),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the trainer, which ends the agents itself
            env={**_environment(), **threads},
        )

    async def fork(self) -> Worker:
        """Return a new worker process. At most `FORKS` are requested at once. Raises `WorkerDiedError` when none can be
        forked."""
        async with self._room:
            if not self.alive:
                raise WorkerDiedError("the fork server of the agents' processes is gone")
            ours, theirs = socket.socketpair()
            request = next(self._requests)
            forked: asyncio.Future[tuple[int, asyncio.Future[int | None]]] = asyncio.get_running_loop().create_future()
            try:
                with theirs:
                    await self._send({"fork": request}, theirs)
                self._forks[request] = forked  # before anything can be heard of it
                pid, exited = await forked  # it may have exited by now, so the future comes with the news
                ours.setblocking(False)
                enclosure = self.enclosure
                unattended = await enclosure.attend(ours) if enclosure and enclosure.inside else None
                reader, writer = await asyncio.open_unix_connection(sock=ours)
            except BaseException as error:
                ours.close()  # the worker, if there is one, reads the end and leaves
                if isinstance(error, OSError | RunnerError):
                    raise WorkerDiedError(f"a worker process could not be forked: {error}") from error
                raise
            finally:
                self._forks.pop(request, None)
            return Worker(pid, exited, reader, writer, unattended)

    def kill(self, worker: Worker) -> None:
        """Kill a worker's process group now, or as soon as the fork server can receive the command."""
        worker.hang_up()
        if worker.exited.done():
            return
        with contextlib.suppress(OSError):  # then the fork server is gone, and its workers with it
            if not self._sent({"kill": worker.pid}):
                killing = asyncio.create_task(self._kill(worker.pid))
                self._kills.add(killing)
                killing.add_done_callback(self._kills.discard)

    async def _kill(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            await self._send({"kill": pid})

    async def _send(self, command: dict[str, Any], passed: socket.socket | None = None) -> None:
        """Send a command, and a socket with it, as soon as there is room. Raises `OSError` when the fork server is gone."""
        async with self._sending:
            while not self._sent(command, passed):
                assert self._control is not None, "or it had raised"
                assert self._listener is not None
                await _writable(self._control, self._listener)

    def _sent(self, command: dict[str, Any], passed: socket.socket | None = None) -> bool:
        """Send a command if there is room now, and return whether it was sent. Raises `OSError` when the fork server is
        gone."""
        if self._control is None or not self.alive:
            raise BrokenPipeError("the fork server of the agents' processes is gone")
        message = socket_framing.pack(json.dumps(command).encode())
        try:
            if passed is None:
                self._control.send(message)  # whole or not at all: it is short
            else:
                socket.send_fds(self._control, [message], [passed.fileno()])
        except BlockingIOError:
            return False
        return True

    async def close(self) -> None:
        """Kill every worker and end the fork server. Idempotent."""
        if self.enclosure is not None and self._process is not None:
            self._process.kill()  # which ends all that is in it
        if self._listener is not None:
            await cancel(self._listener)
        if self._control is not None:
            async with self._sending:  # whoever waited for room has seen the end, and left
                self._control.close()
        if self._process is not None:
            try:
                await asyncio.to_thread(self._process.wait, GRACE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                await asyncio.to_thread(self._process.wait)
                self._kill_groups()
        self._process = self._control = None

    async def _listen(self, incoming: _Incoming) -> None:
        try:
            while (message := await incoming.next()) is not None:
                self._heed(message)
            self._kill_groups()
        except OSError:  # reset: the same as the end
            self._kill_groups()
        finally:
            for forked in self._forks.values():
                if not forked.done():
                    forked.set_exception(WorkerDiedError("the fork server of the agents' processes died"))
            for exited in self._exits.values():
                if not exited.done():
                    exited.set_result(None)

    def _kill_groups(self) -> None:
        """Kill the processes that agents started and left behind; the workers themselves die with the fork server.

        Do nothing in an enclosure: it ends with all that is inside, and its process ids mean other processes out here.
        """
        if self.enclosure is None:
            for pid in self._exits:
                kill_group(pid)

    def _heed(self, message: dict[str, int | str]) -> None:
        if "forked" in message:
            pid = int(message["pid"])
            exited: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
            self._exits[pid] = exited
            self._answer(int(message["forked"]), (pid, exited))
        elif "failed" in message:
            self._answer(int(message["failed"]), WorkerDiedError(f"no worker process: {message['error']}"))
        elif "warmed" in message:
            self.warmed = int(message["warmed"])
            if self.warmed or message["error"]:
                logger.info(
                    "%d modules of the first rollout are imported for the next ones (not: %s)",
                    self.warmed,
                    message["error"],
                )
        else:
            self._exits.pop(int(message["exited"])).set_result(int(message["status"]))

    def _answer(self, request: int, answer: tuple[int, asyncio.Future[int | None]] | WorkerDiedError) -> None:
        forked = self._forks.get(request)
        if forked is None or forked.done():
            return
        if isinstance(answer, WorkerDiedError):
            forked.set_exception(answer)
        else:
            forked.set_result(answer)


async def _writable(control: socket.socket, listener: asyncio.Task[None]) -> None:
    """Return when there is room in a socket, or its other end is gone, or `listener` has ended."""
    loop = asyncio.get_running_loop()
    room = asyncio.Event()
    waiting = asyncio.create_task(room.wait())
    loop.add_writer(control, room.set)
    try:
        await asyncio.wait({waiting, listener}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        loop.remove_writer(control)
        waiting.cancel()


def _environment() -> dict[str, str]:
    """Return the environment variables for agents: this process's, without lightning's secrets and the store's URL and
    password.

    Clients that are made when the agent is imported read them. Their addresses lead nowhere, so that calls of these clients
    belong to a rollout. Loopback, where a gateway is by default, needs no proxy. The gateway's own host is known only when a
    rollout comes.
    """
    ours = _OURS | ({_STORE, "PGPASSWORD"} if _STORE in os.environ else set())
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return {**kept, **without_proxy(kept, _LOOPBACK), **for_import(kept)}


class _Incoming:
    """Messages from the fork server."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._buffer = bytearray()

    async def next(self) -> dict[str, int | str] | None:
        """Return the next message; None when the fork server is gone. Raises `OSError` for bytes that are no message."""
        loop = asyncio.get_running_loop()
        try:
            while (message := socket_framing.unpack(self._buffer, socket_framing.LONGEST_NEWS)) is None:
                data = await loop.sock_recv(self._control, 65536)
                if not data:
                    return None
                self._buffer += data
            parsed: dict[str, int | str] = json.loads(message)
        except (ValueError, RecursionError) as error:
            raise ConnectionAbortedError(
                f"the process that prepares agents sent bytes that are no message: {error}"
            ) from error
        return parsed


def _how_it_ended(status: int | None) -> str:
    """Describe an exit status of `Popen.returncode` in words; None means that the process went away with its fork server."""
    if status is None:
        return "disappeared together with its fork server"
    if status < 0:
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"
    return f"exited with code {status}"
