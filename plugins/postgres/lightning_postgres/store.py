"""`PostgresStore`: the `Store` protocol over one thread that talks to the server.

The invariant: methods may be awaited from any event loop and any thread of the process that opened the store. A write that was
awaited is committed, and every later read by any process sees it.
"""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final, TypeVar

from lightning.store.operation import Operation as StoreOperation
from lightning.store.relational.store import RelationalStore
from lightning.store.relational.transaction import Operation
from lightning.store.threads import Bell, check_process, closed_error
from lightning_db.loop_thread import LoopThread

from lightning_postgres.change_listener import EventWatch, Listener
from lightning_postgres.connection import watched
from lightning_postgres.connections import Connections
from lightning_postgres.settings import Settings, from_url
from lightning_postgres.tables import make_tables

T = TypeVar("T")
OPENING_SECONDS: Final = 5.0
"""The most seconds that `open` waits for a server: less than other operations, because the server's name may be mistyped."""


class _Session:
    """The thread of an open store, and the objects that belong to that thread."""

    def __init__(self, settings: Settings, bell: Bell) -> None:
        self.settings = settings
        self.process = os.getpid()
        self.thread = LoopThread("lightning-store-postgres")
        self.connections = Connections(settings)
        self.listener = Listener(settings, bell, self.connections.distrust)
        self.opened = False

    async def open(self, make: bool) -> None:
        """Connect to the server. With `make`, make the tables if there are none."""
        if self.opened:
            return
        await make_tables(replace(self.settings, timeout=min(self.settings.timeout, OPENING_SECONDS)), make)
        self.opened = True

    async def close(self) -> None:
        """Close the connections, as the last work of the thread."""
        await self.listener.close()
        await self.connections.close()


_inherited: Final[list[_Session]] = []
"""The sessions of the process from which this one was forked. They are kept, because a connection that is dropped would close
itself, and the other process uses it."""


class PostgresStore(RelationalStore):
    """A store in a schema of a PostgreSQL database, see `Settings`. The schema is created if it is missing."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        self._lock = threading.Lock()
        self._bell = Bell()
        self._session: _Session | None = None

    @classmethod
    def from_url(cls, url: str) -> PostgresStore:
        """Make the store of a URL: `postgresql://user:password@host:5432/database`, with the options `?schema=`, `pool=`,
        `timeout=`, `ssl=`, `ca=` and `host=`. Raises `ConfigError`."""
        return cls(from_url(url))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings.place!r})"

    async def open(self, *, make: bool = True) -> None:
        """Connect, and make the store if there is none (`Store.open`)."""
        with self._lock:
            if self._session is not None and self._session.process != os.getpid():
                _inherited.append(self._session)
                self._session, self._bell = None, Bell()
            if self._session is None:
                self._session = _Session(self._settings, self._bell)
                self._with_tables.clear()
            session = self._session
        try:
            await self._submit(session, lambda: session.open(make))
        except Exception:
            await self._disconnect(session)
            raise

    async def close(self) -> None:
        """Write everything acknowledged and disconnect (`Store.close`)."""
        if self._session is not None:
            await self._disconnect(self._session)

    async def _disconnect(self, session: _Session) -> None:
        with self._lock:
            if self._session is not session:  # another call was faster, and may have opened the store again
                return
            self._session = None
        if session.process == os.getpid():
            await asyncio.to_thread(session.thread.close, session.close)
        else:
            _inherited.append(session)

    @asynccontextmanager
    async def watch(self, run: str) -> AsyncIterator[EventWatch]:
        """Watch a run for changes (`Store.watch`)."""
        session = self._open_session()
        await self._submit(session, session.listener.begin)
        event = asyncio.Event()
        with self._bell.listening(watched(run), event):
            yield EventWatch(event, self._open_session)

    async def call(self, operation: StoreOperation, arguments: dict[str, Any]) -> Any:
        """Run the function of an operation in a transaction. A call whose caller gave no `once` gets one, because the answer to
        a commit may get lost. A lease gets none: `AGAIN` has a function for it."""
        if arguments.get("once") == "" and operation.name != "lease":
            arguments = {**arguments, "once": uuid.uuid4().hex}
        return await super().call(operation, arguments)

    async def _write(self, operation: Operation[T], *, first: Callable[[], object] | None = None) -> T:
        session = self._open_session()

        async def work() -> T:
            if first is not None:
                first()
            return await session.connections.write(operation)

        result = await self._submit(session, work)
        self._has_written = True
        return result

    async def _read(self, operation: Operation[T], *, whole: bool = False) -> T:
        session = self._open_session()
        return await self._submit(session, lambda: session.connections.read(operation, whole=whole))

    async def _submit(self, session: _Session, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        waiter = session.thread.submit(work)
        if waiter is None:
            raise closed_error(self._settings.place)
        return await waiter

    def _open_session(self) -> _Session:
        session = self._session
        if session is None or not session.opened:
            raise closed_error(self._settings.place)
        check_process(self._settings.place, session.process)
        return session
