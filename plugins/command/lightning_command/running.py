"""Runs a program under its supervisor: the asynchronous side of `lightning_command.supervisor`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import stat
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.errors import RunnerError

SUPERVISOR = str(Path(__file__).with_name("supervisor.py"))
MOST = 4 << 20
"""Bytes that are kept of the beginning of a stream, and of its end."""
LARGEST_REWARD = 64 * 1024
"""Bytes of a file with a reward."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What a program came to.

    `folder` is its scratch folder, there until the grader returns. `exit_code` is 128 + N for one that signal N ended, as
    shells have it, and 124 with `timed_out` when the time that a task in Harbor's format gives it was over. `output` and
    `errors` are the bytes of standard output and standard error; what is no UTF-8 in `stdout` and `stderr` is U+FFFD there.
    """

    folder: Path
    exit_code: int
    timed_out: bool = False
    output: bytes = field(default=b"", repr=False)
    errors: bytes = field(default=b"", repr=False)

    @property
    def stdout(self) -> str:
        """What it printed."""
        return self.output.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """What it printed to standard error."""
        return self.errors.decode("utf-8", "replace")

    def last_words(self, most: int = 2000) -> str:
        """The end of what it printed to standard error, or to standard output if nothing, for a message."""
        said = self.stderr.strip() or self.stdout.strip()
        return said if len(said) <= most else "…" + said[-most:]


@asynccontextmanager
async def run(
    argv: Sequence[str],
    environment: Mapping[str, str],
    root: Path,
    folder: Path,
    *,
    stdin: str = "",
    timeout: float | None = None,
) -> AsyncIterator[CommandResult]:
    """Run a program in `folder` and yield what it came to; then `root`, where its output is kept, is removed. After `timeout`
    seconds it is ended.

    When this is cancelled, or this process dies, the program ends with all that it has started. Raises `RunnerError` for one
    that cannot be started.
    """
    reading, writing = os.pipe()
    supervisor = None
    asked: dict[str, Any] = {
        "argv": list(argv),
        "cwd": str(folder),
        "env": dict(environment),
        "stdin": stdin,
        "root": str(root),
    }
    asked |= {"timeout": timeout, "most": MOST}
    try:
        try:
            supervisor = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", SUPERVISOR, str(writing),
                stdin=asyncio.subprocess.PIPE, pass_fds=(writing,), start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(writing)
        assert supervisor.stdin is not None
        supervisor.stdin.write(json.dumps(asked).encode() + b"\n")
        answer = await _line(reading)
        if "failed" in answer:
            raise RunnerError(f"{argv[0]} cannot be started: {answer['failed']}")
        output, errors = ((root / name).read_bytes() for name in ("stdout", "stderr"))
        yield CommandResult(folder, answer["code"], answer["timed_out"], output, errors)
    finally:
        os.close(reading)
        if supervisor is not None and supervisor.stdin is not None:
            supervisor.stdin.close()
            await asyncio.shield(supervisor.wait())


def read_reward(file: Path) -> Any:
    """The JSON in a file with a reward, which the program that is judged may have made: a pipe is not waited for, nor is much
    read. Raises `OSError` for what cannot be read or is no file, and `ValueError` for what is no JSON."""
    with open(file, "rb", opener=_at_once) as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        text = opened.read(LARGEST_REWARD + 1)
    if len(text) > LARGEST_REWARD:
        raise ValueError(f"it is longer than {LARGEST_REWARD} bytes")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


async def _line(descriptor: int) -> dict[str, Any]:
    """The line of JSON from the supervisor."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    os.set_blocking(descriptor, False)
    loop.add_reader(descriptor, ready.set)
    said = b""
    try:
        while not said.endswith(b"\n"):
            await ready.wait()
            ready.clear()
            with contextlib.suppress(BlockingIOError):
                if not (piece := os.read(descriptor, 65536)):
                    raise RunnerError("what supervises the program was killed, and the program with it")
                said += piece
    finally:
        loop.remove_reader(descriptor)
    answer: dict[str, Any] = json.loads(said)
    return answer
