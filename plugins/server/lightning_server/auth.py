"""Authentication for the control API by scoped tokens of people and programs; and whether a server may listen beyond this
machine.

The invariant: only the holder of a secret knows it. The store has its SHA-256, and no log and no error has any part of it. A
token that was revoked or has expired opens nothing on any server `CACHE_SECONDS` later. A server listens beyond loopback only
if a person has made a token for it; a token that a server made by itself does not count.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from dataclasses import dataclass

from lightning.addresses import is_loopback
from lightning.bounded import Aging
from lightning.config import Config
from lightning.errors import ConfigError, DataError
from lightning.store.protocol import Store
from lightning.store.url import redacted
from lightning.types import DEFAULT_PROJECT, Scope
from starlette.datastructures import Headers
from starlette.types import Scope as ASGIScope

from lightning_server.config import ProjectConfig
from lightning_server.errors import ApiError
from lightning_server.tokens import Token, get_token, list_tokens

ALL_PROJECTS = "*"
"""The `project` of an admin's token that is valid for all projects."""
CACHE_SECONDS = 1.0
"""Seconds for which a server uses the store's last answer about a token."""
CACHED = 4096
SECRET_BYTES = 32
LONGEST_NAME = 200
LONGEST_LIFE = 100 * 365.25 * 86_400.0
"""The longest lifetime of a token in seconds; a token may also live until it is revoked."""
LAST_TIME = 253_402_300_799.0
"""The last second of the year 9999 as Unix time; Python's calendar has no later one."""
IDENTITY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""The ids of tokens, and the names of projects."""
PLAIN = re.compile(r"lt_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
NOBODY = "0" * 64
"""The digest to compare with when there is no such token, so that this answer takes as long as any other."""


@dataclass(frozen=True, slots=True)
class Principal:
    """The holder of a verified token. `project` is the token's project, None for all projects."""

    id: str
    name: str
    scope: Scope
    project: str | None

    def require(self, *scopes: Scope) -> None:
        """Check that the token has one of the scopes; an admin's token always does. Raises `ApiError` (403) otherwise."""
        if self.scope is not Scope.ADMIN and self.scope not in scopes:
            needed = " or ".join(dict.fromkeys([*(scope.value for scope in scopes), Scope.ADMIN.value]))
            raise ApiError(
                403,
                "forbidden",
                f"The token {self.id} has the scope {self.scope.value!r}; this needs {needed}. "
                f"Ask whoever runs the server for: lightning token create {scopes[0] if scopes else Scope.ADMIN}",
            )


def issue_token(
    scope: Scope, project: str = DEFAULT_PROJECT, name: str = "", ttl: float | None = None
) -> tuple[Token, str]:
    """Make a token, to be stored with `put_token`, and return it with its plain text `lt_<id>_<secret>`, which nothing stores.

    `ttl` is in seconds; without it the token lives until it is revoked. Raises `DataError` for an invalid project or name or
    `ttl`, and for all projects (`*`) with another scope than admin.
    """
    scope = Scope(scope)
    check_project(project, scope)
    _check_name(name)
    if ttl is not None and not 0 < ttl <= LONGEST_LIFE:
        raise DataError(
            f"a token cannot live for {ttl!r} seconds: give a positive number, of 100 years at most, or none for no end"
        )
    identity, secret = secrets.token_hex(8), secrets.token_urlsafe(SECRET_BYTES)
    now = time.time()
    expires_at = None if ttl is None else now + ttl
    token = Token(identity, scope, digest_of(secret), project, name, created_at=now, expires_at=expires_at)
    return token, f"lt_{identity}_{secret}"


def check_token(token: Token) -> None:
    """Raise `DataError` for a token that a client made and `issue_token` could not have made."""
    check_project(token.project, token.scope)
    _check_name(token.name)
    if not IDENTITY.fullmatch(token.id):
        raise DataError(
            f"{token.id[:80]!r} cannot be the id of a token: use up to 64 letters, digits, '.', '_' and '-', a letter or "
            "digit first"
        )
    for name, at in (("created_at", token.created_at), ("expires_at", token.expires_at)):
        if at is not None and not 0 <= at <= LAST_TIME:
            raise DataError(f"{name}={at!r} is no time: give seconds since 1970, of a year before 10000")


def _check_name(name: str) -> None:
    if len(name) > LONGEST_NAME or not name.isprintable():
        raise DataError(f"a token's name has at most {LONGEST_NAME} printable characters: {name[:40]!r} is none")


def check_project(project: str, scope: Scope) -> None:
    """Raise `DataError` unless a token of this scope may be bound to the project."""
    if project == ALL_PROJECTS:
        if scope is not Scope.ADMIN:
            raise DataError(f"a {scope.value}'s token is bound to one project: name it instead of {ALL_PROJECTS!r}")
    elif not IDENTITY.fullmatch(project):
        raise DataError(
            f"{project[:80]!r} cannot name a project: use up to 64 letters, digits, '.', '_' and '-', a letter or digit first"
        )


def project_of(config: Config) -> str:
    """Return the setting `trainer.project`. Raises `ConfigError` for what no token of a runner can be bound to."""
    project = ProjectConfig.of(config).project
    try:
        check_project(project, Scope.RUNNER)
    except DataError as error:
        raise ConfigError(f"trainer.project: {error}") from error
    return project


def digest_of(secret: str) -> str:
    """Return the digest that the store keeps of a secret. A secret has 256 random bits, so a plain hash is safe against
    search."""
    return hashlib.sha256(secret.encode()).hexdigest()


def authorization_in(scope: ASGIScope) -> str:
    """Return a request's header `Authorization`; empty when the request has none or several."""
    given = Headers(scope=scope).getlist("authorization")
    return given[0] if len(given) == 1 else ""


class Authenticator:
    """Finds out who sent a request. Make one for each server; any event loop that may use the store may use it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known = Aging[str, Token](CACHED)

    async def principal(self, authorization: str) -> Principal:
        """Return the holder of the token in an `Authorization: Bearer lt_...` header.

        Raises `ApiError` (401) when the token is missing, malformed, unknown, expired or revoked; `StoreError` when the store
        does not answer. The answer says that a token is expired or revoked only to a holder of its secret.
        """
        scheme, _, plain = authorization.partition(" ")
        if not plain or scheme.lower() != "bearer":
            raise _refused("missing_token", "No token was sent. Send: Authorization: Bearer lt_<id>_<secret>")
        found = PLAIN.fullmatch(plain.strip())
        if found is None:
            agents = plain.startswith("eyJ")
            why = "the API key of a rollout's agent, which calls the model and nothing else" if agents else "no token"
            raise _refused("invalid_token", f"What was sent is {why}.")
        identity, secret = found.groups()
        token = await self._token(identity)
        if not hmac.compare_digest(digest_of(secret), NOBODY if token is None else token.digest) or token is None:
            raise _refused("invalid_token", "The token is not one of this server.")
        return _holder(token)

    async def still(self, identity: str) -> Principal:
        """Return the holder of the token with this id, which `principal` verified before. Raises as `principal` does when the
        token has expired or was revoked since."""
        token = await self._token(identity)
        if token is None:
            raise _refused("invalid_token", "The token is not one of this server.")
        return _holder(token)

    async def _token(self, identity: str) -> Token | None:
        """Return the token with this id as the store had it at most `CACHE_SECONDS` ago, None for an unknown id. Unknown ids
        are not cached: a new token works at once, and a stranger cannot fill the cache."""
        asked = time.monotonic()
        if (known := self._known.fresh(identity, asked, CACHE_SECONDS)) is not None:
            return known
        token = await get_token(self._store, identity)
        if token is None:
            self._known.pop(identity, None)
            return None
        self._known.keep(identity, (token, asked))
        return token


def is_alive(token: Token) -> bool:
    """Tell whether a token is neither revoked nor expired."""
    return token.revoked_at is None and (token.expires_at is None or token.expires_at > time.time())


def _holder(token: Token) -> Principal:
    """Return the holder of a token. Raises `ApiError` (401) when it is revoked or expired."""
    if token.revoked_at is not None:
        raise _refused("revoked_token", f"The token {token.id} was revoked.")
    if not is_alive(token):
        raise _refused("expired_token", f"The token {token.id} has expired.")
    return Principal(token.id, token.name, token.scope, None if token.project == ALL_PROJECTS else token.project)


def _refused(kind: str, why: str) -> ApiError:
    cure = "" if kind == "missing_token" else " Make one with: lightning token create"
    return ApiError(401, kind, why + cure)


AUTOMATIC = "made by the server at its first start"
"""The name of tokens that a server makes by itself."""


async def check_exposure(store: Store, host: str, *, place: str = "") -> None:
    """Check that a server of this store may listen on `host`. Raises `ConfigError` unless that is loopback, or a person has
    made a token that is still valid. `place` is the store's URL, for the message."""
    if is_loopback(host):
        return
    if any(is_alive(token) and token.name != AUTOMATIC for token in await list_tokens(store)):
        return
    where = f" --store {redacted(place)}" if place else ""
    raise ConfigError(
        f"this server will not listen on {host}, beyond this machine: nobody has made a token for it yet. Make one with "
        f"`lightning token create admin{where}`, and put a proxy with TLS before the server, since it speaks plain HTTP and "
        "tokens travel with each request. For this machine alone leave the host at 127.0.0.1"
    )
