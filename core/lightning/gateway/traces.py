"""`POST /v1/traces`: spans of any OpenTelemetry-instrumented process join the rollout they belong to (OTLP/HTTP).

The invariant: a span is stored under the attempt that its trace id, or else the token of the request, belongs to, and under no
other; what belongs to none is counted and said in the answer. Answers have OTLP's shape, errors included: a `Status` in the
encoding of the request.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from starlette.types import Receive, Scope, Send

from lightning.config.models import GatewayConfig
from lightning.errors import DataError, MissingExtraError, StoreError
from lightning.gateway.body import ClientGoneError, read_body, too_large
from lightning.gateway.errors import Header, RefusalError, send_bytes
from lightning.gateway.identity import Identity
from lightning.gateway.redaction import redacted_span
from lightning.gateway.stats import Counters
from lightning.gateway.tokens import Claims
from lightning.gateway.tracebook import TraceBook
from lightning.spans import otlp
from lightning.store.protocol import MAX_SPANS, Store
from lightning.types import Span

log = logging.getLogger(__name__)

PATH: Final = "/traces"
READERS: Final = {otlp.PROTOBUF: otlp.read_protobuf, otlp.JSON: otlp.read_json}
GRPC_CODES: Final = {400: 3, 401: 16, 413: 8, 415: 3, 501: 12, 503: 14}
"""HTTP statuses as the code of a `google.rpc.Status`; any other is INTERNAL (13)."""
ANONYMOUS_LOOKUPS: Final = 64
"""Trace ids unknown here that the store is asked for, in one request without a token."""
WHY_REJECTED: Final = (
    "{} of {} spans were not kept. A span belongs to a rollout by its trace id (continue the traceparent that the agent sent) "
    "or by the rollout's API key in the request; the rollout's attempt must be its latest, its key not expired, the ids well "
    f"formed, and of one attempt {MAX_SPANS} spans are kept"
)


class TraceEndpoint:
    """The ASGI application behind the route."""

    def __init__(
        self, config: GatewayConfig, identity: Identity, book: TraceBook, store: Store, counters: Counters
    ) -> None:
        self._config, self._identity, self._book = config, identity, book
        self._store, self._counters = store, counters

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
        payload = await self._payload(scope, receive)
        spans = await asyncio.to_thread(_read, content_type, payload)  # the loop has streams to pass on meanwhile
        try:
            owners = await self._book.find(self._looked_up(spans, claims))
            owned = [span for span in (_owned(span, owners, claims) for span in spans) if span is not None]
            stored = await self._store.append_spans(owned) if owned else 0
        except StoreError as error:
            message = f"The store did not take the spans: {error}. Send them again."
            raise RefusalError(503, "store_failed", message, [(b"retry-after", b"1")]) from error
        rejected = len(spans) - stored
        self._counters.spans += stored
        self._counters.spans_rejected += rejected
        return otlp.accepted(content_type, rejected, WHY_REJECTED.format(rejected, len(spans)))

    def _looked_up(self, spans: Sequence[Span], claims: Claims | None) -> list[str]:
        """The trace ids to find: of those that the store must be asked for, a few for who sends no token."""
        ids = list(dict.fromkeys(span.trace_id for span in spans if otlp.well_identified(span)))
        if claims is not None:
            return ids
        unknown = [trace_id for trace_id in ids if not self._identity.knows(trace_id)]
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

    async def _payload(self, scope: Scope, receive: Receive) -> bytes:
        limit = self._config.max_body_bytes
        payload = await read_body(scope, receive, limit)
        encoding = _header(scope, b"content-encoding").strip().lower()
        if encoding in ("", "identity"):
            return payload
        if encoding != "gzip":
            message = f"The content encoding is {encoding!r:.80}; send gzip, or none."
            raise RefusalError(415, "unsupported_encoding", message)
        return await asyncio.to_thread(unzipped, payload, limit)


def _owned(span: Span, owners: Mapping[str, Claims], claims: Claims | None) -> Span | None:
    """The span under the attempt it belongs to: its trace's, else that of the request."""
    owner = owners.get(span.trace_id, claims)
    if owner is None or not otlp.well_identified(span):
        return None
    return replace(span, rollout=owner.rollout, attempt=owner.attempt)


def unzipped(payload: bytes, limit: int) -> bytes:
    """What a gzip body holds. Raises `RefusalError`: 413 above `limit` bytes, however small the body, 400 if it is broken."""
    inflate = zlib.decompressobj(wbits=31)
    try:
        data = inflate.decompress(payload, limit + 1)
    except zlib.error as error:
        raise RefusalError(400, "bad_gzip", f"The body is not gzip, as its header says: {error}.") from error
    if len(data) > limit:
        raise too_large(len(data), limit)
    if not inflate.eof:
        raise RefusalError(400, "bad_gzip", "The body's gzip stream is cut off.")
    return data


def _read(content_type: str, payload: bytes) -> Sequence[Span]:
    """The spans of a request, as they may be stored."""
    try:
        return [redacted_span(span) for span in READERS[content_type](payload)]
    except MissingExtraError as error:
        message = f"Spans in protobuf need {error} beside the gateway; or send them as {otlp.JSON}."
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
