"""The error answers of the control API: how an exception becomes an answer, and how answers are sent.

The invariant: an `ApiError` has everything that its answer needs: the status, a word for programs, and a message for people
that names the cause and the cure. Every exception becomes one. A fault of the server itself is logged in full, and the client
is told one sentence.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from lightning.errors import (
    ConfigError,
    ConflictError,
    DataError,
    LightningError,
    SchemaError,
    StaleAttemptError,
    StoreError,
    UnavailableError,
)
from lightning.gateway.http import RefusalError, send_bytes
from starlette.types import Send

from lightning_server import json_codec
from lightning_server.messages import Failure, Problem


class ApiError(Exception):
    """A request that is refused. It may be raised anywhere below a route; the route turns it into the answer."""

    def __init__(self, status: int, type: str, message: str, headers: Mapping[str, str] | None = None) -> None:  # noqa: A002
        super().__init__(message)
        self.status, self.type, self.message = status, type, message
        self.headers = dict(headers or {})


log = logging.getLogger(__name__)
RETRY = {"retry-after": "1"}
KINDS: tuple[tuple[type[LightningError], int, str], ...] = (
    (StaleAttemptError, 409, "stale_attempt"),
    (ConflictError, 409, "conflict"),
    (SchemaError, 503, "schema"),
    (UnavailableError, 503, "unavailable"),
    (StoreError, 422, "refused"),
    (DataError, 400, "invalid_data"),
    (ConfigError, 422, "misconfigured"),
    (LightningError, 503, "unavailable"),
)
"""The status and word for each class of error; the first class that fits counts. `HttpStore` makes the same errors of these
words."""


def refusal_of(error: Exception, where: str) -> ApiError:
    """Return the refusal for an exception that a request raised; `where` names the request in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RefusalError):
        return ApiError(error.status, error.code, str(error))
    for kind, status, word in KINDS:
        if isinstance(error, kind):
            return ApiError(status, word, str(error), RETRY if status == 503 else None)
    if isinstance(error, RecursionError):
        return ApiError(400, "invalid_data", "The request is nested too deeply: flatten it.")
    log.error("the control API failed at %s", where, exc_info=error)
    return ApiError(
        500, "server_fault", "The server failed at this request; its log says why. Nothing else is affected."
    )


async def refuse(send: Send, refusal: ApiError) -> None:
    """Send the error answer of a refusal."""
    body = json_codec.to_bytes(Failure(Problem(refusal.type, refusal.message)))
    headers = dict(refusal.headers)
    if refusal.status == 401:
        headers["www-authenticate"] = 'Bearer realm="lightning"'
    await answer(send, refusal.status, body, headers)


async def answer(send: Send, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
    """Send a whole JSON answer; `headers` are added to the usual ones."""
    fields = {"content-type": "application/json", "cache-control": "no-store", **(headers or {})}
    pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
    await send_bytes(send, status, body, pairs)
