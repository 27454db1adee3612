"""Routes about the server itself.

The invariant: what needs no token says nothing of what the server holds, where it is, or which release it runs.
"""

from __future__ import annotations

from lightning import __version__
from lightning.store.operation import ANY
from lightning.types import Json

from lightning_server import json_codec, messages
from lightning_server.api.table import ApiCall, NoQuery, Route
from lightning_server.auth import ALL_PROJECTS


async def health(call: ApiCall[NoQuery, None]) -> messages.Health:
    """200 while the store answers, else 503."""
    await call.store.get_run("health")
    return messages.Health("ok")


async def version(call: ApiCall[NoQuery, None]) -> messages.Version:
    """The release of the server, and what the token that asks may do."""
    asking = call.principal
    project = ALL_PROJECTS if asking.project is None else asking.project
    return messages.Version(__version__, "v1", asking.scope.value, project)


async def openapi(call: ApiCall[NoQuery, None]) -> Json:
    """This description."""
    return call.services.describe()


ROUTES = (
    Route("GET", "/health", health, None, messages.Health),
    Route("GET", "/version", version, ANY, messages.Version),
    Route("GET", "/openapi.json", openapi, None, json_codec.AnyJson),
)
