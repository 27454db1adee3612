"""The `otel` tracker: finished rollouts as OpenTelemetry traces, sent by the standard OTLP exporter to the user's own backend.

The invariant: the standard variables (`OTEL_EXPORTER_OTLP_ENDPOINT`, `_HEADERS`, `OTEL_SERVICE_NAME`, ...) decide where spans
go; a backend that is down costs spans, one line in the log, and nothing else.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lightning.errors import ConfigError
from lightning.store.protocol import Store
from lightning.tracking.protocol import AttemptRecord
from lightning.types import Json
from lightning_otel.attributes import SERVICE_NAME
from lightning_otel.traces.store import spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExportResult

from lightning_trackers.shared import Quiet
from lightning_trackers.traces import TraceMaker

logger = logging.getLogger(__name__)

PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL: Final = "http/protobuf"
BATCH: Final = 512
"""Spans in one request, the standard's own default."""
EXPORTER: Final = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


class OpenTelemetry:
    """One trace for each attempt of each finished rollout. Metrics of steps are not sent: they are no spans.

    It exports in the tracker's own thread, behind the bounded queue that every tracker has. Raises `ConfigError` when the
    environment asks for another protocol than OTLP over HTTP.
    """

    _exporter: OTLPSpanExporter
    _maker: TraceMaker

    def __init__(self) -> None:
        self._failures = 0
        self._quiet = Quiet(EXPORTER, 1)

    def start(self, run: str, config: Mapping[str, Json], folder: Path) -> None:
        """Make the exporter from the environment."""
        asked = next((os.environ[name] for name in PROTOCOLS if os.environ.get(name)), PROTOCOL)
        if asked != PROTOCOL:
            raise ConfigError(f"the tracker otel sends {PROTOCOL}, not {asked!r}: set {PROTOCOLS[0]}={PROTOCOL}")
        named = os.environ.get("OTEL_SERVICE_NAME") or SERVICE_NAME in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        self._maker = TraceMaker(run, Resource.create({} if named else {SERVICE_NAME: "lightning"}))
        self._exporter = OTLPSpanExporter()
        self._quiet.begin()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Nothing: metrics have trackers of their own."""

    async def attempt(self, record: AttemptRecord, store: Store) -> None:
        """Send one attempt."""
        made = self._maker.spans_of(record, await spans(store, record.rollout.id, record.attempt))
        for begin in range(0, len(made), BATCH):
            if self._exporter.export(made[begin : begin + BATCH]) is not SpanExportResult.SUCCESS:
                self._failures += len(made) - begin  # whoever did not take this does not take the rest either
                return

    def close(self) -> None:
        """Close the exporter; say what was lost."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]
        self._quiet.end()
        if self._failures:
            logger.warning("%d spans were not taken by the backend that OTEL_EXPORTER_OTLP_* names", self._failures)
