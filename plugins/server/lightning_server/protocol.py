"""What other plugins answer on the port of `lightning serve`, and what they are given for that. By the hook
`register_web_apps` of this plugin.

The invariant: an application sees a store of all projects, so it must ask whose token it is dealing with, and show that project
alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from lightning.store.protocol import Store
from lightning.types import LLM
from starlette.types import Receive, Scope, Send

from lightning_server.auth import Authenticator

SESSION_OF = "session_of"
"""In the configuration of a session's run: the run whose model it calls, empty for the server's own. No other run has it."""
Served = Callable[[str], Awaitable[bool]]
"""Whether the model of a run can be called now; of the empty run: the server's own model."""


class OpenSession(Protocol):
    """Opens a session on the server's gateway: its calls are recorded as one rollout of a run of their own."""

    async def __call__(self, name: str, ttl: float, *, project: str = ..., run: str = ...) -> LLM:
        """A key for `ttl` seconds, of a session `name` of the project. `run` says whose model answers; empty: the server's."""


@dataclass(frozen=True, slots=True)
class Host:
    """A server as an application sees it. `path` is below what it answers (`/console`), `url` the server's address for people;
    empty where it is none but that of the socket. `own_model` says that the server has a model itself."""

    path: str
    url: str
    store: Store
    authenticator: Authenticator
    open_session: OpenSession
    served: Served
    own_model: bool = False


class WebApp(Protocol):
    """An ASGI application that is closed before the server is. `scope["path"]` is the whole path of the request."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    async def close(self) -> None: ...
