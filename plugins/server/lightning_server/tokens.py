"""The control API's tokens, and the store operations on them, such as `await put_token(store, token)`. A server adds them to
every store.

The invariant: the store keeps a token by the digest of its secret and never deletes it; a revoked token stays revoked. A
project sees its own tokens, and makes none for another project.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

from lightning.errors import DataError
from lightning.installation import OWN
from lightning.store.operation import ADMIN, Operation, OperationGroup, UnseenError, operation
from lightning.store.protocol import Store
from lightning.types import DEFAULT_PROJECT, Scope


@dataclass(frozen=True, slots=True)
class Token:
    """The right of a person or a program to use the control API in one project. The secret itself is not stored.

    `digest` is the SHA-256 (hexadecimal) of the secret. Times are Unix seconds; a token without `expires_at` is valid until it
    is revoked. A `project` of `*` means all projects.
    """

    id: str
    scope: Scope
    digest: str
    project: str = DEFAULT_PROJECT
    name: str = ""
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None


class TokenOperations(Protocol):
    """The signatures of the operations on tokens."""

    async def put_token(self, token: Token, *, once: str = "") -> Token:
        """Store a token and return it as stored. Raises `ConflictError` when its id is taken."""

    async def get_token(self, token: str) -> Token | None:
        """Return the token with this id, also when it was revoked or has expired; None when there never was one."""

    async def list_tokens(self) -> list[Token]:
        """Return all tokens, oldest first."""

    async def revoke_token(self, token: str) -> Token:
        """Revoke a token for good and return it; revoking it again changes nothing. Raises `StoreError` for an unknown id."""


async def _of_project(store: Store, project: str, asked: Operation, arguments: dict[str, Any]) -> Any:
    """Do an operation on tokens for one project: lists leave other projects' tokens out. Raises `DataError` for a new token of
    another project, `UnseenError` for an id that is not the project's."""
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
