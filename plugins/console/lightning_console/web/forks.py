"""*Fork here*: `lightning branch --live` in a process of its own, for the console of a person's own machine.

The invariant: it runs what that person could run in the same folder, at most `MOST` of it at once, and nothing of it outlives
the console.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from lightning.asyncio_utils import end
from lightning.errors import ConfigError, DataError
from lightning_debug.branching import base_name

from lightning_console.pages.branches import SAMPLES
from lightning_console.places import Located, Places

MOST: Final = 2
SECONDS: Final = 50.0
"""Until the branches have to have begun: the agent's frameworks are imported first."""
LOOK: Final = 0.3
LAST: Final = 8192
"""Bytes of what the command says that are kept: the last ones."""
GRACE: Final = 15.0
"""Seconds that a command has to end its agents when the console is closed."""
AGENT: Final = re.compile(r"[A-Za-z_][\w.]*:\S.*", re.DOTALL)


class Forks:
    """The branches that a console has begun."""

    def __init__(self) -> None:
        self._running: dict[asyncio.subprocess.Process, asyncio.Task[bytes]] = {}

    async def begin(self, places: Places, given: Mapping[str, Any]) -> str:
        """Begin the branches that an action `fork` asks for, and return when they have begun, with what is to be said. Raises
        `DataError` with what the command says where it could not, and `ConfigError` where that many are being made."""
        located, rollout = await places.find(str(given.get("run", ""))), str(given.get("rollout", ""))
        agent, at, attempt = str(given.get("agent", "")).strip(), given.get("at"), given.get("attempt")
        if not AGENT.fullmatch(agent):
            raise DataError(f"{agent[:100]!r} names no agent: write MODULE:FUNCTION, as for `lightning train`")
        if not isinstance(at, int) or not isinstance(attempt, int):
            raise DataError("say at which call, and of which attempt")
        if len(self._running) >= MOST:
            raise ConfigError(f"{MOST} calls are being branched already: wait until their branches have ended")
        command = [
            "branch",
            "--at",
            str(at),
            "-n",
            str(SAMPLES),
            "--attempt",
            str(attempt),
            "--live",
            "--yes",
            "--json",
        ]
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "lightning", *command, "--runs", places.where, "--", rollout, agent],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        self._running[process] = saying = asyncio.create_task(_end_of(process))
        saying.add_done_callback(lambda _: self._running.pop(process, None))
        began, until = time.time(), time.monotonic() + SECONDS
        while time.monotonic() < until:
            if saying.done():
                return _told(process.returncode or 0, saying.result())
            if await _has_begun(located, base_name(rollout, at), began):
                return f"{SAMPLES} branches have begun: this page and that of the group show them as they come"
            await asyncio.sleep(LOOK)
        return "the branches have not begun yet: the agent takes long to start. They are shown here as they come"

    async def close(self) -> None:
        """End what is at work: the agents are stopped, and branches that have ended are kept."""
        running = list(self._running.items())
        for process, _ in running:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
        if running:
            await asyncio.wait([saying for _, saying in running], timeout=GRACE)
        for process, saying in running:
            if not saying.done():
                process.kill()
                await end(saying)


async def _end_of(process: asyncio.subprocess.Process) -> bytes:
    """The end of what a command says, when it has ended."""
    said = b""
    assert process.stderr is not None, "it is a pipe"
    while part := await process.stderr.read(LAST):
        said = (said + part)[-LAST:]
    await process.wait()
    return said


async def _has_begun(located: Located, name: str, began: float) -> bool:
    newest = await located.store.list_runs(limit=20, brief=True)
    return any(run.id.startswith(name) and run.created_at >= began for run in newest)


def _told(code: int, said: bytes) -> str:
    """What is said of a command that has ended. Raises `DataError` where it has made no branches."""
    if code in (0, 1):
        return "the branches have ended: this page and that of the group show them"
    lines = [line.strip() for line in said.decode("utf-8", "replace").splitlines() if line.strip()]
    error = next((place for place, line in enumerate(lines) if line.startswith("error:")), -1)
    raise DataError(" ".join(lines[error:]).removeprefix("error:").strip() or f"the command ended with {code}")
