"""`POST /v1/traces`: spans of any OpenTelemetry-instrumented process join the rollout they belong to (OTLP/HTTP).

The invariant: a span is stored under the attempt that its trace id, or else the token of the request, belongs to, and under no
other; what belongs to none is counted and said in the answer, and costs no more than being read. Who sends no token can
bring little at a time. Answers have OTLP's shape, errors included: a `Status` in the encoding of the request.
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
"""HTTP statuses as the code of a `google.rpc.Status`; any other is INTERNAL (13)."""
ANONYMOUS_LOOKUPS: Final = 64
"""Trace ids unknown here that the store is asked for, in one request without a token."""
ANONYMOUS_BYTES: Final = 1024 * 1024
"""Of a request without a token, unpacked."""
ANONYMOUS_AT_ONCE: Final = 4
"""Requests without a token that are unpacked, read and kept at a time."""
PROTOBUF_FACTOR: Final = 48
"""Bytes of memory for one of protobuf: an empty message has two, and takes a hundred when it is parsed."""
ANONYMOUS_SPANS: Final = 10_000
"""Of a request without a token."""
SEND_THE_KEY: Final = "send the rollout's API key with the spans"
WHY_REJECTED: Final = (
    "{} of {} spans were not kept. A span belongs to a rollout by its trace id (continue the traceparent that the agent sent) "
    "or by the rollout's API key in the request; the rollout's attempt must be its latest, its key not expired, the ids well "
    f"formed, and of one attempt {MAX_SPANS} spans are kept"
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a request may bring: bytes, unpacked, with the cure for more of them, and spans."""

    size: int
    cure: str = RAISE_THE_LIMIT
    spans: int = sys.maxsize


class TraceEndpoint:
    """The ASGI application behind the route."""

    def __init__(self, parts: Parts) -> None:
        self._config, self._identity, self._store = parts.config, parts.identity, parts.store
        self._book = TraceBook(parts.store, shared=parts.shared)
        parts.identity.watch(self._book.note_key)
        parts.closing.push_async_callback(self._book.close)
        self._anonymous = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Never raises for what is the sender's or the store's fault."""
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
        """Store the spans of a request; return the body of the answer."""
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
        """What `_take` returns, of a request's body. It is read in threads: the loop has streams to pass on meanwhile."""
        spans = await asyncio.to_thread(_read, content_type, payload, bounds)
        try:
            owners = await self._book.find(self._looked_up(spans, claims))
            owned = [span for span in (_owned(span, owners, claims) for span in spans) if span is not None]
            # It takes most of the time that spans take, so that only those are given that will be stored.
            storable = await asyncio.to_thread(lambda: [redacted_span(span) for span in owned]) if owned else []
            stored = await append_spans(self._store, storable) if storable else 0
        except StoreError as error:
            message = f"The store did not take the spans: {error}. Send them again."
            raise RefusalError(503, "store_failed", message, [(b"retry-after", b"1")]) from error
        rejected = len(spans) - stored
        return otlp.accepted(content_type, rejected, WHY_REJECTED.format(rejected, len(spans)))

    def _looked_up(self, spans: Sequence[Span], claims: Claims | None) -> list[str]:
        """The trace ids to find: of those that the store must be asked for, a few for who sends no token."""
        ids = list(dict.fromkeys(span.trace_id for span in spans if otlp.well_identified(span)))
        if claims is not None:
            return ids
        unknown = [trace_id for trace_id in ids if self._book.known(trace_id) is None]
        left_out = set(unknown[ANONYMOUS_LOOKUPS:])
        return [trace_id for trace_id in ids if trace_id not in left_out]

    def _claims(self, scope: Scope) -> Claims | None:
        """The attempt whose token came with the request; None without one. Raises `RefusalError` (401) for a bad one."""
        try:
            return self._identity.claims(scope)
        except RefusalError as refusal:
            if refusal.code == "missing_token":
                return None
            raise

    @contextlib.contextmanager
    def _turn(self, claims: Claims | None) -> Iterator[None]:
        """Around the work on a request: who sends no token gets few of the threads that all share. Raises `RefusalError`."""
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
    """The span under the attempt it belongs to: its trace's, else that of the request."""
    owner = owners.get(span.trace_id, claims)
    if owner is None or not otlp.well_identified(span):
        return None
    return replace(span, rollout=owner.rollout, attempt=owner.attempt)


def anonymous(most: int) -> Bounds:
    """Those of a request without a token, where one with a token may have `most` bytes."""
    if most <= ANONYMOUS_BYTES:
        return Bounds(most, spans=ANONYMOUS_SPANS)
    return Bounds(ANONYMOUS_BYTES, f"send fewer spans at a time, or {SEND_THE_KEY}", ANONYMOUS_SPANS)


def _read(content_type: str, payload: bytes, bounds: Bounds) -> Sequence[Span]:
    """The spans of a request's body. Raises `RefusalError`."""
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
