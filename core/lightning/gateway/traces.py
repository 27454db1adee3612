"""`POST /v1/traces`: spans of any OpenTelemetry-instrumented process join the rollout they belong to (OTLP/HTTP).

The invariant: a span is stored under the attempt that its trace id, or else the token of the request, belongs to, and under no
other; what belongs to none is counted and said in the answer, and costs no more than being read. Who sends no token can
bring little at a time. Answers have OTLP's shape, errors included: a `Status` in the encoding of the request.

A trace id is found by the server that issued or saw the key, and, where servers share a store, by every other one once the
store has it; an id alone gives nothing but the right to add spans to that attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

from starlette.types import Receive, Scope, Send

from lightning.config.sections import GatewayConfig
from lightning.errors import DataError, MissingExtraError, StoreError
from lightning.gateway.body_limits import KEY, RequestBody
from lightning.gateway.http import (
    ClientGoneError,
    Header,
    RefusalError,
    send_bytes,
)
from lightning.gateway.identity import Claims, Identity, TokenSigner
from lightning.gateway.request_body import RAISE_THE_LIMIT, read_body
from lightning.redaction import redacted_span
from lightning.spans import otlp
from lightning.spans.trace import trace_id_of
from lightning.store.protocol import MAX_SPANS, Store
from lightning.types import Json, Span

log = logging.getLogger(__name__)

PLACE = "gateway/traces"
"""The name under which the store's state has them; no run has it, since a run's id is a folder's name. Pruning a database
removes those that have expired (`lightning.maintenance.queries`)."""
UNKNOWN_SECONDS = 10.0
"""How long an id that the store did not know is not asked for again."""
UNKNOWN_IDS = 10_000


class TraceBook:
    """Trace ids of attempts. With `shared` they are kept in the store, too."""

    def __init__(self, store: Store, signer: TokenSigner, *, shared: bool) -> None:
        self._store, self._signer, self._shared = store, signer, shared
        self._unknown: OrderedDict[str, float] = OrderedDict()
        self._writing: set[asyncio.Task[None]] = set()

    def issued(self, token: str) -> None:
        """A key was issued here. Does not wait for the store: a server that is asked too early asks it again later."""
        if self._shared and (claims := self._signer.of_trace(trace_id := trace_id_of(token))) is not None:
            task = asyncio.create_task(self._keep(trace_id, claims))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def _keep(self, trace_id: str, claims: Claims) -> None:
        kept: Json = [claims.rollout, claims.attempt, claims.expires_at]
        try:
            await self._store.put_state(PLACE, trace_id, kept, once=None)  # whoever writes it, it is the same
        except StoreError as error:
            log.warning("other servers will not know the trace of %s: %s", claims.rollout, error)

    async def find(self, trace_ids: Iterable[str]) -> dict[str, Claims]:
        """The attempts of those ids that belong to one whose key has not expired. Raises `StoreError`."""
        found: dict[str, Claims] = {}
        for trace_id in set(trace_ids):
            claims = self._signer.of_trace(trace_id) or await self._ask(trace_id)
            if claims is not None:
                found[trace_id] = claims
        return found

    async def _ask(self, trace_id: str) -> Claims | None:
        if not self._shared or self._unknown.get(trace_id, 0.0) > time.monotonic():
            return None
        kept = await self._store.get_state(PLACE, trace_id)
        if kept is None:
            self._unknown[trace_id] = time.monotonic() + UNKNOWN_SECONDS
            if len(self._unknown) > UNKNOWN_IDS:
                self._unknown.popitem(last=False)
            return None
        rollout, attempt, expires_at = cast("tuple[str, int, float]", kept)
        return self._signer.learn(trace_id, Claims(rollout, attempt, expires_at))

    async def close(self) -> None:
        """Wait for what is being written."""
        await asyncio.gather(*self._writing, return_exceptions=True)


PATH: Final = "/traces"
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

    def __init__(self, config: GatewayConfig, identity: Identity, book: TraceBook, store: Store) -> None:
        self._config, self._identity, self._book, self._store = config, identity, book, store
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
        payload = await read_body(scope, receive, bounds.size, bounds.cure)
        with self._turn(claims):
            body: RequestBody | None = scope.get(KEY)
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
            stored = await self._store.append_spans(storable) if storable else 0
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
