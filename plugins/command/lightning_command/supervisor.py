"""Runs one program and ends everything that it leaves behind. It is a separate process, started as `python supervisor.py
STATUS_FD`.

The invariant: nothing that the program started outlives this process: neither processes in the background nor those that left
its session (on Linux; elsewhere its process group ends). They are ended when the program has ended, and when the process that
started this one is gone, which closes standard input. Then the folder is removed, too. Only the standard library is used.

Standard input begins with a line of JSON: `argv`, `cwd`, `env`, `stdin`, `root`, `timeout` (seconds; null: none) and `most`,
the bytes that are kept of the beginning and of the end of each stream. When the program has ended, its `stdout` and `stderr`
are files in `root`, and a line of JSON with `code` (124 and `timed_out` after a timeout) is written to STATUS_FD.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, BinaryIO

SUBREAPER, DEATH_SIGNAL = 36, 1
"""Numbers of prctl(2)."""
LONGEST_KILL = 10.0
"""A program that forks faster than it is killed is given up after this many seconds."""
LEFT_OUT = b"\n... bytes left out ...\n"


class Kept:
    """Keeps the beginning and the end of a stream, `most` bytes of each."""

    def __init__(self, most: int) -> None:
        self._most, self._head, self._tail, self._cut = most, bytearray(), bytearray(), False

    def add(self, data: bytes) -> None:
        """Add the next bytes of the stream."""
        room = self._most - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        if len(self._tail) > self._most:
            self._cut = True
            del self._tail[: -self._most]

    def write(self, path: str) -> None:
        """Write the kept bytes to a new file; an existing one is an error."""
        with open(path, "xb") as file:  # noqa: PTH123 — pathlib costs as much to import as all the rest
            file.write(bytes(self._head) + (LEFT_OUT if self._cut else b"") + bytes(self._tail))


def prctl(option: int, value: int) -> None:
    """Call Linux's prctl; elsewhere do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def descendants() -> list[int]:
    """Return the ids of all running processes below this one; empty where it is not Linux."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if sys.platform == "linux" else ():  # noqa: PTH208
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
            state, parent = file.read().rpartition(b") ")[2].split()[:2]
            if state != b"Z" or int(parent) == os.getpid():
                parents.setdefault(int(parent), []).append(int(name))
    found, waiting = [], [os.getpid()]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def end_all(program: subprocess.Popen[bytes] | None) -> None:
    """Kill all processes below this one, and wait until they have ended."""
    if program is not None:
        with contextlib.suppress(OSError):
            os.killpg(program.pid, signal.SIGKILL)
    until = time.monotonic() + LONGEST_KILL
    while time.monotonic() < until:
        for pid in descendants():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def start(asked: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start the program, in a session of its own. Raises `OSError`."""
    return subprocess.Popen(  # noqa: S603 — what the user named
        asked["argv"],
        cwd=asked["cwd"],
        env=asked["env"],
        stdin=subprocess.PIPE if asked["stdin"] else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: prctl(DEATH_SIGNAL, signal.SIGKILL),
    )


def follow(
    program: subprocess.Popen[bytes], asked: dict[str, Any], lifeline: BinaryIO, kept: dict[str, Kept]
) -> dict[str, Any] | None:
    """Read the program's output until it ends or times out. Return its exit code and whether it timed out; None when the
    process that started this one is gone."""
    said = asked["stdin"].encode()
    until = None if asked["timeout"] is None else time.monotonic() + asked["timeout"]
    streams: dict[Any, Kept] = {program.stdout: kept["stdout"], program.stderr: kept["stderr"]}
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with selectors.DefaultSelector() as selector:
        for each in (lifeline, ended, *streams):
            selector.register(each, selectors.EVENT_READ)
        if program.stdin is not None:
            os.set_blocking(program.stdin.fileno(), False)
            selector.register(program.stdin, selectors.EVENT_WRITE)
        status = program.poll()
        while status is None and (until is None or time.monotonic() < until):
            for key, _ in selector.select(None if until is None else max(0.0, until - time.monotonic())):
                if key.fileobj is lifeline:
                    return None
                if key.fileobj == ended:
                    os.read(ended, 4096)
                elif key.fileobj is program.stdin:
                    said = _send(selector, program.stdin, said)
                elif data := os.read(key.fd, 65536):
                    streams[key.fileobj].add(data)
                else:
                    selector.unregister(key.fileobj)
            status = program.poll()
    end_all(program)  # first, since processes that it left behind keep its pipes open
    for pipe, stream in streams.items():
        _drain(pipe, stream)
    if status is None:
        return {"code": 124, "timed_out": True}
    return {"code": status if status >= 0 else 128 - status, "timed_out": False}


def _drain(pipe: Any, stream: Kept) -> None:
    """Read the rest of a stream after its writers were ended."""
    os.set_blocking(pipe.fileno(), False)
    with contextlib.suppress(BlockingIOError):  # a process that could not be ended keeps it open
        while data := os.read(pipe.fileno(), 65536):
            stream.add(data)


def _send(selector: selectors.BaseSelector, pipe: Any, said: bytes) -> bytes:
    """Write as much to the program's standard input as it takes now; return the rest."""
    try:
        left = said[os.write(pipe.fileno(), said[:65536]) :]
    except BlockingIOError:
        return said
    except OSError:  # it reads no more
        left = b""
    if not left:
        selector.unregister(pipe)
        pipe.close()
    return left


def main(status_fd: int) -> None:
    """Run the program that the process at the other end of standard input asks for, and clean up."""
    prctl(SUBREAPER, 1)
    lifeline = os.fdopen(0, "rb", buffering=0)
    signal.signal(signal.SIGTERM, lambda *_: None)  # it reaches all processes of a service; the runner handles it
    line = bytearray()
    while not line.endswith(b"\n"):  # nothing follows the line
        if not (piece := lifeline.read(65536)):
            return
        line += piece
    asked = json.loads(line)
    program = None
    kept = {name: Kept(asked["most"]) for name in ("stdout", "stderr")}
    try:
        try:
            program = start(asked)
        except OSError as error:
            answer: dict[str, Any] = {"failed": f"{error.strerror} ({error.filename or asked['argv'][0]})"}
        else:
            ended = follow(program, asked, lifeline, kept)
            if ended is None:
                return
            for name, stream in kept.items():
                stream.write(os.path.join(asked["root"], name))  # noqa: PTH118
            answer = ended
        os.write(status_fd, json.dumps(answer).encode() + b"\n")
        while lifeline.read(65536):
            pass
    finally:
        end_all(program)
        shutil.rmtree(asked["root"], ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
