"""What a plugin implements to serve pages on the port of `lightning serve`, and what it is given for that: plugins register by
this plugin's hook `register_web_apps`. And what a runner implements that starts clients of a run's server.

The invariant: an application is given a store of all projects, so it must ask whose token a request has, and show that project
alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from lightning.runner.protocol import Runner
from lightning.store.protocol import Store
from lightning.types import LLM
from starlette.types import Receive, Scope, Send

from lightning_server.auth import Authenticator

SESSION_OF = "session_of"
"""Key in the configuration of a session's run. Its value is the run whose model the session calls; empty for the server's own
model. Other runs do not have this key."""
Served = Callable[[str], Awaitable[bool]]
"""Tells whether the model of a run can be called now; the empty run means the server's own model."""


class OpenSession(Protocol):
    """Opens a session on the server's gateway. The session's calls are recorded as one rollout of a run made for the
    session."""

    async def __call__(self, name: str, ttl: float, *, project: str = ..., run: str = ...) -> LLM:
        """Return access to a model for `ttl` seconds, with a key for the session `name` of the project. `run` names the run
        whose model answers; empty: the server's own model."""


@dataclass(frozen=True, slots=True)
class Host:
    """What a web application is told of its server. `path` is the path prefix that the application answers (`/console`). `url`
    is the server's public address; empty where only the address of the socket is known. `own_model` says whether the server
    itself serves a model."""

    path: str
    url: str
    store: Store
    authenticator: Authenticator
    open_session: OpenSession
    served: Served
    own_model: bool = False


class WebApp(Protocol):
    """An ASGI application that is closed before its server closes. `scope["path"]` is the request's whole path, with the
    prefix."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Site:
    """What a client (`lightning runner`) needs to work for a run.

    `server` is what goes after `--server`: one URL or several with commas, as clients reach them. `token` has the scope
    `runner`. `store` is the run's, open.
    """

    server: str
    token: str = field(repr=False)
    run: str
    store: Store


@runtime_checkable
class ClientRunner(Runner, Protocol):
    """A runner whose agents run in clients of the run's server. It starts the clients, on other machines, and replaces them.

    Its `concurrency` is 0: nothing is leased in this process, and `run` is never called.
    """

    async def attend(self, site: Site) -> None:
        """Keep clients running until this is cancelled, then end them. Raises `RunnerError` when no client can run."""
