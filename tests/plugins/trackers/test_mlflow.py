"""The tracker `mlflow` against the real library and a database of its own, whose making takes seconds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.plugins.trackers.conftest import SECRET, Tell

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of MLflow, SQLAlchemy and alembic about one another
]


@pytest.fixture(autouse=True)
def _defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tracker sets where nobody has is taken back."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_ENABLE_ASYNC_TRACE_LOGGING", "false")
    for name in ("MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)


async def test_a_run_is_in_mlflows_database_and_a_resumed_one_goes_on_in_it(
    tell: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    await asyncio.to_thread(tell, "mlflow")
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("lightning")
    (run,) = client.search_runs([experiment.experiment_id])
    settings, tags = run.data.params, run.data.tags
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert (settings["model"], settings["trainer.steps"]) == ("tiny", "8")
    assert settings["runner.k8s.env.PLACE"] == "[redacted]"
    assert SECRET.encode() not in (tmp_path / "mlflow.db").read_bytes()
    assert run.data.metrics == {"reward": 0.5, "reward/f1": 0.75}
    assert tags["lightning.alarm.collapsed"] == "step 3: the reward collapsed"

    (trace,) = client.search_traces([experiment.experiment_id])
    assert trace.info.trace_metadata["mlflow.sourceRun"] == run.info.run_id
    assert (trace.info.tags["lightning.step"], trace.info.tags["lightning.reward.f1"]) == ("3", "0.75")
    spans = {span.name: span for span in trace.data.spans}
    assert [span.name for span in trace.data.spans].count("chat writer") == 2
    top, tool = spans["rollout"], spans["add"]
    assert (top.span_type, top.inputs, top.outputs) == ("AGENT", "2 + 2?", {"reward": 0.5, "reward.f1": 0.75})
    assert (top.end_time_ns - top.start_time_ns) == 1_000_000_000
    (call,) = [span for span in trace.data.spans if span.span_type == "CHAT_MODEL" and span.inputs]
    assert call.outputs["choices"][0]["message"]["content"] == "It is 4."
    assert (call.parent_id, tool.parent_id, tool.inputs, tool.outputs) == (top.span_id, top.span_id, {"a": 2}, "4")

    await asyncio.to_thread(tell, "mlflow", step=4, steps=9)
    (same,) = client.search_runs([experiment.experiment_id])
    assert same.info.run_id == run.info.run_id
    assert [each.step for each in client.get_metric_history(run.info.run_id, "reward")] == [3, 4]
    assert (same.data.params["trainer.steps"], same.data.tags["lightning.changed.trainer.steps"]) == ("8", "9")


async def test_a_server_that_is_away_costs_one_line(tell: Tell, monkeypatch: pytest.MonkeyPatch, warnings_of) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    await asyncio.to_thread(tell, "mlflow")
    (line,) = warnings_of()
    assert "the tracker 'mlflow' failed and is left out from here on: MLflow did not begin the run" in line
    assert "Look at MLFLOW_TRACKING_URI" in line
