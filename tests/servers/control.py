"""The control API over any store, on a real port of this process: what a test of a client talks to.

The invariant: it is the API that `lightning serve` mounts, in a thread of its own, so that a client may block every loop that
the test has.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from lightning.gateway.connections import Serving, bind
from lightning.store.operation import Operation
from lightning.store.protocol import Store
from lightning.types import Outcome, Rollout, Scope
from lightning_server.api.app import Api
from lightning_server.api.table import Finish, LlmFor
from lightning_server.auth import ALL_PROJECTS, Authenticator, issue_token
from lightning_server.config import PortLimits
from lightning_server.tokens import Token
from starlette.types import Receive, Send
from starlette.types import Scope as Connection

T = TypeVar("T")


async def _as_told(store: Store, rollout: str, attempt: int, outcome: Outcome) -> Rollout:
    return await store.complete(rollout, attempt, outcome)


class _Door:
    """The tokens of a store, and one more, which is not in it."""

    def __init__(self, store: Store, token: Token) -> None:
        self._store, self._token = store, token

    async def call(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        """See `Store.call`."""
        if operation.name == "get_token" and arguments["token"] == self._token.id:
            return self._token
        return await self._store.call(operation, arguments)


class ControlServer:
    """`with ControlServer() as server: url, token = server.add(store)`; each store gets a URL of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="lightning-control", daemon=True)
        self._mounted: dict[str, tuple[Api, Store]] = {}
        self._serving: Serving | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        self.run(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for url in list(self._mounted):
            self.remove(url)
        self.run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        """Where the server listens."""
        assert self._serving is not None, "enter the server first"
        return self._serving.url

    def add(
        self, store: Store, *, scope: Scope = Scope.ADMIN, finish: Finish = _as_told, llm_for: LlmFor | None = None
    ) -> tuple[str, str]:
        """Open a store and serve it; returns its URL and a token for it. By default outcomes are kept as they are told."""
        token, plain = issue_token(scope, ALL_PROJECTS if scope is Scope.ADMIN else "default")

        async def make() -> Api:
            await store.open()
            return Api(store, Authenticator(cast("Store", _Door(store, token))), finish=finish, llm_for=llm_for)

        url = f"{self.url}/{len(self._mounted)}-{token.id}"
        self._mounted[url] = (self.run(make()), store)
        return url, plain

    def remove(self, url: str) -> None:
        """Stop serving a store, and close it."""
        api, store = self._mounted.pop(url)
        self.run(api.close())
        self.run(store.close())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self) -> None:
        self._serving = Serving(
            self._answer, bind("127.0.0.1", 0), PortLimits(concurrent_requests=0, requests_per_second=0)
        )
        await self._serving.start()

    async def _stop(self) -> None:
        assert self._serving is not None, "it has started"
        await self._serving.stop()

    async def _answer(self, scope: Connection, receive: Receive, send: Send) -> None:
        _, name, rest = scope["path"].split("/", 2)
        api, _ = self._mounted[f"{self.url}/{name}"]
        raw = b"/" + scope["raw_path"].split(b"/", 2)[2]
        await api({**scope, "path": f"/{rest}", "raw_path": raw}, receive, send)
