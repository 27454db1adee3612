"""The `otel` tracker: send finished rollouts as OpenTelemetry traces to the user's backend, with the standard OTLP exporter.

The invariant: the standard variables (`OTEL_EXPORTER_OTLP_ENDPOINT`, `_HEADERS`, `OTEL_SERVICE_NAME`, ...) decide where spans
go. If the backend is down, spans are lost and one line is logged; nothing else happens. Ids depend only on recorded data, so
that sending an attempt again gives the same spans. A trace that services continued keeps its id, so that spans that they sent
to the same backend themselves are below the same root span.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from lightning.errors import ConfigError
from lightning.instrument.context import root_span_id
from lightning.safe_text import counted
from lightning.store.protocol import Store
from lightning.tracking.protocol import AttemptRecord
from lightning.types import Caller, Json, Span, StepReward, ToolEvent, Transition
from lightning.types import Status as Stands
from lightning_otel import attributes as genai
from lightning_otel.traces.store import spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from lightning_trackers.shared import LOST, Quiet, facts_of, nanoseconds, times_of

logger = logging.getLogger(__name__)

PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL: Final = "http/protobuf"
BATCH: Final = 512
"""Most spans in one request: the default of the OpenTelemetry standard."""
EXPORTER: Final = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


class OpenTelemetry:
    """The tracker `otel`, which sends one trace for each attempt of each finished rollout. Metrics of steps are not sent.

    It exports in the tracker's own thread, behind the bounded queue of every tracker. `start` raises `ConfigError` if the
    environment asks for another protocol than OTLP over HTTP.
    """

    _exporter: OTLPSpanExporter
    _maker: TraceMaker

    def __init__(self) -> None:
        self._failures = 0
        self._quiet = Quiet(EXPORTER, 1)

    def start(self, run: str, config: Mapping[str, Json], folder: Path) -> None:
        """Make the exporter from the environment's variables. Raises `ConfigError` for another protocol than OTLP over HTTP."""
        asked = next((os.environ[name] for name in PROTOCOLS if os.environ.get(name)), PROTOCOL)
        if asked != PROTOCOL:
            raise ConfigError(f"the tracker otel sends {PROTOCOL}, not {asked!r}: set {PROTOCOLS[0]}={PROTOCOL}")
        named = os.environ.get("OTEL_SERVICE_NAME") or genai.SERVICE_NAME in os.environ.get(
            "OTEL_RESOURCE_ATTRIBUTES", ""
        )
        self._maker = TraceMaker(run, Resource.create({} if named else {genai.SERVICE_NAME: "lightning"}))
        self._exporter = OTLPSpanExporter()
        self._quiet.begin()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Do nothing: metrics are not sent as spans."""

    async def attempt(self, record: AttemptRecord, store: Store) -> None:
        """Send the spans of one attempt. Spans that the backend does not take are counted and lost."""
        made = self._maker.spans_of(record, await spans(store, record.rollout.id, record.attempt))
        for begin in range(0, len(made), BATCH):
            if self._exporter.export(made[begin : begin + BATCH]) is not SpanExportResult.SUCCESS:
                self._failures += len(made) - begin  # the rest would fail, too
                return

    def close(self) -> None:
        """Close the exporter, and log how many spans were lost."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]
        self._quiet.end()
        if self._failures:
            logger.warning(
                "%s not taken by the backend that OTEL_EXPORTER_OTLP_* names",
                counted(self._failures, "span was", "spans were"),
            )


MODEL = "policy"
"""The name under which agents call the trained model (docs/gateway.md)."""
STATUS = {"ok": StatusCode.OK, "error": StatusCode.ERROR, "unset": StatusCode.UNSET}


class TraceMaker:
    """Makes the spans of one run's attempts. `resource` describes this program as their source."""

    def __init__(self, run: str, resource: Resource) -> None:
        self._run, self._resource = run, resource

    def spans_of(self, record: AttemptRecord, told: Sequence[Span]) -> list[ReadableSpan]:
        """Return every span of an attempt, the root span first. `told` are the spans that other programs sent to lightning."""
        trace_id = _trace_id(record, told)
        top = _context(trace_id, root_span_id(trace_id))
        known = {span.span_id for span in told}
        tools = [event for event in record.tool_events if event.caller is None or event.caller.span_id not in known]
        return [
            self._top(record, told, top),
            *(self._call(call, top) for call in record.transitions),
            *(self._tool(event, number, top) for number, event in enumerate(tools)),
            *(self._foreign(span) for span in told),
        ]

    def _top(self, record: AttemptRecord, told: Sequence[Span], context: SpanContext) -> ReadableSpan:
        rollout = record.rollout
        begin, end = times_of(record, told)
        attributes: dict[str, Json] = {genai.OPERATION: genai.INVOKE_AGENT, "lightning.run": self._run}
        attributes |= {f"lightning.{name}": value for name, value in facts_of(record).items()}
        status = Status(StatusCode.ERROR, LOST)
        if record.attempt == rollout.attempt:
            good = rollout.status is Stands.SUCCEEDED
            status = Status(StatusCode.OK) if good else Status(StatusCode.ERROR, rollout.error)
        return ReadableSpan(
            f"{genai.INVOKE_AGENT} rollout",
            context,
            resource=self._resource,
            attributes=_attributes(attributes),
            events=[_reward(reward) for reward in record.step_rewards],
            status=status,
            start_time=nanoseconds(begin),
            end_time=nanoseconds(end),
        )

    def _call(self, call: Transition, top: SpanContext) -> ReadableSpan:
        attributes: dict[str, Json] = {
            genai.OPERATION: genai.CHAT,
            genai.REQUEST_MODEL: MODEL,
            genai.REQUEST_TEMPERATURE: call.temperature,
            genai.RESPONSE_ID: call.id,
            genai.FINISH_REASONS: [call.finish_reason] if call.finish_reason else None,
            genai.INPUT_TOKENS: len(call.prompt_ids),
            genai.OUTPUT_TOKENS: len(call.response_ids),
            "lightning.seq": call.seq,
            "lightning.choice": call.choice,
            "lightning.policy_version": call.version,
            "lightning.call_status": call.status.value,
            **_named(call.caller),
        }
        good = call.status.answered
        return ReadableSpan(
            f"{genai.CHAT} {MODEL}",
            _context(format(top.trace_id, "032x"), _made_id("call", *map(str, call.key))),
            parent=top,
            resource=self._resource,
            attributes=_attributes(attributes),
            kind=SpanKind.CLIENT,
            status=Status(StatusCode.OK) if good else Status(StatusCode.ERROR, f"the call was {call.status.value}"),
            start_time=nanoseconds(call.started_at),
            end_time=nanoseconds(call.ended_at),
        )

    def _tool(self, event: ToolEvent, number: int, top: SpanContext) -> ReadableSpan:
        """Return the span of a reported tool run; it has no duration, because only the time of its end is known."""
        attributes: dict[str, Json] = {
            genai.OPERATION: genai.EXECUTE_TOOL,
            genai.TOOL_NAME: event.name,
            genai.TOOL_CALL_ID: event.call_id or None,
            genai.TOOL_ARGUMENTS: event.arguments,
            genai.TOOL_RESULT: event.output or None,
            **(_named(event.caller) if event.caller is not None else {}),
        }
        trace_id = format(top.trace_id, "032x")
        return ReadableSpan(
            f"{genai.EXECUTE_TOOL} {event.name}",
            _context(trace_id, _made_id("tool", trace_id, str(number))),
            parent=top,
            resource=self._resource,
            attributes=_attributes(attributes),
            status=_status(event.status, event.error),
            start_time=nanoseconds(event.at),
            end_time=nanoseconds(event.at),
        )

    def _foreign(self, span: Span) -> ReadableSpan:
        """Return a span that another program sent, unchanged."""
        return ReadableSpan(
            span.name,
            _context(span.trace_id, span.span_id),
            parent=_context(span.trace_id, span.parent_id) if span.parent_id else None,
            resource=Resource({genai.SERVICE_NAME: span.service or "unknown_service"}),
            attributes=_attributes(span.attributes),
            kind=SpanKind[span.kind.upper()],
            status=_status(span.status, span.error),
            start_time=nanoseconds(span.started_at),
            end_time=nanoseconds(span.ended_at),
        )


def _trace_id(record: AttemptRecord, told: Sequence[Span]) -> str:
    """Return the id of an attempt's trace.

    If a service continued the attempt's trace (a span's parent is the attempt's root span), return the id of that trace.
    Otherwise, if all spans belong to one trace, return its id: the agent's own span, their parent, was then not sent to
    lightning. Otherwise return an id made from the rollout's id and the attempt's number.
    """
    for span in told:
        if span.parent_id == root_span_id(span.trace_id):
            return span.trace_id
    only = {span.trace_id for span in told}
    if len(only) == 1:
        return only.pop()
    return hashlib.sha256(f"{record.rollout.id} {record.attempt}".encode()).hexdigest()[:32]


def _made_id(*names: str) -> str:
    return hashlib.sha256("\0".join(names).encode()).hexdigest()[:16]


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _named(caller: Caller) -> Mapping[str, Json]:
    return {genai.AGENT_NAME: caller.agent, "lightning.path": "/".join(caller.path) or caller.agent}


def _reward(reward: StepReward) -> Event:
    said: dict[str, Json] = {
        "lightning.reward": reward.value,
        "lightning.reward.name": reward.name,
        genai.RESPONSE_ID: reward.response_id or None,
    }
    return Event("lightning.reward", _attributes(said), nanoseconds(reward.at))


def _status(status: str, error: str) -> Status:
    code = STATUS.get(status, StatusCode.UNSET)
    return Status(code, error if code is StatusCode.ERROR else None)


def _attributes(values: Mapping[str, Json]) -> dict[str, str | bool | int | float | Sequence[str]]:
    """Return attributes of the types that every release of OpenTelemetry accepts: other JSON becomes text, None is left out."""
    return {key: _attribute(value) for key, value in values.items() if value is not None}


def _attribute(value: Json) -> str | bool | int | float | Sequence[str]:
    if isinstance(value, str | bool | int | float):
        return value
    texts = [item for item in value if isinstance(item, str)] if isinstance(value, list) else None
    return texts if texts is not None and len(texts) == len(value or ()) else json.dumps(value)
