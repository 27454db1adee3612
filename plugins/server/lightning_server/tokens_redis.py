"""Tokens in Redis, in the hashes `tokens` and `revoked` by id.

The invariant: it keeps what `lightning_server.tokens` promises: a token is never deleted, and a revoked one stays revoked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from lightning.errors import ConflictError, StoreError
from lightning.store import rollout_state, rows
from lightning_redis import lua_scripts
from lightning_redis.keys import encoded
from lightning_redis.loop_client import Link, done
from lightning_redis.records import stamped, time_text

from lightning_server.tokens import Token
from lightning_server.tokens_sql import COLUMNS

PUT: Final = lua_scripts.script(
    "put_token",
    """
-- keys: tokens once
-- arguments: token at text name seconds

local before = recalled() or recalled_as(name, once)
if before then return before end
if redis.call('HEXISTS', tokens, token) == 1 then return {'taken'} end
redis.call('HSET', tokens, token, (at ~= '' and at or now) .. ' ' .. redis.call('HLEN', tokens) .. ' ' .. text)
return remember_as(name, once, seconds, {'ok'})
""",
)
REVOKE: Final = lua_scripts.script(
    "revoke_token",
    """
-- keys: tokens revoked
-- arguments: token

if redis.call('HEXISTS', tokens, token) == 0 then return {'unknown'} end
redis.call('HSETNX', revoked, token, now)
return {'ok'}
""",
)


async def put(link: Link, token: Token, once: str) -> Token:
    """Store a token, created now if it has no time. Raises `ConflictError` when its id is taken."""
    text = rows.dump(COLUMNS.values(token, without=("created_at",)))
    known_as = rollout_state.known_as(once, "put_token", token.id, token.digest, token.scope.value, token.project)
    arguments = (token.id, time_text(token.created_at), text)
    done(
        await link.run_once(PUT, [link.keys("tokens")], known_as, *arguments),
        taken=lambda _: ConflictError(f"there is a token {token.id!r} already: make one with another id"),
    )
    return await _existing(link, token.id)


async def get(link: Link, token: str) -> Token | None:
    """Return the token with this id, None when there never was one."""
    value, revoked = await link.reads.read(
        *((b"HGET", link.keys(table), encoded(token)) for table in ("tokens", "revoked"))
    )
    return None if value is None else _token(token, value, revoked)[1]


async def every(link: Link) -> list[Token]:
    """Return all tokens, oldest first."""
    flat, ended = await link.reads.read(*((b"HGETALL", link.keys(table)) for table in ("tokens", "revoked")))
    revoked = dict(zip(ended[::2], ended[1::2], strict=True))
    found = [_token(name.decode(), value, revoked.get(name)) for name, value in zip(flat[::2], flat[1::2], strict=True)]
    return [token for _, token in sorted(found, key=lambda each: each[0])]


async def revoke(link: Link, token: str) -> Token:
    """Revoke a token for good. Raises `StoreError` for an unknown id."""
    done(
        await link.run(REVOKE, [link.keys("tokens"), link.keys("revoked")], token),
        unknown=lambda _: StoreError(f"there is no token {token!r}: list_tokens() says which there are"),
    )
    return await _existing(link, token)


async def _existing(link: Link, token: str) -> Token:
    found = await get(link, token)
    assert found is not None, "a token is never deleted"
    return found


def _token(token: str, value: bytes, revoked: bytes | None) -> tuple[float, Token]:
    (at, number), columns = stamped(value, f"token {token!r}", 2)
    *first, expires_at, revoked_at = columns
    found = COLUMNS.read((*first, at, expires_at, revoked_at))
    if revoked is not None and revoked_at is None:
        found = replace(found, revoked_at=float(revoked))
    return number, found


FUNCTIONS: Final[Mapping[str, Callable[..., Awaitable[Any]]]] = {
    "put_token": put,
    "get_token": get,
    "list_tokens": every,
    "revoke_token": revoke,
}
"""The functions of the operations, by the operations' names."""
