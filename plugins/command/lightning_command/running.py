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
"""Bytes that are kept of the beginning of a stream, and as many of its end."""
LARGEST_REWARD = 64 * 1024
"""The longest file with a reward, in bytes."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a program ended, and its output.

    `folder` is its scratch folder, which exists until the grader returns. `exit_code` is 128 + N after signal N, as in shells,
    and 124 with `timed_out` when it exceeded the time of its Harbor task. `output` and `errors` are the bytes of standard
    output and standard error; in `stdout` and `stderr` bytes that are not UTF-8 become U+FFFD.
    """

    folder: Path
    exit_code: int
    timed_out: bool = False
    output: bytes = field(default=b"", repr=False)
    errors: bytes = field(default=b"", repr=False)

    @property
    def stdout(self) -> str:
        """The text of standard output."""
        return self.output.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """The text of standard error."""
        return self.errors.decode("utf-8", "replace")

    def last_words(self, most: int = 2000) -> str:
        """Return the end of standard error, or of standard output if that is empty, for a message."""
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
    """Run a program in `folder` and yield its result; afterwards remove `root`, where its output is kept. After `timeout`
    seconds it is ended.

    When this is cancelled, or this process dies, the program ends with everything that it has started. Raises `RunnerError` for
    a program that cannot be started.
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
    """Read the JSON in a file with a reward. The judged program may have made the file, so a pipe is not waited for, and little
    is read. Raises `OSError` for an unreadable file or one that is not regular, `ValueError` for what is no JSON or too
    long."""
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
    """Read the supervisor's line of JSON. Raises `RunnerError` when the supervisor was killed."""
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
