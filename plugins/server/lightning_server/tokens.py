"""The operations on tokens of the control API, which a server brings to every store: `await put_token(store, token)`.

The invariant: a token is kept by the digest of its secret and never deleted; one that was revoked stays revoked. A project sees
its own tokens, and makes none for another.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from lightning.errors import DataError
from lightning.installation import OWN
from lightning.store.operation import ADMIN, Operation, OperationGroup, UnseenError, operation
from lightning.store.protocol import Store
from lightning.types import Token


class TokenOperations(Protocol):
    """What may be asked of tokens."""

    async def put_token(self, token: Token, *, once: str = "") -> Token:
        """Keep a token and return it as it is stored. Raises `ConflictError` when its id is taken."""

    async def get_token(self, token: str) -> Token | None:
        """The token with this id, revoked and expired ones too; None when there never was one."""

    async def list_tokens(self) -> list[Token]:
        """All tokens, oldest first."""

    async def revoke_token(self, token: str) -> Token:
        """Take the right away, now and for good; again changes nothing. Raises `StoreError` for an unknown id."""


async def _of_project(store: Store, project: str, asked: Operation, arguments: dict[str, Any]) -> Any:
    """See `Rule`."""
    token = arguments.get("token")
    if isinstance(token, Token) and token.project != project:
        raise DataError(f"a token of project {project!r} makes nothing for {token.project!r}")
    if isinstance(token, str):
        found = await get_token(store, token)
        if found is None or found.project != project:
            raise UnseenError(f"there is no token {token!r}: list_tokens() says which there are")
    answer = await asked(store, **arguments)
    return [each for each in answer if each.project == project] if isinstance(answer, list) else answer


list_tokens = operation(
    TokenOperations.list_tokens, "GET /tokens", ADMIN, cursor=("id",), doc="Tokens, oldest first.", owned=_of_project
)
put_token = operation(
    TokenOperations.put_token,
    "POST /tokens",
    ADMIN,
    body="token",
    doc="Keep a token under the SHA-256 of a secret that you made: the secret itself is never sent. 409 when its id is taken.",
    owned=_of_project,
)
get_token = operation(
    TokenOperations.get_token,
    "GET /tokens/{token}",
    ADMIN,
    empty=True,
    missing="GET /tokens lists those there are",
    doc="One token, also when it was revoked or has expired.",
    owned=_of_project,
)
revoke_token = operation(
    TokenOperations.revoke_token,
    "DELETE /tokens/{token}",
    ADMIN,
    doc="Take a token's right away, for good; every server knows a second later.",
    owned=_of_project,
)
TOKENS: Final = OperationGroup(
    "tokens",
    (list_tokens, put_token, get_token, revoke_token),
    parts={"sql": "lightning_server.tokens_sql:PART", "redis": "lightning_server.tokens_redis:FUNCTIONS"},
    distribution=OWN,
)
