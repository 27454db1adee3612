"""The trainer's end of gateways in processes of their own: how many there are, where they listen, and that they run.

The invariant: the trainer's process holds every listening socket, so that the address of a gateway stays while its process is
started again; connections wait meanwhile. Each process has the same plugins in its calls as the trainer's own gateway, or none
is used.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from lightning.addresses import is_loopback, reachable
from lightning.asyncio_utils import all_of, cancel
from lightning.config import Config, with_settings
from lightning.errors import ConfigError, GatewayError
from lightning.gateway.connections import BACKLOG, bind
from lightning.gateway.gateway import Gateway
from lightning.memory_budget import Budget
from lightning.store.url import redacted

from lightning_server.config import GatewayProcessesConfig, ServerConfig
from lightning_server.gateway_process import what_stands

log = logging.getLogger(__name__)

CORES_EACH, MOST = 8, 4
"""The cores of a machine for one process that is chosen here, and the most of them."""
START_SECONDS = 60.0
"""How long a process may take to open the store and listen."""
STOP_SECONDS = 35.0
"""How long it may take to end: a little longer than a gateway waits for the calls in flight."""
STEADY_SECONDS, MOST_DEATHS = 30.0, 5
"""A process that ends so many times in a row, each within so many seconds, does not stay up."""
LAST_WORDS_SECONDS = 5.0
"""How long what an ended process has said is read."""
LEAST_MEMORY = 1 << 20
"""The least bytes of `gateway.limits.body_memory`."""
LONGEST_LINE = 1 << 20
"""The most bytes of one line that a process says: its longest message as JSON."""
MODULE = "lightning_server.gateway_process"


def processes_for(config: Config, store_url: str) -> int:
    """Return the number of gateway processes for a training, chosen where `gateway.processes` is null. Raises `ConfigError` for
    a number that the store, or the address for clients, does not allow."""
    asked = GatewayProcessesConfig.of(config).processes
    if asked == 0:
        return 0
    scheme = urlsplit(store_url).scheme
    why = (
        f"no other process can open the store {redacted(store_url)!r}: use sqlite:///, postgresql:// or redis://"
        if scheme in ("memory", "http", "https")
        else "clients know one address, server.public_url, which leads to the trainer's process: leave it out"
        if ServerConfig.of(config).public_url
        else ""
    )
    if asked is not None:
        if why:
            raise ConfigError(f"gateway.processes is {asked}, but {why}, or set gateway.processes = 0")
        return asked
    alone = (
        is_loopback(config.gateway.host) and not config.gateway.port
    )  # else others know one port, and may reach no other
    if why or not alone or not _trains_on_gpu(config):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = max(1, min(MOST, cores // CORES_EACH))
    log.info(
        "%d gateway processes answer the agents' calls, chosen for %d cores beside a trainer on a GPU (gateway.processes)",
        count,
        cores,
    )
    return count


def _trains_on_gpu(config: Config) -> bool:
    if config.engine.device != "auto":
        return config.engine.device.startswith("cuda")
    import torch

    return torch.cuda.is_available()


class Processes:
    """The gateway processes of one training, whose ports are bound at once: those behind `gateway.port` if that is set, else
    free ones. Raises `GatewayError` for a port in use."""

    def __init__(self, config: Config, store_url: str, count: int) -> None:
        self._config, self._store_url = config, store_url
        self._members: list[_Member] = []
        host, first = config.gateway.host, config.gateway.port
        try:
            for number in range(1, count + 1):
                self._members.append(_Member(number, bind(host, first + number if first else 0)))
        except (GatewayError, OverflowError) as error:
            self._forget()
            raise GatewayError(
                f"{error} It would be the port of one of {count} gateway processes (gateway.processes)."
            ) from error

    async def start(self, gateway: Gateway) -> None:
        """Start all, and let the keys of the trainer's own gateway lead to them. Raises `GatewayError`."""
        hosts = [urlsplit(slot.upstream.url).hostname or "" for slot in gateway.own.pool.slots]
        allowed = [*self._config.gateway.allowed_upstreams, *hosts]  # the trainer's own servers are always allowed
        # All processes are on one machine, so they divide the memory for bodies.
        share = Budget(self._config.gateway.limits.body_memory).most // len(self._members)
        own_settings = {"gateway.allowed_upstreams": allowed, "gateway.limits.body_memory": max(share, LEAST_MEMORY)}
        given = {
            "config": with_settings(self._config, own_settings).model_dump(mode="json"),
            "store": self._store_url,
            "level": logging.getLogger("lightning").getEffectiveLevel(),
        }
        own = what_stands(gateway)
        for member in self._members:
            member.given = given
        await all_of([member.start() for member in self._members])
        stands = self._members[0].stands
        if missing := [name for name in own if name not in stands] or [name for name in stands if name not in own]:
            reason = f"{missing[0]} is not in both processes: install the plugin instead of registering it in a script"
            if GatewayProcessesConfig.of(self._config).processes is not None:
                raise GatewayError(
                    f"gateways in processes of their own cannot be used, since {reason}, or set gateway.processes = 0"
                )
            log.warning("the trainer's process answers all calls, since %s", reason)
            await self.close()
            return
        gateway.addresses = [member.url for member in self._members]
        log.info("gateway processes answer at %s", ", ".join(gateway.addresses))

    async def attend(self) -> None:
        """Start those again that end, until cancelled. Raises `GatewayError` for one that does not stay up."""
        attending = [asyncio.create_task(member.attend()) for member in self._members]
        try:
            await asyncio.gather(*attending)
        finally:
            await cancel(*attending)

    async def close(self) -> None:
        """End all, after the calls in flight."""
        await asyncio.gather(*(member.close() for member in self._members))
        self._forget()

    def _forget(self) -> None:
        for member in self._members:
            member.listener.close()
        self._members = []


class _Member:
    """One process and its listening socket."""

    def __init__(self, number: int, listener: socket.socket) -> None:
        self.number, self.listener = number, listener
        listener.listen(BACKLOG)  # so that connections wait while no process accepts any
        host, port = listener.getsockname()[:2]
        self.url = f"http://{reachable(host)}:{port}"
        self.given: dict[str, object] = {}
        self.stands: Sequence[str] = ()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._failed = ""
        self._began, self._deaths = 0.0, 0

    async def start(self) -> None:
        """Start the process, and return when it listens. Raises `GatewayError`, with its own reason if it told one."""
        self._ready.clear()
        self._failed, self._began = "", time.monotonic()
        number = self.listener.fileno()
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", MODULE),  # without the present folder, whose modules are the user's
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LONGEST_LINE,
            pass_fds=(number,),
            start_new_session=True,  # Ctrl-C is the trainer's, which ends it in its turn
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**self.given, "listener": number}).encode() + b"\n")
        self._reading = asyncio.create_task(self._read(self._process), name=f"lightning-gateway-{self.number}")
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._ready.wait()
        except TimeoutError:
            self._failed = f"it did not listen within {START_SECONDS:g} s"
        if self._failed:
            await self.close()
            raise GatewayError(f"gateway process {self.number} did not start: {self._failed}")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Log what the process says, until it has closed its output."""
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # the process must not wait until somebody reads on
                log.warning(
                    "gateway process %d printed more than %d bytes without an end of line", self.number, LONGEST_LINE
                )
                continue
            if not line:
                break
            self._hear(line)
        if not self._ready.is_set():
            self._failed = self._failed or f"it ended with {_ending(await process.wait())}; its errors stand above"
            self._ready.set()

    def _hear(self, line: bytes) -> None:
        """Heed one line: that the process listens, that it failed, a message to log, or what a library has printed."""
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        match said:
            case {"stands": stands}:
                self.stands = stands
                self._ready.set()
            case {"failed": reason}:
                self._failed = reason
            case {"logger": str(logger), "level": int(level), "text": text}:
                logging.getLogger(logger).log(level, "%s (gateway process %d)", text, self.number)
            case _:
                log.info("gateway process %d: %s", self.number, line.decode(errors="replace").rstrip())

    async def attend(self) -> None:
        """Start the process again whenever it ends, until cancelled. Raises `GatewayError` if it does not stay up."""
        while self._process is not None:
            code = await self._process.wait()
            if self._reading is not None:
                await self._reading  # to the end of what the old process said
            self._deaths = self._deaths + 1 if time.monotonic() - self._began < STEADY_SECONDS else 1
            if self._deaths > MOST_DEATHS:
                raise GatewayError(
                    f"gateway process {self.number} ended {self._deaths} times in a row, at last with {_ending(code)}; see the "
                    "log above, or set gateway.processes = 0"
                )
            log.warning(
                "gateway process %d ended with %s and is started again: calls that it was answering are lost, and agents send "
                "them again; nothing that was answered is lost",
                self.number,
                _ending(code),
            )
            await self.start()

    async def close(self) -> None:
        """End the process, after the calls in flight; kill one that takes too long."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await process.wait()
            except TimeoutError:
                log.warning("gateway process %d did not end within %g s and is killed", self.number, STOP_SECONDS)
                process.kill()
                await process.wait()
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=LAST_WORDS_SECONDS)
            await cancel(self._reading)


def _ending(code: int) -> str:
    """Describe an exit code: the name of the signal, or the number."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
