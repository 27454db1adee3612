"""The `mlflow` tracker: write an MLflow run, with each attempt of a finished rollout as a trace, and alarms as tags.

The invariant: the `MLFLOW_*` variables decide where the run is stored. MLflow's global state in this process (active run,
experiment and tracking URI) is not changed.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import mlflow
from lightning.errors import PluginError, import_extra
from lightning.store.protocol import Store
from lightning.tracking.protocol import AttemptRecord
from lightning.types import Json, ToolEvent, Transition
from lightning_record.exchanges import Exchange
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from lightning_trackers.shared import (
    PROJECT,
    Quiet,
    calls_of,
    cured,
    error_of,
    facts_of,
    finite,
    flat,
    known_run,
    nanoseconds,
    remember_run,
    times_of,
)

logger = logging.getLogger(__name__)

CURE: Final = "Look at MLFLOW_TRACKING_URI and MLFLOW_TRACKING_TOKEN; sqlite:///FILE.db needs no server"
DEFAULTS: Final = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_ENABLE_ASYNC_TRACE_LOGGING": "false"}
"""Environment variables that are set if they are unset. Otherwise MLflow would retry for minutes, and again at the program's
end."""
RETRIES: Final = "urllib3.connectionpool"
ODD: Final = re.compile(r"[^\w\-./: ]")
"""Characters that MLflow does not accept in a name; each becomes `_`."""
PARAMS, LONGEST_PARAM, LONGEST_TAG = 100, 6000, 5000
"""MLflow's limits: parameters of one request, characters of a parameter, and characters of a tag."""


class MLflow:
    """The tracker `mlflow`. It writes metrics by step, settings as parameters (those that a resume changed as tags, because
    parameters cannot change), alarms as tags, and each attempt as a trace of its model calls and tools."""

    _client: MlflowClient
    _run: str
    _experiment: str

    def __init__(self) -> None:
        self._quiet = Quiet(RETRIES, 0)

    def start(self, run: str, config: Mapping[str, Json], folder: Path) -> None:
        """Begin an MLflow run, or continue the one whose id is in the run's folder."""
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        if not mlflow.get_tracking_uri().startswith(("http", "databricks", "file")):
            for needed in ("alembic", "sqlalchemy"):  # a database needs both; MLflow's own error names no extra
                import_extra("mlflow", needed)
        self._quiet.begin()
        try:
            with cured("MLflow did not begin the run", CURE):
                self._client = MlflowClient()
                self._run, self._experiment = self._known(known_run(folder, "mlflow")) or self._new(run)
                self._settings(flat(config))
        except PluginError:
            self._quiet.end()
            raise
        remember_run(folder, "mlflow", self._run)

    def _known(self, run: str) -> tuple[str, str] | None:
        """Reopen the MLflow run with this id, and return it with its experiment; None if MLflow does not have it."""
        if not run:
            return None
        try:
            found = self._client.get_run(run)
            self._client.update_run(run, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            logger.warning("MLflow has no run %s any more (is MLFLOW_TRACKING_URI another?): a new one begins", run)
            return None
        return run, found.info.experiment_id

    def _new(self, run: str) -> tuple[str, str]:
        client = self._client
        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID", "")
        if not experiment:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
            found = client.get_experiment_by_name(name)
            experiment = found.experiment_id if found is not None else client.create_experiment(name)
        made = client.create_run(experiment, run_name=run, tags={"lightning.run": run})
        return made.info.run_id, experiment

    def _settings(self, settings: Mapping[str, Json]) -> None:
        wanted = {ODD.sub("_", name): str(value)[:LONGEST_PARAM] for name, value in settings.items()}
        have = self._client.get_run(self._run).data.params
        new = [Param(name, value) for name, value in wanted.items() if name not in have]
        for begin in range(0, len(new), PARAMS):
            self._client.log_batch(self._run, params=new[begin : begin + PARAMS])
        other = [name for name, value in wanted.items() if have.get(name, value) != value]
        if other:
            tags = [RunTag(f"lightning.changed.{name}", wanted[name][:LONGEST_TAG]) for name in other]
            self._client.log_batch(self._run, tags=tags[:PARAMS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics of a step to MLflow."""
        now = int(time.time() * 1000)
        metrics = [Metric(ODD.sub("_", name), value, now, step) for name, value in finite(values).items()]
        with cured(f"MLflow did not take the metrics of step {step}", CURE):
            self._client.log_batch(self._run, metrics=metrics)

    async def attempt(self, record: AttemptRecord, store: Store) -> None:
        """Send an attempt to MLflow as a trace of its model calls and tools."""
        (begin, end), error, facts = times_of(record), error_of(record), facts_of(record)
        with cured(f"MLflow did not take the rollout {record.rollout.id}", CURE):
            top = self._client.start_trace(
                "rollout",
                "AGENT",
                inputs=record.rollout.task.input,
                tags={f"lightning.{ODD.sub('_', name)}": str(value) for name, value in facts.items()},
                experiment_id=self._experiment,
                start_time_ns=nanoseconds(begin),
                run_id=self._run,
            )
            for call, exchange in await calls_of(record, store):
                self._call(top, call, exchange)
            for event in record.tool_events:
                self._tool(top, event)
            said = {name: value for name, value in facts.items() if name.startswith("reward")}
            status = "ERROR" if error else "OK"
            outputs = said | ({"error": error} if error else {})
            self._client.end_trace(top.trace_id, outputs, None, status, nanoseconds(end))

    def _call(self, top: Any, call: Transition, exchange: Exchange | None) -> None:
        attributes = {
            "agent": call.caller.name,
            "policy_version": call.version,
            "finish_reason": call.finish_reason,
            "input_tokens": len(call.prompt_ids),
            "output_tokens": len(call.response_ids),
        }
        asked, answered = (None, None) if exchange is None else (exchange.request, exchange.reply)
        start = nanoseconds(call.started_at)
        span = self._client.start_span(
            f"chat {call.caller.name}", top.trace_id, top.span_id, "CHAT_MODEL", asked, attributes, start
        )
        status = "OK" if call.status.answered else "ERROR"
        self._client.end_span(top.trace_id, span.span_id, answered, None, status, nanoseconds(call.ended_at))

    def _tool(self, top: Any, event: ToolEvent) -> None:
        """Add a tool run to the trace as a span without duration, because only the time of its end is known."""
        at, status = nanoseconds(event.at), "OK" if event.status == "ok" else "ERROR"
        attributes = {"status": event.status, "call_id": event.call_id}
        span = self._client.start_span(event.name, top.trace_id, top.span_id, "TOOL", event.arguments, attributes, at)
        self._client.end_span(top.trace_id, span.span_id, event.output or event.error, None, status, at)

    def alert(self, alert: Mapping[str, Json]) -> None:
        """Send an alarm as the tag `lightning.alarm.CAUSE` of the run."""
        name, text = ODD.sub("_", str(alert["cause"])), f"step {alert['step']}: {alert['text']}"
        with cured("MLflow did not take an alarm", CURE):
            self._client.set_tag(self._run, f"lightning.alarm.{name}", text[:LONGEST_TAG])

    def close(self) -> None:
        """End the MLflow run, and stop filtering its library's log."""
        try:
            with cured("MLflow did not end the run", CURE):
                self._client.set_terminated(self._run)
        finally:
            self._quiet.end()
