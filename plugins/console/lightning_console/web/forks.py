"""The button *Fork here*: run `lightning branch --live` in a process, for the console on a person's own machine.

The invariant: it runs only commands that this person could run in the same folder, at most `MOST` at once, and no process
outlives the console.
"""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from lightning.asyncio_utils import end, end_process
from lightning.errors import ConfigError, DataError
from lightning_branching.branching import base_name

from lightning_console.pages.rollout import SAMPLES
from lightning_console.places import Located, Places

logger = logging.getLogger(__name__)

MOST: Final = 2
SECONDS: Final = 50.0
"""Seconds that the page waits for the branches to begin; importing the agent's frameworks comes first."""
SOME_VOID: Final = 1
"""The command's exit code when some branches are void or failed: the pages show which."""
LOOK: Final = 0.3
LAST: Final = 8192
"""The last bytes of the command's error output that are kept."""
GRACE: Final = 15.0
"""Seconds that commands have to end their agents when the console is closed."""
BEGIN: Final = """
import ctypes, signal, sys
if sys.platform.startswith("linux"):
    ctypes.CDLL(None).prctl(1, signal.SIGINT, 0, 0, 0)  # PR_SET_PDEATHSIG: it ends as by Ctrl-C when the console was killed
from lightning.cli.app import main
main(sys.argv[1:])
"""
AGENT: Final = re.compile(r"[A-Za-z_][\w.]*:\S.*", re.DOTALL)


class Forks:
    """The processes that make branches for a console."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Task[tuple[int, str]]] = {}
        self._following: set[asyncio.Task[None]] = set()
        self._processes: set[asyncio.subprocess.Process] = set()
        self._closed = False

    async def begin(self, places: Places, given: Mapping[str, Any]) -> str:
        """Start the branches that an action `fork` asks for, wait up to `SECONDS` until they have begun, and return a text for
        the visitor. Raises `DataError` for wrong arguments or with the command's error, and `ConfigError` if branches at this
        call, or at `MOST` calls, are being made already."""
        agent, at, attempt = str(given.get("agent", "")).strip(), given.get("at"), given.get("attempt")
        if not AGENT.fullmatch(agent):
            raise DataError(f"{agent[:100]!r} names no agent: write MODULE:FUNCTION, as for `lightning train`")
        if not isinstance(at, int) or not isinstance(attempt, int):
            raise DataError("say at which call, and of which attempt")
        located, rollout = await places.find(str(given.get("run", ""))), str(given.get("rollout", ""))
        # A store's shown URL lacks its password, so a place given by URL is used as it is. In a folder, the store's own URL is
        # used, because another store there may have a rollout of this id.
        where = places.where if "://" in places.where else located.url
        if (name := base_name(rollout, at)) in self._running:
            raise ConfigError("branches at this call are being made already: they are shown here as they come")
        if self._closed or len(self._running) >= MOST:
            raise ConfigError(f"{MOST} calls are being branched already: wait until their branches have ended")
        options = f"--at {at} -n {SAMPLES} --attempt {attempt} --live --yes --json".split()
        running = asyncio.create_task(self._run(["branch", *options, "--runs", where, "--", rollout, agent]))
        self._running[name] = running
        running.add_done_callback(lambda _: self._running.pop(name))
        began, until = time.time(), time.monotonic() + SECONDS
        while time.monotonic() < until:
            ended = running.done()
            if await _has_begun(located, name, began):
                self._follow(located, name, began, running)
                return f"{SAMPLES} branches have begun: this page and that of the group show them as they come"
            if ended:
                raise DataError(running.result()[1])
            await asyncio.sleep(LOOK)
        self._follow(located, name, began, running)
        return (
            "the branches have not begun yet: the agent takes long to start. They are shown here as they come, and "
            "if they cannot be made, the console's terminal says why"
        )

    def _follow(self, located: Located, name: str, began: float, running: asyncio.Task[tuple[int, str]]) -> None:
        """Log the command's error in the console's terminal when it ends, because the page no longer waits for it."""

        async def follow() -> None:
            code, said = await running
            if not await _has_begun(located, name, began):
                logger.warning("the branches %s were not made: %s", name, said)
            elif code not in (0, SOME_VOID):
                logger.warning("the branches %s broke off: %s", name, said)

        following = asyncio.create_task(follow())
        self._following.add(following)
        following.add_done_callback(self._following.discard)

    async def _run(self, command: Sequence[str]) -> tuple[int, str]:
        """Run a command to its end; return its exit code, and its error or its last line."""
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-c", BEGIN, *command],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must reach only the console, which then ends the command
        )
        self._processes.add(process)
        if self._closed:
            process.send_signal(signal.SIGINT)
        said = b""
        try:
            assert process.stderr is not None, "it is a pipe"
            while part := await process.stderr.read(LAST):
                said = (said + part)[-LAST:]
            await process.wait()
        finally:
            await end_process(process)
            self._processes.discard(process)
        assert process.returncode is not None, "it was waited for"
        return process.returncode, _error_in(said) or f"the command ended with {process.returncode}"

    async def close(self) -> None:
        """Stop the running commands and their agents. Branches that have ended stay in the store."""
        self._closed = True
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
        if running := [*self._running.values()]:
            await asyncio.wait(running, timeout=GRACE)
        await end(*self._following, *running)


async def _has_begun(located: Located, name: str, began: float) -> bool:
    """Return whether the store has a run called `name` or `name-NUMBER` that was created since `began`."""
    newest = await located.store.list_runs(limit=20, brief=True)
    return any(re.fullmatch(rf"{re.escape(name)}(-\d+)?", run.id) and run.created_at >= began for run in newest)


def _error_in(said: bytes) -> str:
    """Return the last error in a command's output, or its last line if it has none."""
    lines = [line.strip() for line in said.decode("utf-8", "replace").splitlines() if line.strip()]
    last = max((place for place, line in enumerate(lines) if line.startswith("error:")), default=-1)
    return " ".join(lines[last:]).removeprefix("error:").strip()
