"""The fork server: a small process that imports once what agents need, then forks worker processes on request.

The invariant: it runs no agent and no threads of its own. When the parent dies or closes the socket, it kills every worker's
process group and ends. A process that called `die_with_parent` ends soon after its parent, however the parent died.

The fork server of `multiprocessing` is no replacement. It cannot be started in an enclosure, does not report a module that
cannot be imported, and imports nothing later. It ends when a fork fails and by the SIGTERM that a service sends to all, and
leaves its children, and what they have started, behind. It would save the loop below, but not its signals, groups and trials.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import platform
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from lightning.errors import LightningError
from lightning.instrument import emit
from lightning.instrument.providers import remember
from lightning.plugins import plugins
from lightning.processes import die_with_parent, kill_group
from lightning.runner import socket_framing, worker
from lightning.runner.agent_serialization import unpack_agent, unpack_stages
from lightning.runner.stages import NO_STAGES, AttemptLine
from lightning.runner.warmth import Contexts, Stores, build_model, fill_caches
from lightning.runner.worker import flush, without_children

MOST_NAMES = 8
"""The most names of threads or modules in one message."""

LONGEST_IMPORT = 60.0
"""The most seconds that a trial import of the first rollout's modules may take."""

LONGEST_ANSWER = 4095
"""The most bytes that a trial import reports: a pipe transfers that many in one piece."""

FIRST_ALONE = 5.0
"""The most seconds that workers wait until the first rollout has told what it imported. Each would import it for itself."""

_COPE_WITH_FORKS = frozenset({"opentelemetry", "sentry_sdk", "tqdm"})
"""Libraries that start their threads anew in a forked process, or do without them."""


def main(descriptor: int, parent: int) -> None:
    """Serve the parent at the other end of `descriptor`. The first messages are the setup (JSON), the stages and the agent."""
    die_with_parent(parent, signal.SIGTERM)
    with socket.socket(fileno=descriptor) as control:
        head, packed, shipped = (socket_framing.receive(control) for _ in range(3))
        if head is None or packed is None or shipped is None:
            return
        setup = json.loads(head)
        remember(setup["own"])
        inside = _Inside()
        error, threads = _prepare(setup, packed, shipped, inside)
        try:
            socket_framing.send(control, json.dumps({"ready": not error, "error": error, "threads": threads}).encode())
        except OSError:
            return  # the parent gave up on its start meanwhile, and has said why
        if not error:
            gc.collect()
            gc.freeze()  # forked workers then share these pages instead of copying them
            _Template(control, parent, shipped, setup, inside).serve()


@dataclass(slots=True)
class _Inside:
    """The plugins' stages in this process: `line` has the stages around attempts, and each worker first calls `enter`, which
    comes from an enclosure."""

    line: AttemptLine = NO_STAGES
    enter: Callable[[socket.socket], None] | None = None


def _prepare(setup: dict[str, Any], packed: bytes, shipped: bytes, inside: _Inside) -> tuple[str, str]:
    """Install the stages, keep them in `inside`, and import what every worker will need. Return the error, or "", and the
    threads that this started, in words.

    The agent is unpickled and thrown away: that imports every module it refers to. The adapters are installed and removed again
    for the same reason. Each worker installs them itself, so their threads run in the workers.
    """
    doing = threads = ""
    before = threading.enumerate()
    try:
        doing = "installing the stages of plugins"
        inside.line, inside.enter = unpack_stages(packed)
        inside.line.install()
        for module in setup["preload"] or ():
            doing = f"preloading module {module!r} (runner.preload)"
            with without_children():
                importlib.import_module(module)
        doing = "loading the agent"
        with without_children():
            unpack_agent(shipped)
        threads = _started_since(before)
        doing = "installing the adapters"
        plugins().install_adapters(emit, setup["adapters"])()
    except LightningError as error:  # it says itself what is wrong
        return f"{doing} failed in a new process: {error}", ""
    except BaseException:  # noqa: BLE001 — isolates the user's modules; the parent raises it
        return f"{doing} failed in a new process:\n{traceback.format_exc()}", ""
    return "", threads


def _import_all(names: Sequence[str]) -> list[str]:
    """Import the modules; return the names of those whose import fails."""
    failed = []
    for name in names:
        try:
            with without_children():
                importlib.import_module(name)
        except BaseException:  # noqa: BLE001 — isolates the user's modules; a rollout imports it again, and says what is wrong
            failed.append(name)
    return failed


def _build(contexts: Contexts, needs: dict[str, Any]) -> None:
    """Build the certificate stores and pydantic models that the first rollout built, and fill caches. If that fails for one,
    each rollout builds it and gets the error."""
    platform.platform()  # clients send it in headers, and its first call starts a program
    for module, name in needs["models"]:
        if module in sys.modules:  # else its module must not be imported here
            with contextlib.suppress(Exception):
                build_model(module, name)
    for asked in needs["contexts"]:
        with contextlib.suppress(OSError):  # `ssl.SSLError` is one
            contexts.make(Stores(**asked["stores"]), asked["count"])
    fill_caches()


def _started_since(before: Sequence[threading.Thread]) -> str:
    """Describe the threads that live now and are not in `before`; "" if forks need none of them."""
    names = [thread.name for thread in threading.enumerate() if thread not in before and not _restarts(thread)]
    shown = ", ".join(name[:100] for name in names[:MOST_NAMES]) + (", …" if len(names) > MOST_NAMES else "")
    return f"{len(names)} thread{'s' * (len(names) > 1)} ({shown})" if names else ""


def _restarts(thread: threading.Thread) -> bool:
    """Whether a thread belongs to a library of `_COPE_WITH_FORKS`."""
    target = getattr(thread, "_target", None)  # what it runs, if it is no class of its own
    modules = (type(thread).__module__, str(getattr(target, "__module__", "")))
    return any(module.partition(".")[0] in _COPE_WITH_FORKS for module in modules)


def _go_on(*_: object) -> None:
    """Ignore a signal. A handler, unlike SIG_IGN, ends with an `exec`, so that programs which an agent starts do not ignore
    it."""


def _outlive_sigterm() -> None:
    """Make this worker survive a SIGTERM sent to every process of a service or a job. The runner lets agents end
    (`runner.drain`) or kills them.

    A process that an agent forks without `exec` (multiprocessing) still ends by SIGTERM, even right after the fork, unless the
    agent has blocked it.
    """
    masks = threading.local()  # several threads may fork at a time

    def before() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def restore() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def in_child() -> None:
        if signal.getsignal(signal.SIGTERM) is _go_on:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        restore()

    signal.signal(signal.SIGTERM, _go_on)
    os.register_at_fork(before=before, after_in_parent=restore, after_in_child=in_child)


class _Template:
    """The loop that forks, kills and reaps. It tells the parent `forked` or `failed` for each request, and later `exited`."""

    def __init__(
        self, control: socket.socket, parent: int, shipped: bytes, setup: dict[str, Any], inside: _Inside
    ) -> None:
        self._control, self._parent, self._pid = control, parent, os.getpid()
        self._shipped, self._adapters, self._reroute = shipped, setup["adapters"], setup["reroute"] or []
        self._inside = inside
        self._children: set[int] = set()
        self._buffer = bytearray()
        self._descriptors: list[int] = []
        self._imports, self._tell_imports = os.pipe()
        os.set_blocking(self._imports, False)
        self._told = bytearray()
        self._contexts = Contexts()
        self._reporter = 0  # the worker that is to tell its imports; -1 when one has
        self._asked: deque[tuple[int, int]] = (
            deque()
        )  # requests for workers that are not forked yet, with their descriptors
        self._until = 0.0  # from when on no worker waits for the first rollout; 0 before the first request
        self._early = max(2, os.cpu_count() or 1)  # so many workers may begin before: more would wait for a core
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)

    def serve(self) -> None:
        """Serve the parent's commands until the parent is gone."""
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._control, selectors.EVENT_READ)
                selector.register(self._woken, selectors.EVENT_READ)
                selector.register(self._imports, selectors.EVENT_READ)
                # SIGTERM also comes when only the thread that started us has ended: then the parent is still there.
                while os.getppid() == self._parent:
                    left = max(0.0, self._until - time.monotonic()) if self._asked else None
                    ready = {key.fileobj for key, _ in selector.select(left)}
                    if self._woken in ready:
                        self._drain()
                    if self._control in ready and not self._receive():
                        return
                    if self._imports in ready:
                        self._learn()
                    self._reap()
                    self._fork_asked()
        except (BrokenPipeError, ConnectionResetError):
            return
        finally:
            signal.set_wakeup_fd(-1)  # the socket is closed before the last signals, those of the children, have come
            for pid in self._children:
                kill_group(pid)

    def _receive(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._control, 65536, 64)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        self._descriptors.extend(descriptors)
        self._buffer += data
        while (message := socket_framing.unpack(self._buffer)) is not None:
            command = json.loads(message)
            if "fork" in command:
                self._asked.append((command["fork"], self._descriptors.pop(0)))
            elif command["kill"] in self._children:
                kill_group(command["kill"])
        return bool(data)

    def _fork_asked(self) -> None:
        """Fork the workers that were asked for, at first only as many as there are cores. The others wait until the first
        rollout has told its imports, but no longer than `FIRST_ALONE`."""
        while self._asked:
            self._until = self._until or time.monotonic() + FIRST_ALONE
            waits = self._reporter >= 0 and time.monotonic() < self._until
            if waits and len(self._children) >= self._early:
                return
            self._fork(*self._asked.popleft())

    def _fork(self, request: int, descriptor: int) -> None:
        flush()  # or both processes would write what is buffered
        try:
            pid = os.fork()
        except OSError as error:
            self._tell({"failed": request, "error": str(error)})
            os.close(descriptor)
            return
        if pid == 0:
            self._become_worker(descriptor)
        self._reporter = self._reporter or pid
        with contextlib.suppress(OSError):  # the child does the same; either may be first
            os.setpgid(pid, pid)
        os.close(descriptor)
        self._children.add(pid)
        self._tell({"forked": request, "pid": pid})

    def _become_worker(self, descriptor: int) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _outlive_sigterm()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            for mine in (self._control, self._woken, self._wake):
                mine.close()
            os.close(self._imports)
            tell = None if self._reporter else self._tell_imports
            if tell is None:
                os.close(self._tell_imports)
            die_with_parent(self._pid, signal.SIGKILL)
            with socket.socket(fileno=descriptor) as sock:
                if self._inside.enter is not None:
                    self._inside.enter(sock)
                worker.serve(
                    sock,
                    self._shipped,
                    self._adapters,
                    self._reroute,
                    self._contexts,
                    tell,
                    self._inside.line,
                )
            code = 0
        except (BrokenPipeError, ConnectionResetError):
            code = 0
        except BaseException:  # noqa: BLE001 — nothing may return into the fork server's loop
            traceback.print_exc()
        finally:
            try:
                flush()
            finally:
                os._exit(code)

    def _reap(self) -> None:
        for pid in tuple(self._children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._children.discard(pid)
                if pid == self._reporter and not self._told:
                    self._reporter = 0
                kill_group(pid)  # what the agent started and left behind
                self._tell({"exited": pid, "status": os.waitstatus_to_exitcode(status)})

    def _learn(self) -> None:
        """Read what the first rollout imported and built, and do the same here, so that the workers of later rollouts begin
        with it."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._imports, 65536):
                self._told += data
        if not self._told.endswith(b"\n") or self._reporter < 0:
            return
        self._reporter = -1
        needs = json.loads(self._told)
        names = [str(name) for name in needs["modules"] if name not in sys.modules]
        if names and (threads := self._threads_of(names)):
            self._tell({"warmed": 0, "error": threads})
            return
        failed = _import_all(names)
        _build(self._contexts, needs)
        gc.collect()
        gc.freeze()
        self._tell({"warmed": len(names) - len(failed), "error": ", ".join(failed[:MOST_NAMES])})

    def _threads_of(self, names: Sequence[str]) -> str:
        """Import the modules in a trial fork. Return why they must not be imported here, mostly because of threads that workers
        would lack; "" if they may."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, 0)  # what an import starts ends with the trial
                before = threading.enumerate()
                _import_all(names)
                os.write(writing, b"." + _started_since(before).encode()[:LONGEST_ANSWER])
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb", buffering=0) as told, selectors.DefaultSelector() as selector:
            selector.register(told, selectors.EVENT_READ)
            ended = selector.select(LONGEST_IMPORT)
            # One write of the child, not the end of the pipe, which a process that an import started may hold.
            answer = told.read(LONGEST_ANSWER + 1) if ended else b""
        kill_group(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # it may not have had its group yet
        os.waitpid(pid, 0)
        if not ended:
            return f"an import that takes longer than {LONGEST_IMPORT:g} s"
        return answer[1:].decode(errors="replace") if answer else "an import that ends the process"

    def _tell(self, message: dict[str, int | str]) -> None:
        socket_framing.send(self._control, json.dumps(message).encode())

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
