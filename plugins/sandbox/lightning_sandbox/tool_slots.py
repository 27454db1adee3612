"""Slots for tools that cannot serve all agents at once (`runner.tool_limits`): a run of a tool waits until a slot is free. Also
the stage that sets the slots up around attempts, and warns of limits that have no effect.

The invariant: at most as many runs of a tool are under way as it has slots, in all processes of this machine. A slot is a lock
on a file, which the kernel releases when its process ends in any way. A run inside another run of the same tool uses that run's
slot, so that no tool waits for itself. The files are in the user's folder below the machine's folder for temporary files, so
that all runs, clients and actors of the user share them. They are never deleted, since a new file would be another slot.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

from lightning.config.other_words import did_you_mean
from lightning.errors import ConfigError, RunnerError
from lightning.instrument import ActiveAttempt, ReplacedMethods, set_slots
from lightning.instrument.context import calling_attempt
from lightning.instrument.last_call import renew_lock_in_forks, starter, starter_here
from lightning.plugins.importing import on_import
from lightning.runner.stages import AttemptStage
from lightning.types import Json, Outcome, ToolEvent

from lightning_sandbox.config import SandboxConfig

if TYPE_CHECKING:
    from lightning.config import RunnerConfig

logger = logging.getLogger(__name__)

ENOUGH = 64
"""After this many rollouts a tool with a limit that never ran is named in a warning, so that a wrong name is noticed early in a
long run."""


def make_slots(runs: Mapping[str, int]) -> ToolLimits:
    """Create the missing slots of these tools. Raises `RunnerError` when the folder belongs to another user."""
    folder = Path(tempfile.gettempdir(), f"lightning-tools-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise RunnerError(
            f"runner.tool_limits needs the folder {folder}, which belongs to somebody else: set TMPDIR to a folder of yours"
        )
    limits = ToolLimits(str(folder), dict(runs))
    for tool in runs:
        for file in limits.files(tool):
            file.touch(mode=0o600)
    return limits


class LimitStage(AttemptStage):
    """The stage that makes runs of tools with a limit wait for a slot. It warns of limits without effect: at once where a tool
    runs without a slot; where a tool never runs, after `ENOUGH` rollouts or when all have ended."""

    api = 1

    def __init__(self, runs: Mapping[str, int]) -> None:
        self._runs = dict(runs)
        self._rollouts = 0
        self._ran: set[str] = set()
        self._told: set[str] = set()

    async def begun(self) -> None:
        """Create the slots. Raises `RunnerError` when their folder belongs to another user."""
        self._limits = make_slots(self._runs)
        self.files = (self._limits.folder,)

    def installed(self) -> Callable[[], None]:
        """Make tools wait from now on; returns the undo."""
        return limit_tools(self._limits)

    def noted(self, outcome: Outcome) -> Json:
        """Return the tools with a limit that ran without a slot in this process; None without any."""
        return list(unheld(outcome.tool_events)) or None

    def heard(self, outcome: Outcome, note: Json) -> None:
        """Count a rollout, and warn of limits without effect. `note` has the tools that ran without a slot."""
        self._rollouts += 1
        self._ran.update(event.name for event in outcome.tool_events)
        past = {str(name) for name in note} if isinstance(note, list) else set()
        for name in sorted((self._runs.keys() & past) - self._told):
            self._told.add(name)
            logger.warning(
                "runner.tool_limits has %r, and that tool ran without waiting for its turn: its framework runs it past "
                "lightning. Put @lightning.tool(name=%r) on its function, or take the limit out",
                name,
                name,
            )
        if self._rollouts == ENOUGH:
            self._name_missing()

    def closed(self) -> None:
        """Warn of tools with a limit that never ran."""
        if self._rollouts:
            self._name_missing()

    def _name_missing(self) -> None:
        for name in sorted(self._runs.keys() - self._ran - self._told):
            self._told.add(name)
            logger.warning(
                "runner.tool_limits has %r, and no tool of that name ran in %d rollouts (there ran: %s%s)",
                name,
                self._rollouts,
                ", ".join(sorted(self._ran)) or "none",
                did_you_mean(name, self._ran),
            )


def limits_for(config: RunnerConfig) -> LimitStage | None:
    """Return the stage for the setting `runner.tool_limits`; None without limits."""
    limits = SandboxConfig.of(config).tool_limits
    return LimitStage(limits) if limits else None


FIRST_PAUSE, LONGEST_PAUSE = 0.005, 0.1
"""The first and the longest pause in seconds before a process looks for a free slot again: nothing tells it when a lock is
released."""


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """How many runs of each tool may be under way, and the folder with the files that are the slots."""

    folder: str
    runs: Mapping[str, int]

    def files(self, tool: str) -> list[Path]:
        """Return the files of a tool's slots. Their names have a digest, since a tool's name may have any characters."""
        digest = hashlib.sha256(tool.encode("utf-8", "surrogatepass")).hexdigest()[:24]
        return [Path(self.folder, f"{digest}.{number}") for number in range(self.runs[tool])]


UNLIMITED = ToolLimits("", {})

_limits = UNLIMITED
_taken: set[tool_slot] = set()
_held_once: set[str] = set()
_lock = threading.RLock()
_around: ContextVar[tuple[tool_slot, ...]] = ContextVar("lightning_tool_slots", default=())
renew_lock_in_forks(globals())


class _Limited:
    """Gives tools of this process their slots."""

    def slot(self, name: str) -> tool_slot:
        """Return the slot for one run of a tool."""
        return tool_slot(name)

    def hold(self, module: str, owner: str, methods: Iterable[str], name_of: Callable[..., str]) -> Callable[[], None]:
        """Make methods of `owner` (empty: functions of the module) hold a slot of the tool `name_of` returns while they run,
        once the module is imported; returns the undo."""
        replaced = ReplacedMethods()

        def replace(found: ModuleType) -> None:
            place: Any = getattr(found, owner) if owner else found
            for name in methods:
                if name in vars(place):
                    replaced.replace(place, name, functools.partial(_holding(getattr(place, name)), name_of))

        ends = on_import(module, replace)

        def undo() -> None:
            ends()
            replaced.put_back()

        return undo


def limit_tools(limits: ToolLimits) -> Callable[[], None]:
    """Apply these limits from now on; returns the undo. Call it before adapters are installed."""
    global _limits
    before, _limits = _limits, limits
    _held_once.clear()
    free = set_slots(_Limited())

    def undo() -> None:
        global _limits
        _limits = before
        free()

    return undo


def unheld(events: Iterable[ToolEvent]) -> list[str]:
    """Return the tools with a limit that ran although no run in this process took a slot for them."""
    ran = {event.name for event in events if event.status in ("ok", "error")}
    return sorted((ran & _limits.runs.keys()) - _held_once)


class tool_slot:  # noqa: N801 — used as a verb: `with tool_slot("browser"):`
    """Hold a slot of a tool during the block, after waiting for a free one: `with tool_slot(name):`, or `async with`.

    It does nothing for a tool without a limit, outside a rollout, and inside another run of the same tool.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._file: int | None = None
        self._process = 0  # the process that took the slot
        self.loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_held(self) -> bool:
        """Whether a slot was taken and not yet released."""
        return self._file is not None

    def __enter__(self) -> Self:
        for pause in self._pauses():
            self._must_come_free()
            time.sleep(pause)
        return self

    async def __aenter__(self) -> Self:
        for pause in self._pauses():
            await asyncio.sleep(pause)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    async def __aexit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the slot, if one was taken."""
        file, self._file = self._file, None
        if file is not None:
            with _lock:
                _taken.discard(self)
            import fcntl

            if (
                self._process == os.getpid()
            ):  # a process that the tool has forked has the same lock: it neither keeps nor ends it
                fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)
            _around.set(tuple(slot for slot in _around.get() if slot is not self))

    def _pauses(self) -> Iterator[float]:
        """Yield pauses in seconds until a slot was taken; nothing where none is needed. Raises `RunnerError` once the rollout
        is over."""
        attempt = calling_attempt()
        if attempt is None or self.name not in _limits.runs or self._runs_inside():
            return
        self.loop, pause = _running_loop(), FIRST_PAUSE
        while not self._take(attempt):
            yield pause
            pause = min(2 * pause, LONGEST_PAUSE)

    def _runs_inside(self) -> bool:
        slots, around = _around.get(), starter_here()
        while around is not None:
            slots += around.context.get(_around, ())
            around = around.context.get(starter)
        return any(slot.name == self.name and slot.is_held for slot in slots)

    def _take(self, attempt: ActiveAttempt) -> bool:
        if not attempt.open:
            raise RunnerError(f"the rollout ended while its tool {self.name!r} waited for a slot (runner.tool_limits)")
        import fcntl  # not everywhere, and needed only here

        files = _limits.files(self.name)
        first = os.getpid() % len(files)  # so that processes do not all try the same slots first
        for path in files[first:] + files[:first]:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                continue
            with _lock:
                self._file, self._process = file, os.getpid()
                _taken.add(self)
                _held_once.add(self.name)
            _around.set((*_around.get(), self))
            return True
        return False

    def _must_come_free(self) -> None:
        """Raise `ConfigError` where waiting would never end, because it blocks the event loop on which all slots are held."""
        if self.loop is None:
            return
        with _lock:
            here = sum(slot.name == self.name and slot.loop is self.loop for slot in _taken)
        if here >= _limits.runs[self.name]:
            raise ConfigError(
                f"the tool {self.name!r} was called without `await` on an event loop that would stand still until one of the "
                f"{here} runs on it ends, which are all that runner.tool_limits allows: make it `async def`, or call it by "
                "asyncio.to_thread"
            )


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _holding(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the wrapper that holds a slot while a method of this kind runs: an async generator, a coroutine or a plain
    function."""
    if inspect.isasyncgenfunction(method):
        return _hold_stream
    return _hold_awaitable if inspect.iscoroutinefunction(method) else _hold


def _hold(name_of: Callable[..., str], original: Callable[..., Any], /, *args: Any, **more: Any) -> Any:
    with tool_slot(name_of(*args, **more)):
        return original(*args, **more)


async def _hold_awaitable(
    name_of: Callable[..., str], original: Callable[..., Awaitable[Any]], /, *args: Any, **more: Any
) -> Any:
    async with tool_slot(name_of(*args, **more)):
        return await original(*args, **more)


async def _hold_stream(
    name_of: Callable[..., str], original: Callable[..., AsyncGenerator[Any, None]], /, *args: Any, **more: Any
) -> AsyncGenerator[Any, None]:
    async with tool_slot(name_of(*args, **more)):
        stream = original(*args, **more)
        try:
            async for item in stream:
                yield item
        finally:
            await stream.aclose()
