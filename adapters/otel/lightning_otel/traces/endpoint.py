"""`POST /v1/traces`: spans of any OpenTelemetry-instrumented process join the rollout they belong to (OTLP/HTTP).

The invariant: a span is stored only under the attempt of its trace id, or else of the request's token. Spans without an attempt
are counted, and the answer reports them; they cost no more than being read. A request without a token may bring little at a
time. Answers have OTLP's form, errors included: a `Status` in the encoding of the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from lightning.errors import DataError, MissingExtraError, StoreError
from lightning.gateway.http import (
    KEY,
    RAISE_THE_LIMIT,
    ClientGoneError,
    Header,
    RefusalError,
    RequestBody,
    read_body,
    send_bytes,
)
from lightning.redaction import redacted_span
from lightning.types import Span

from lightning_otel.traces import otlp
from lightning_otel.traces.book import TraceBook
from lightning_otel.traces.store import MAX_SPANS, append_spans

if TYPE_CHECKING:
    from lightning.gateway.calls import Parts
    from lightning.gateway.identity import Claims
    from starlette.types import Receive, Scope, Send

log = logging.getLogger(__name__)

READERS: Final = {otlp.PROTOBUF: otlp.read_protobuf, otlp.JSON: otlp.read_json}
GRPC_CODES: Final = {400: 3, 401: 16, 413: 8, 415: 3, 429: 8, 501: 12, 503: 14}
"""The `google.rpc.Status` codes of HTTP statuses; any other status is INTERNAL (13)."""
ANONYMOUS_LOOKUPS: Final = 64
"""The most unknown trace ids that the store is asked for in one request without a token."""
ANONYMOUS_BYTES: Final = 1024 * 1024
"""The most bytes of a request without a token, decompressed."""
ANONYMOUS_AT_ONCE: Final = 4
"""The most requests without a token that are read and stored at a time."""
PROTOBUF_FACTOR: Final = 48
"""Bytes of memory for each byte of protobuf: an empty message has two bytes, and takes a hundred when it is parsed."""
ANONYMOUS_SPANS: Final = 10_000
"""The most spans of a request without a token."""
SEND_THE_KEY: Final = "send the rollout's API key with the spans"
WHY_REJECTED: Final = (
    "{} of {} spans were not kept. A span belongs to a rollout by its trace id (continue the traceparent that the agent sent) "
    "or by the rollout's API key in the request; the rollout's attempt must be its latest, its key not expired, the ids well "
    f"formed, and of one attempt {MAX_SPANS} spans are kept"
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a request: decompressed bytes, with the cure for more, and spans."""

    size: int
    cure: str = RAISE_THE_LIMIT
    spans: int = sys.maxsize


class TraceEndpoint:
    """The ASGI application behind the route `/v1/traces`."""

    def __init__(self, parts: Parts) -> None:
        self._config, self._identity, self._store = parts.config, parts.identity, parts.store
        self._book = TraceBook(parts.store, shared=parts.shared)
        parts.identity.watch(self._book.note_key)
        parts.closing.push_async_callback(self._book.close)
        self._anonymous = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Never raises for a fault of the sender or of the store."""
        content_type = _header(scope, b"content-type").partition(";")[0].strip().lower()
        try:
            body = await self._take(content_type, scope, receive)
        except RefusalError as refusal:
            await _refuse(send, content_type, refusal)
        except ClientGoneError:
            return
        except Exception:
            log.exception("the gateway failed on a request with spans")
            await _refuse(send, content_type, RefusalError(500, "gateway_fault", "The gateway failed; see its log."))
        else:
            await send_bytes(send, 200, body, [(b"content-type", content_type.encode())])

    async def _take(self, content_type: str, scope: Scope, receive: Receive) -> bytes:
        """Store the spans of a request, and return the body of the answer."""
        claims = self._claims(scope)
        if content_type not in READERS:
            message = f"The content type is {content_type!r:.80}; send {' or '.join(READERS)}."
            raise RefusalError(415, "unsupported_media_type", message)
        bounds = Bounds(self._config.max_body_bytes) if claims is not None else anonymous(self._config.max_body_bytes)
        body: RequestBody | None = scope.get(KEY)
        if body is not None:
            body.is_no_call()
        payload = await read_body(scope, receive, bounds.size, bounds.cure)
        with self._turn(claims):
            if body is not None and content_type == otlp.PROTOBUF:
                await body.reserve(PROTOBUF_FACTOR * len(payload))
            return await self._keep(content_type, payload, bounds, claims)

    async def _keep(self, content_type: str, payload: bytes, bounds: Bounds, claims: Claims | None) -> bytes:
        """Read and store the spans in a request's body, and return the body of the answer. Threads read it, so that streams go
        on meanwhile."""
        spans = await asyncio.to_thread(_read, content_type, payload, bounds)
        try:
            owners = await self._book.find(self._looked_up(spans, claims))
            owned = [span for span in (_owned(span, owners, claims) for span in spans) if span is not None]
            # Redaction takes most of the time, so only spans that will be stored are redacted.
            storable = await asyncio.to_thread(lambda: [redacted_span(span) for span in owned]) if owned else []
            stored = await append_spans(self._store, storable) if storable else 0
        except StoreError as error:
            message = f"The store did not take the spans: {error}. Send them again."
            raise RefusalError(503, "store_failed", message, [(b"retry-after", b"1")]) from error
        rejected = len(spans) - stored
        return otlp.accepted(content_type, rejected, WHY_REJECTED.format(rejected, len(spans)))

    def _looked_up(self, spans: Sequence[Span], claims: Claims | None) -> list[str]:
        """Return the trace ids to look up. Without a token the store is asked only for a few of those unknown here."""
        ids = list(dict.fromkeys(span.trace_id for span in spans if otlp.well_identified(span)))
        if claims is not None:
            return ids
        unknown = [trace_id for trace_id in ids if self._book.known(trace_id) is None]
        left_out = set(unknown[ANONYMOUS_LOOKUPS:])
        return [trace_id for trace_id in ids if trace_id not in left_out]

    def _claims(self, scope: Scope) -> Claims | None:
        """Return the attempt of the request's token; None without one. Raises `RefusalError` (401) for an invalid token."""
        try:
            return self._identity.claims(scope)
        except RefusalError as refusal:
            if refusal.code == "missing_token":
                return None
            raise

    @contextlib.contextmanager
    def _turn(self, claims: Claims | None) -> Iterator[None]:
        """Limit the work for requests without a token, so that they get few of the shared threads. Raises `RefusalError`
        (429)."""
        if claims is not None:
            yield
            return
        if self._anonymous >= ANONYMOUS_AT_ONCE:
            message = (
                f"{ANONYMOUS_AT_ONCE} requests without a token are being read already. Ask again, or {SEND_THE_KEY}."
            )
            raise RefusalError(429, "too_many_requests", message, [(b"retry-after", b"1")])
        self._anonymous += 1
        try:
            yield
        finally:
            self._anonymous -= 1


def _owned(span: Span, owners: Mapping[str, Claims], claims: Claims | None) -> Span | None:
    """Return the span with the attempt it belongs to: that of its trace, else that of the request; None without one."""
    owner = owners.get(span.trace_id, claims)
    if owner is None or not otlp.well_identified(span):
        return None
    return replace(span, rollout=owner.rollout, attempt=owner.attempt)


def anonymous(most: int) -> Bounds:
    """Return the limits of a request without a token, where one with a token may have `most` bytes."""
    if most <= ANONYMOUS_BYTES:
        return Bounds(most, spans=ANONYMOUS_SPANS)
    return Bounds(ANONYMOUS_BYTES, f"send fewer spans at a time, or {SEND_THE_KEY}", ANONYMOUS_SPANS)


def _read(content_type: str, payload: bytes, bounds: Bounds) -> Sequence[Span]:
    """Parse the spans of a request's body. Raises `RefusalError`."""
    try:
        return READERS[content_type](payload, bounds.spans)
    except MissingExtraError as error:
        extra = f"lightning's extra {error.extra!r} beside the gateway, where `lightning doctor` has the command"
        message = f"Spans in protobuf need {extra}; or send them as {otlp.JSON}."
        raise RefusalError(501, "missing_extra", message) from error
    except DataError as error:
        raise RefusalError(400, "invalid_spans", f"The request cannot be read: {error}.") from error


async def _refuse(send: Send, content_type: str, refusal: RefusalError) -> None:
    kind = content_type if content_type in READERS else otlp.JSON
    headers: list[Header] = [(b"content-type", kind.encode()), *refusal.headers]
    body = otlp.refused(kind, GRPC_CODES.get(refusal.status, 13), str(refusal))
    await send_bytes(send, refusal.status, body, headers)


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")
