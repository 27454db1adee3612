"""The operating-system side of an owned server: its port, its process group, its log.

The invariant: after `stop` no process of the group is left, and what went wrong at a start can be read from `explain`.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from lightning.errors import PolicyServerError

TAIL_LINES = 15
MAX_LINE = 400
STOP_SECONDS = 15.0
"""How long vLLM may take to end on SIGTERM before its group is killed."""
_CULPRIT = re.compile(r"\b[A-Za-z_.]*(?:Error|Exception|Exit)\b: .*\S|\bKilled\b|Segmentation fault")
_HARMLESS = re.compile(r"^(?:\([^)]*\)\s*)*(?:DEBUG|INFO|WARNING) \d\d-\d\d ")
"""How vLLM begins a line that is no error's; its warnings name errors that may come."""


@contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """A port that stays ours until the server listens on it; 0 takes a free one.

    Our socket is bound but never listens. The server's own socket may bind beside it, since both set SO_REUSEADDR, and
    nobody else is handed the port meanwhile. Raises PolicyServerError when somebody listens there already.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family, socket.SOCK_STREAM)) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((host, port))
        except OSError as error:
            raise PolicyServerError(
                f"vLLM cannot listen on {host}:{port} ({error.strerror}); "
                "stop what listens there, or set policy_server.port to another one (0 takes a free one)"
            ) from error
        yield held.getsockname()[1]


class ServerProcess:
    """vLLM, started through our launcher as the leader of its own session, so that Ctrl-C reaches only its owner."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            self._log_start = file.tell()
            # -P: a module in the current directory must not hide one of vLLM's.
            self._popen = subprocess.Popen(  # noqa: S603 — our own interpreter and arguments, no shell
                [sys.executable, "-P", "-m", "lightning.policy_server.launch", *args],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the API server, which leads the group."""
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._popen.poll()

    def explain(self) -> str:
        """The first error this start wrote, and the last lines of its log."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            lines = [line.rstrip() for line in file.read().decode(errors="replace").splitlines()]
        lines = [line[:MAX_LINE] for line in lines if line.strip()]
        told = (line for line in lines if not _HARMLESS.search(line))
        culprit = next((match.group() for line in told if (match := _CULPRIT.search(line))), "")
        tail = "\n".join(f"  | {line}" for line in lines[-TAIL_LINES:]) or "  | (nothing was written)"
        return f"{f'{culprit}. ' if culprit else ''}The last lines of {self.log}:\n{tail}"

    async def stop(self, *, patience: float = STOP_SECONDS) -> None:
        """End it and everything it started: politely, then by force. May be called again."""
        if self.returncode is None:
            self._popen.terminate()
            await self._wait(patience)
        self.kill()
        await self._wait(patience)

    def kill(self) -> None:
        """Kill the whole group now."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    async def _wait(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self.returncode is None and loop.time() < deadline:  # noqa: ASYNC110 — a child has no event
            await asyncio.sleep(0.05)
