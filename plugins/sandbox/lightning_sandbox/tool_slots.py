"""Slots for the tools that cannot take every agent at once (`runner.tool_limits`): a run that finds none free waits. The stage
that makes them ready around attempts, and what is said of limits that bound nothing.

The invariant: at most as many runs of a tool are under way as it has slots, in all processes of this machine. A slot is a lock
on a file, and the kernel releases it when its process ends, however that ends. What runs inside a run of the same tool has
that run's slot, so that no tool waits for itself. The files are this user's, in the machine's folder for temporary files, so
that all that runs here shares them: runs, clients, actors. They stay, since a file that is made anew would be another slot.
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
from typing import TYPE_CHECKING, Any, Final, Self

from lightning.config.fields import did_you_mean
from lightning.errors import ConfigError, RunnerError
from lightning.instrument import ActiveAttempt, ReplacedMethods
from lightning.instrument.context import calling_attempt
from lightning.instrument.last_call import starter, starter_here
from lightning.instrument.tool_slots import set_slots
from lightning.plugins.importing import on_import
from lightning.runner.stages import AttemptStage
from lightning.types import Json, Outcome, ToolEvent

if TYPE_CHECKING:
    from lightning.config import RunnerConfig

logger = logging.getLogger(__name__)

TOOL_LIMITS: Final = "tool_limits"
"""The name of the stage."""
ENOUGH = 64
"""Rollouts after which a tool that has not run is named: a wrong name should not bound nothing until the end of a long run."""


def make_slots(runs: Mapping[str, int]) -> ToolLimits:
    """The slots of these tools, made where they are missing. Raises `RunnerError` when somebody else has the folder."""
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
    """The runs of tools with a limit wait for their turn. Limits that bound nothing are named: at once where a tool runs past
    its limit; where a tool does not run, when `ENOUGH` rollouts or all have ended."""

    api = 1
    carries_out = ("tool_limits",)

    def __init__(self, runs: Mapping[str, int]) -> None:
        self._runs = dict(runs)
        self._rollouts = 0
        self._ran: set[str] = set()
        self._told: set[str] = set()

    async def begun(self) -> None:
        """The slots are made. Raises `RunnerError` when somebody else has their folder."""
        self._limits = make_slots(self._runs)
        self.files = (self._limits.folder,)

    def installed(self) -> Callable[[], None]:
        """From now on they wait."""
        return limit_tools(self._limits)

    def noted(self, outcome: Outcome) -> Json:
        """The tools that ran past their limits, if any."""
        return list(unheld(outcome.tool_events)) or None

    def heard(self, outcome: Outcome, note: Json) -> None:
        """Limits that bound nothing are named."""
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
        """No more rollouts come."""
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
    """The stage of a runner with these settings."""
    return LimitStage(config.tool_limits) if config.tool_limits else None


FIRST_PAUSE, LONGEST_PAUSE = 0.005, 0.1
"""Seconds between two looks for a free slot: nobody tells a process that another one has released a lock."""


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """How many runs of each tool may be under way, and the folder whose files are the slots."""

    folder: str
    runs: Mapping[str, int]

    def files(self, tool: str) -> list[Path]:
        """The slots of a tool. Its name may hold what no file name can."""
        digest = hashlib.sha256(tool.encode("utf-8", "surrogatepass")).hexdigest()[:24]
        return [Path(self.folder, f"{digest}.{number}") for number in range(self.runs[tool])]


UNLIMITED = ToolLimits("", {})

_limits = UNLIMITED
_taken: set[tool_slot] = set()
_held_once: set[str] = set()
_lock = threading.Lock()
_around: ContextVar[tuple[tool_slot, ...]] = ContextVar("lightning_tool_slots", default=())


def _unlock() -> None:
    """In a process that was just forked: the thread that held the lock is not in it, and will never let go."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


class _Limited:
    """What tools of this process wait for."""

    def slot(self, name: str) -> tool_slot:
        """See `ToolSlots`."""
        return tool_slot(name)

    def hold(self, module: str, owner: str, methods: Iterable[str], name_of: Callable[..., str]) -> Callable[[], None]:
        """See `ToolSlots`."""
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
    """Let no more runs of these tools be under way from now on; returns the undo. Adapters are installed after it."""
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
    """The tools with a limit that ran, though nothing in this process ever held them back."""
    ran = {event.name for event in events if event.status in ("ok", "error")}
    return sorted((ran & _limits.runs.keys()) - _held_once)


class tool_slot:  # noqa: N801 — used as a verb: `with tool_slot("browser"):`
    """Have a slot of a tool while the block runs, and wait for one before: `with tool_slot(name):`, or `async with`.

    It does nothing for a tool without a limit, outside a rollout, and inside another run of the same tool.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._file: int | None = None
        self._process = 0  # that took it
        self.loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_held(self) -> bool:
        """Whether it is a slot, and has not been released."""
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
        """Give the slot back, if there is one."""
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
        """Seconds until the next look, for as long as there is no slot. Raises `RunnerError` once the rollout is over."""
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
        first = os.getpid() % len(files)  # or all would look at the same slots first
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
        """Raise `ConfigError` where this wait would never end: it stops the event loop on which all the slots are held."""
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
    """What holds a slot while a method of this kind runs."""
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
