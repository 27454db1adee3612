"""Routes about resources (versions, aliases, what was earned under them) and about the tokens of the control API.

The invariant: a token's secret never passes here: whoever makes a token keeps the secret and sends its digest.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from lightning.errors import DataError
from lightning.server.api.paging import page
from lightning.server.api.table import ApiCall, NoQuery, Paging, Route, nothing_there
from lightning.server.auth import ADMIN, ANY, LOOK, TRAIN, check_token
from lightning.store import messages
from lightning.store.json_codec import Slice
from lightning.store.protocol import Alias, ResourceUse
from lightning.types import Resource, Token

WHERE = "GET /resources lists those there are"


@dataclass(frozen=True, slots=True)
class OfName(Paging):
    """Which resource is meant."""

    name: str | None = field(default=None, metadata={"doc": "Of this resource only."})


async def list_resources(call: ApiCall[OfName, None]) -> Slice[Resource]:
    """Versions of resources, by name and version."""
    found = await call.store.list_resources(call.query.name)
    return page(found, call.query, lambda item: f"{item.name}@{item.version}")


async def put_resource(call: ApiCall[NoQuery, Resource]) -> Resource:
    """Keep a resource as the next version of its name; content that the name has already stays the version it is. 409 when the
    name belongs to another kind of resource."""
    return await call.store.put_resource(call.body)


async def get_resource(call: ApiCall[NoQuery, None]) -> Resource:
    """A version of a resource, by its number or by an alias."""
    name, which = call.path["name"], call.path["which"]
    number = int(which) if which.isascii() and which.isdecimal() and len(which) < 19 else which
    found = await call.store.get_resource(name, number)
    if found is None:
        raise nothing_there(f"resource {name!r} at {which!r}", WHERE)
    return found


async def resource_uses(call: ApiCall[Paging, None]) -> Slice[ResourceUse]:
    """What was earned under each version of a resource, by version, run and split."""
    found = await call.store.resource_uses(call.path["name"])
    return page(found, call.query, lambda use: f"{use.version}/{use.run}/{use.split}")


async def list_aliases(call: ApiCall[OfName, None]) -> Slice[Alias]:
    """Where aliases point now, by name and alias; `latest` is among them."""
    found = await call.store.list_aliases(call.query.name)
    return page(found, call.query, lambda alias: f"{alias.name}@{alias.alias}")


async def set_alias(call: ApiCall[NoQuery, messages.Target]) -> Alias:
    """Point an alias to a version."""
    return await call.store.set_alias(call.path["name"], call.path["alias"], call.body.version, once=call.once)


async def roll_back_alias(call: ApiCall[NoQuery, None]) -> Alias:
    """Point an alias to where it pointed before; again, to where it pointed before that."""
    return await call.store.roll_back_alias(call.path["name"], call.path["alias"], once=call.once)


async def alias_history(call: ApiCall[Paging, None]) -> Slice[Alias]:
    """Every move of an alias, oldest first."""
    return page(await call.store.alias_history(call.path["name"], call.path["alias"]), call.query)


async def list_tokens(call: ApiCall[Paging, None]) -> Slice[Token]:
    """Tokens, oldest first."""
    return page(await call.store.list_tokens(), call.query, lambda token: token.id)


async def put_token(call: ApiCall[NoQuery, Token]) -> Token:
    """Keep a token under the SHA-256 of a secret that you made: the secret itself is never sent. 409 when its id is taken."""
    token = call.body
    check_token(token)
    if len(token.digest) != 64 or set(token.digest) - set("0123456789abcdef"):
        raise DataError("digest is not the SHA-256 of a secret as 64 lower-case hexadecimal digits")
    if token.revoked_at is not None:
        raise DataError("a token cannot be made revoked: leave revoked_at out")
    return await call.store.put_token(replace(token, created_at=token.created_at or time.time()), once=call.once)


async def get_token(call: ApiCall[NoQuery, None]) -> Token:
    """One token, also when it was revoked or has expired."""
    found = await call.store.get_token(call.path["token"])
    if found is None:
        raise nothing_there(f"token {call.path['token']!r}", "GET /tokens lists those there are")
    return found


async def revoke_token(call: ApiCall[NoQuery, None]) -> Token:
    """Take a token's right away, for good; every server knows a second later."""
    return await call.store.revoke_token(call.path["token"])


ALIAS = "/resources/{name}/aliases/{alias}"
ROUTES = (
    Route("GET", "/resources", list_resources, ANY, Slice[Resource], query=OfName),
    Route("POST", "/resources", put_resource, TRAIN, Resource, Resource),
    Route("GET", "/resources/{name}/versions/{which}", get_resource, ANY, Resource),
    Route("GET", "/resources/{name}/uses", resource_uses, LOOK, Slice[ResourceUse], query=Paging),
    Route("GET", "/aliases", list_aliases, ANY, Slice[Alias], query=OfName),
    Route("PUT", ALIAS, set_alias, TRAIN, Alias, messages.Target, once=True),
    Route("POST", f"{ALIAS}/rollback", roll_back_alias, TRAIN, Alias, once=True),
    Route("GET", f"{ALIAS}/history", alias_history, LOOK, Slice[Alias], query=Paging),
    Route("GET", "/tokens", list_tokens, ADMIN, Slice[Token], query=Paging),
    Route("POST", "/tokens", put_token, ADMIN, Token, Token, once=True),
    Route("GET", "/tokens/{token}", get_token, ADMIN, Token),
    Route("DELETE", "/tokens/{token}", revoke_token, ADMIN, Token),
)
