"""Reads OTLP trace requests, in protobuf or JSON, into spans; and writes the answers.

The invariant: both encodings of one request give the same spans; an unreadable one raises `DataError` with the place of the
fault. An attribute is stored as JSON of at most `MAX_TEXT` characters, whatever the sender put into it. Events and links are
not kept, except that an exception event's message becomes the span's error where it has no other.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeVar, cast

import orjson
from lightning.errors import DataError, MissingExtraError
from lightning.types import Json, Span

from lightning_otel.attributes import ERROR_TYPE, EXCEPTION_MESSAGE, EXCEPTION_TYPE, MAX_NAME, SERVICE_NAME, text

if TYPE_CHECKING:
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
    from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"
KINDS: Final = ("internal", "internal", "server", "client", "producer", "consumer")
"""Kinds by the number of OTLP's SpanKind; unspecified counts as internal."""
STATUSES: Final = ("unset", "ok", "error")
MAX_TEXT = 4096
"""The most characters of one attribute's value, as of everything reported about a tool."""
MAX_ATTRIBUTES = 128
"""The most attributes of one span, as in OpenTelemetry; further ones are dropped."""
_ID = re.compile(r"(?!0+\Z)[0-9a-f]+\Z")
_Object = Mapping[str, object]
T = TypeVar("T")


def well_identified(span: Span) -> bool:
    """Whether the ids have the standard's lengths and are not all zeros."""
    lengths = (len(span.trace_id), len(span.span_id), len(span.parent_id))
    ids = [span.trace_id, span.span_id, *([span.parent_id] if span.parent_id else [])]
    return lengths in ((32, 16, 0), (32, 16, 16)) and all(_ID.match(one) for one in ids)


# protobuf -------------------------------------------------------------------------------------------------------


def read_protobuf(payload: bytes, most: int = sys.maxsize) -> list[Span]:
    """Read the spans of an `ExportTraceServiceRequest` in protobuf; they have no rollout yet.

    Raises `MissingExtraError` without opentelemetry-proto, `DataError` for an invalid request or a request with more than
    `most` spans.
    """
    try:
        from google.protobuf.message import DecodeError
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    except ImportError as error:
        raise MissingExtraError("otel", "opentelemetry.proto") from error
    request = ExportTraceServiceRequest()
    try:
        request.ParseFromString(payload)
    except DecodeError as error:
        raise DataError(f"the body is not an ExportTraceServiceRequest in protobuf: {error}") from error
    _check_number(sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans), most)
    found: list[Span] = []
    for resource in request.resource_spans:
        service = _service(_proto_pairs(resource.resource.attributes))
        found.extend(_from_proto(span, service) for scope in resource.scope_spans for span in scope.spans)
    return found


def _from_proto(span: ProtoSpan, service: str) -> Span:
    return _span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        kind=span.kind,
        nanoseconds=(span.start_time_unix_nano, span.end_time_unix_nano),
        status=(span.status.code, span.status.message),
        service=service,
        attributes=_proto_pairs(span.attributes),
        events=(_proto_pairs(event.attributes) for event in span.events),
    )


def _proto_pairs(attributes: Iterable[KeyValue]) -> Iterator[tuple[str, Json]]:
    return ((pair.key, _proto_value(pair.value)) for pair in attributes)


def _proto_value(value: AnyValue) -> Json:
    match value.WhichOneof("value"):
        case None:
            return None
        case "array_value":
            return [_proto_value(item) for item in value.array_value.values]
        case "kvlist_value":
            return {pair.key: _proto_value(pair.value) for pair in value.kvlist_value.values}
        case "bytes_value":
            return base64.b64encode(value.bytes_value).decode()
        case kind:
            return cast("Json", getattr(value, kind))


# JSON -----------------------------------------------------------------------------------------------------------


def read_json(payload: bytes, most: int = sys.maxsize) -> list[Span]:
    """Read the spans of an `ExportTraceServiceRequest` in OTLP's JSON (ids in hexadecimal). Needs no extra. Raises `DataError`
    for an invalid request or a request with more than `most` spans."""
    try:
        request = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        raise DataError(f"the body is not JSON: {error}") from error
    if not isinstance(request, dict) or "resourceSpans" not in request:
        raise DataError("the body is not an ExportTraceServiceRequest: it must be an object with resourceSpans")
    found: list[Span] = []
    try:
        for resource in _objects(request, "resourceSpans"):
            service = _service(_json_pairs(_object(resource, "resource")))
            for scope in _objects(resource, "scopeSpans"):
                spans = _objects(scope, "spans")
                _check_number(len(found) + len(spans), most)
                found.extend(_from_json(span, service) for span in spans)
    except RecursionError as error:
        raise DataError("an attribute is nested too deep") from error
    return found


def _from_json(span: _Object, service: str) -> Span:
    status = _object(span, "status")
    return _span(
        trace_id=_text(span, "traceId").lower(),
        span_id=_text(span, "spanId").lower(),
        parent_id=_text(span, "parentSpanId").lower(),
        name=_text(span, "name"),
        kind=_number(span, "kind"),
        nanoseconds=(_number(span, "startTimeUnixNano"), _number(span, "endTimeUnixNano")),
        status=(_number(status, "code"), _text(status, "message")),
        service=service,
        attributes=_json_pairs(span),
        events=(_json_pairs(event) for event in _objects(span, "events")),
    )


def _json_pairs(holder: _Object) -> Iterator[tuple[str, Json]]:
    return ((_text(pair, "key"), _json_value(_object(pair, "value"))) for pair in _objects(holder, "attributes"))


def _json_value(value: _Object) -> Json:
    for kind, read in _VALUES.items():
        if kind in value:
            return read(value)
    return None


def _json_bytes(value: _Object) -> Json:
    encoded = _text(value, "bytesValue")
    try:
        return base64.b64encode(base64.b64decode(encoded, validate=True)).decode()
    except binascii.Error as error:
        raise DataError(f"bytesValue is not base64: {encoded[:40]!r}") from error


def _json_double(value: _Object) -> Json:
    said = value["doubleValue"]
    try:
        return float(cast("float", said))  # JSON has no NaN: OTLP writes "NaN"
    except (TypeError, ValueError) as error:
        raise DataError(f"doubleValue is {said!r:.40}: it must be a number") from error


def _json_list(value: _Object) -> Json:
    return [_json_value(item) for item in _objects(_object(value, "arrayValue"), "values")]


def _json_dict(value: _Object) -> Json:
    pairs = _objects(_object(value, "kvlistValue"), "values")
    return {_text(pair, "key"): _json_value(_object(pair, "value")) for pair in pairs}


_VALUES: Final[Mapping[str, Callable[[_Object], Json]]] = {
    "stringValue": lambda value: _text(value, "stringValue"),
    "boolValue": lambda value: value["boolValue"] is True,
    "intValue": lambda value: _number(value, "intValue"),
    "doubleValue": _json_double,
    "arrayValue": _json_list,
    "kvlistValue": _json_dict,
    "bytesValue": _json_bytes,
}


def _objects(holder: _Object, key: str) -> Sequence[_Object]:
    found = holder.get(key)
    if found is None:
        return ()
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise DataError(f"{key} must be a list of objects")
    return found


def _object(holder: _Object, key: str) -> _Object:
    return _of_kind(holder, key, dict, "an object")


def _text(holder: _Object, key: str) -> str:
    return _of_kind(holder, key, str, "a string")


def _of_kind(holder: _Object, key: str, kind: type[T], expected: str) -> T:
    """Read a value of one type; an absent one is the type's empty value."""
    found = holder.get(key)
    if found is None:
        return kind()
    if not isinstance(found, kind):
        raise DataError(f"{key} is {found!r:.40}: it must be {expected}")
    return found


def _number(holder: _Object, key: str) -> int:
    """Read an integer; OTLP writes those of 64 bits as strings."""
    found = holder.get(key)
    if found is None:
        return 0
    try:
        number = int(found) if isinstance(found, str) else found
    except ValueError:
        number = None
    if not isinstance(number, int) or isinstance(number, bool) or not -(2**63) <= number < 2**64:
        raise DataError(f"{key} is {found!r:.40}: it must be a whole number of 64 bits")
    return number


# both -----------------------------------------------------------------------------------------------------------


def _check_number(spans: int, most: int) -> None:
    """Raise `DataError` if a request has more spans than `most`. An empty span, of two bytes, counts too."""
    if spans > most:
        raise DataError(
            f"the request has at least {spans} spans, and a request may have at most {most}: send fewer spans in each request"
        )


def _service(pairs: Iterable[tuple[str, Json]]) -> str:
    return text(dict(pairs), SERVICE_NAME)[:MAX_NAME]


def _span(
    *,
    trace_id: str,
    span_id: str,
    parent_id: str,
    name: str,
    kind: int,
    nanoseconds: tuple[int, int],
    status: tuple[int, str],
    service: str,
    attributes: Iterable[tuple[str, Json]],
    events: Iterable[Iterable[tuple[str, Json]]],
) -> Span:
    code, message = status
    kept = _bounded(attributes)
    state = STATUSES[code] if code in range(len(STATUSES)) else "unset"
    failed = state == "error" or ERROR_TYPE in kept
    return Span(
        rollout="",
        attempt=0,
        trace_id=trace_id,
        span_id=span_id,
        parent_id=parent_id,
        name=name[:MAX_NAME],
        kind=KINDS[kind] if kind in range(len(KINDS)) else "internal",
        started_at=nanoseconds[0] / 1e9,
        ended_at=nanoseconds[1] / 1e9,
        status=state,
        error=_clip(message or _exception(events) or text(kept, ERROR_TYPE)) if failed else "",
        service=service,
        attributes=kept,
    )


def _bounded(pairs: Iterable[tuple[str, Json]]) -> dict[str, Json]:
    """Return the attributes within the limits; of several attributes with one key the first stays."""
    kept: dict[str, Json] = {}
    for key, value in pairs:
        if len(kept) == MAX_ATTRIBUTES:
            break
        kept.setdefault(key[:MAX_NAME], _value(value))
    return kept


def _value(value: Json) -> Json:
    if isinstance(value, str):
        return _clip(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if not isinstance(value, list | dict):
        return value
    with contextlib.suppress(ValueError):  # a NaN or infinity inside: kept as text
        if len(json.dumps(value, allow_nan=False)) <= MAX_TEXT:
            return value
    return _clip(json.dumps(value))


def _clip(value: str) -> str:
    return value if len(value) <= MAX_TEXT else value[: MAX_TEXT - 1] + "…"


def _exception(events: Iterable[Iterable[tuple[str, Json]]]) -> str:
    """Return the message, or else the type, of the last exception that a span recorded."""
    said = ""
    for event in events:
        attributes = dict(event)
        said = text(attributes, EXCEPTION_MESSAGE) or text(attributes, EXCEPTION_TYPE) or said
    return said


def accepted(content_type: str, rejected: int, message: str) -> bytes:
    """Return the body of a success. If spans were not kept, the body says how many (`rejected`), and why (`message`)."""
    if content_type == JSON:
        partial = {"rejectedSpans": str(rejected), "errorMessage": message}
        return orjson.dumps({"partialSuccess": partial} if rejected else {})
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    response = ExportTraceServiceResponse()
    if rejected:
        response.partial_success.rejected_spans = rejected
        response.partial_success.error_message = message
    return bytes(response.SerializeToString())


def _varint(value: int) -> bytes:
    """LEB128: seven bits a byte, lowest first, the top bit says that more follow."""
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def refused(content_type: str, code: int, message: str) -> bytes:
    """Return the body of an error: a `google.rpc.Status`, which is small enough to be written without its library."""
    if content_type != PROTOBUF:
        return orjson.dumps({"code": code, "message": message})
    data = message.encode()
    return b"\x08" + _varint(code) + b"\x12" + _varint(len(data)) + data
