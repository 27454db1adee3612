"""Who may open a console: whoever was shown the address that `lightning console` printed, or the holder of a server's token.

The invariant: a cookie holds a session's name and nothing else. A session is remembered by its digest, ends with the token that
opened it, and is refused as soon as that was revoked (`lightning_server.auth` says how soon).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Protocol

from lightning.bounded import Bounded
from lightning.errors import ConfigError
from lightning.types import Scope
from lightning_server.auth import Authenticator
from lightning_server.errors import ApiError

SESSIONS: Final = 10_000
"""Sessions of one server at most; the oldest goes first."""
SESSIONS_EACH: Final = 100
"""Sessions of one token, of which a team may share one: whoever logs in again and again ends their own, and nobody else's."""
READERS: Final = (Scope.VIEWER, Scope.TRAINER)
"""Scopes that open the console; an admin's does too. Those of `TRAINER` may also change what actions change."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who looks. `project` bounds what is seen, None: nothing is hidden; `changes` says that actions are theirs to do."""

    session: str
    name: str
    project: str | None
    changes: bool


VISITOR: ContextVar[Visitor] = ContextVar("visitor")
"""Who sent the request that is being answered."""


def visitor() -> Visitor:
    """Who sent the request that is being answered."""
    return VISITOR.get()


def digest_of(text: str) -> str:
    """What is kept of a secret with 256 random bits."""
    return hashlib.sha256(text.encode()).hexdigest()


class Door(Protocol):
    """Lets visitors in. `form` says that they give a token on a page; otherwise it is in the address that they were given."""

    form: bool

    async def enter(self, token: str) -> str:
        """A new session for the holder of a token. Raises `ApiError` for one that opens nothing here."""

    async def find(self, session: str) -> Visitor | None:
        """Whose session it is; None for one that is unknown or has ended. Raises `LightningError` where nobody can say."""

    def leave(self, session: str) -> None:
        """End a session."""


class OwnDoor:
    """The door of a console on a person's own machine, as Jupyter has it: other users of the machine, and other pages in the
    browser, do not know the token in the address that was printed."""

    form = False

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(32)
        self._session, self._once = secrets.token_urlsafe(32), ""

    def once(self) -> str:
        """A token that opens the door one time, and instead of the last such."""
        self._once = secrets.token_urlsafe(32)
        return self._once

    async def enter(self, token: str) -> str:
        """See `Door.enter`."""
        if self._once and hmac.compare_digest(digest_of(token), digest_of(self._once)):
            self._once = ""
            return self._session
        if not hmac.compare_digest(digest_of(token), digest_of(self.token)):
            raise ApiError(
                401, "invalid_token", "Open the address that `lightning console` has printed: it has a token."
            )
        return self._session

    async def find(self, session: str) -> Visitor | None:
        """See `Door.find`."""
        known = hmac.compare_digest(digest_of(session), digest_of(self._session))
        return Visitor("own", "", None, changes=True) if known else None

    def leave(self, session: str) -> None:
        """See `Door.leave`: the session of this machine's user is the process."""


class TokenDoor:
    """The door of a server's console: a token of scope viewer, trainer or admin opens it."""

    form = True

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        self._sessions = Bounded[str, str](SESSIONS)

    async def enter(self, token: str) -> str:
        """See `Door.enter`."""
        principal = await self._authenticator.principal(f"Bearer {token.strip()}")
        principal.require(*READERS)
        session = secrets.token_urlsafe(32)
        mine = [key for key, owner in self._sessions.items() if owner == principal.id]
        if len(mine) >= SESSIONS_EACH:
            del self._sessions[mine[0]]
        self._sessions.keep(digest_of(session), principal.id)
        return session

    async def find(self, session: str) -> Visitor | None:
        """See `Door.find`."""
        key = digest_of(session)
        identity = self._sessions.get(key)
        if identity is None:
            return None
        try:
            principal = await self._authenticator.still(identity)
        except ApiError:
            self._sessions.pop(key, None)
            return None
        changes = principal.scope in (Scope.TRAINER, Scope.ADMIN)
        return Visitor(key, principal.name or principal.id, principal.project, changes)

    def leave(self, session: str) -> None:
        """See `Door.leave`."""
        self._sessions.pop(digest_of(session), None)


def need_changes(who: Visitor) -> None:
    """Raise `ConfigError` for a visitor who may only look."""
    if not who.changes:
        raise ConfigError(
            "a viewer's token changes nothing: log in with one of scope trainer or admin (lightning token create trainer)"
        )
