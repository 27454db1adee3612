"""Finished rollouts reach a real OTLP receiver as whole traces, and a receiver that is not there costs nothing else."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from lightning.config import Config
from lightning.errors import ConfigError, MissingExtraError
from lightning.installation import install_command
from lightning.instrument.context import root_span_id
from lightning.plugins import plugins
from lightning.store.memory import MemoryStore
from lightning.tracking import trackers
from lightning.tracking.trackers import Trackers
from lightning.types import (
    Caller,
    CallStatus,
    Fault,
    Outcome,
    Rollout,
    Run,
    Span,
    StepReward,
    Task,
    ToolEvent,
    Transition,
    VersionRun,
    logprobs,
    token_ids,
)
from lightning_otel.traces import otlp
from lightning_otel.traces.store import append_spans
from lightning_trackers.otel import OpenTelemetry

TRACE = "ab" * 16
TOP = root_span_id(TRACE)
WRITER = Caller("writer", ("boss", "writer"))


class Receiver:
    """An OTLP/HTTP backend on loopback."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.requests: list[dict[str, str]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.requests.append({"path": self.path, "key": self.headers.get("x-key", "")})
                receiver.spans.extend(otlp.read_protobuf(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    made = Receiver()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def call(attempt: int, seq: int, **changes: object) -> Transition:
    fields: dict[str, object] = {
        "prompt_ids": token_ids([1, 2, 3]),
        "response_ids": token_ids([4, 5]),
        "logprobs": logprobs([-1, -1]),
        "caller": WRITER,
        "versions": (VersionRun(0, 7),),
        "started_at": 100.0 + seq,
        "ended_at": 100.5 + seq,
        "finish_reason": "stop",
        **changes,
    }
    return Transition("r", attempt, seq, f"chat-{attempt}{seq}", **fields)  # type: ignore[arg-type]


@pytest.fixture
async def finished() -> tuple[MemoryStore, Rollout]:
    """A rollout whose first attempt was lost and whose second has calls, tools, step rewards and a foreign span."""
    store = MemoryStore()
    await store.open()
    await store.put_run(Run("run", "run"))
    await store.create_rollouts([Rollout("r", "run", Task("q", id="task-1"), "g", step=3)])
    await store.lease("run", "w")
    await store.append([call(1, 0, status=CallStatus.ERROR)])
    await store.complete("r", 1, Outcome(fault=Fault.INFRASTRUCTURE, error="gone"))
    await store.lease("run", "w")
    await store.append([call(2, 0), call(2, 1, caller=Caller("agent"), status=CallStatus.ABORTED)])
    attributes = {"gen_ai.operation.name": "execute_tool", "count": 3, "nested": {"a": [1]}}
    look = Span(
        "r", 2, TRACE, "01" * 8, TOP, "execute_tool look", "server", 101.0, 102.0, "error", "no", "shop", attributes
    )
    inner = Span("r", 2, TRACE, "02" * 8, "01" * 8, "query", "client", 101.1, 101.2, service="shop")
    await append_spans(store, [look, inner])
    events = (
        ToolEvent("add", "ok", "call-1", {"a": 2}, "4", caller=WRITER, at=103.0),
        ToolEvent("look", "error", "call-2", caller=Caller("agent", (), "01" * 8), at=102.0),  # made from the span
    )
    outcome = Outcome(
        reward=0.5,
        rewards={"f1": 0.75},
        seconds=9.0,
        tool_events=events,
        step_rewards=(StepReward(0.25, "format", "chat-20", 104.0),),
    )
    rollout = await store.complete("r", 2, outcome)
    return store, rollout


async def track(
    store: MemoryStore, rollouts: list[Rollout], tmp_path: Path, names: tuple[str, ...] = ("otel",)
) -> None:
    held = Trackers(names, Config(), run="run", folder=tmp_path, store=store)
    await asyncio.to_thread(held.__enter__)
    for rollout in rollouts:
        held.finished(rollout)
    held.log(0, {"reward": 0.5})
    await asyncio.to_thread(held.__exit__, None, None, None)


async def test_a_rollout_arrives_as_one_trace_for_each_attempt(receiver: Receiver, finished, tmp_path: Path) -> None:
    store, rollout = finished
    await track(store, [rollout], tmp_path)
    assert {(one["path"], one["key"]) for one in receiver.requests} == {("/v1/traces", "secret")}
    lost, top = receiver.named("invoke_agent rollout")
    assert (top.trace_id, top.span_id, top.parent_id, top.service) == (TRACE, TOP, "", "lightning")
    assert (top.started_at, top.ended_at, top.status) == (94.0, 103.0, "ok")
    assert top.attributes == {
        "gen_ai.operation.name": "invoke_agent",
        "lightning.run": "run",
        "lightning.rollout": "r",
        "lightning.attempt": 2,
        "lightning.task": "task-1",
        "lightning.group": "g",
        "lightning.step": 3,
        "lightning.split": "train",
        "lightning.status": "succeeded",
        "lightning.reward": 0.5,
        "lightning.reward.f1": 0.75,
    }
    assert (lost.status, lost.attributes["lightning.attempt"], lost.trace_id != TRACE) == ("error", 1, True)
    assert "tried again" in lost.error

    before, good, aborted = receiver.named("chat policy")
    assert (before.trace_id, before.parent_id, before.status) == (lost.trace_id, lost.span_id, "error")
    assert {span.parent_id for span in (good, aborted)} == {TOP}
    assert (good.kind, good.status, good.started_at, good.ended_at) == ("client", "ok", 100.0, 100.5)
    assert good.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "policy",
        "gen_ai.request.temperature": 1.0,
        "gen_ai.response.id": "chat-20",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "lightning.seq": 0,
        "lightning.choice": 0,
        "lightning.policy_version": 7,
        "lightning.call_status": "ok",
        "gen_ai.agent.name": "writer",
        "lightning.path": "boss/writer",
    }
    assert (aborted.status, aborted.error) == ("error", "the call was aborted")

    (add,) = receiver.named("execute_tool add")
    assert (add.parent_id, add.status, add.ended_at) == (TOP, "ok", 103.0)
    assert add.attributes["gen_ai.tool.call.arguments"] == '{"a": 2}'
    (look,) = receiver.named("execute_tool look")
    (inner,) = receiver.named("query")
    assert (look.service, look.kind, look.status, look.error) == ("shop", "server", "error", "no")
    assert look.attributes == {"gen_ai.operation.name": "execute_tool", "count": 3, "nested": '{"a": [1]}'}
    assert (look.parent_id, inner.parent_id, inner.trace_id) == (TOP, look.span_id, TRACE)


async def test_a_trace_whose_middle_was_sent_elsewhere_is_still_one_trace(receiver: Receiver, tmp_path: Path) -> None:
    """The agent's own exporter sends its spans to the same backend; only the service's came through the gateway."""
    store = MemoryStore()
    await store.open()
    await store.create_rollouts([Rollout("r", "run", Task("q"), "g")])
    await store.lease("run", "w")
    await store.append([call(1, 0)])
    await append_spans(store, [Span("r", 1, TRACE, "02" * 8, "01" * 8, "query", started_at=100.0, ended_at=101.0)])
    rollout = await store.complete("r", 1, Outcome(reward=1.0))
    await track(store, [rollout], tmp_path)
    (top,) = receiver.named("invoke_agent rollout")
    (chat,) = receiver.named("chat policy")
    (query,) = receiver.named("query")
    assert (top.trace_id, top.span_id) == (TRACE, TOP)
    assert (chat.trace_id, chat.parent_id) == (TRACE, TOP)
    assert (query.trace_id, query.parent_id, query.service) == (TRACE, "01" * 8, "unknown_service")


async def test_sending_again_gives_the_same_spans(receiver: Receiver, finished, tmp_path: Path) -> None:
    store, rollout = finished
    await track(store, [rollout, rollout], tmp_path)
    half = len(receiver.spans) // 2
    assert half == 8
    assert receiver.spans[:half] == receiver.spans[half:]


async def test_the_service_has_the_name_the_environment_gives(
    receiver: Receiver, finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-run")
    store, rollout = finished
    await track(store, [rollout], tmp_path)
    assert {span.service for span in receiver.spans} == {"my-run", "shop"}


async def test_a_failed_rollout_says_why(receiver: Receiver, tmp_path: Path) -> None:
    store = MemoryStore()
    await store.open()
    await store.create_rollouts([Rollout("r", "run", Task("q"), "g")])
    await store.lease("run", "w")
    rollout = await store.complete("r", 1, Outcome(fault=Fault.AGENT, error="KeyError: 'x'", seconds=2.0))
    await track(store, [rollout], tmp_path)
    (top,) = receiver.spans
    assert (top.status, top.error, top.attributes["lightning.fault"]) == ("error", "KeyError: 'x'", "agent")
    assert "lightning.reward" not in top.attributes
    assert top.ended_at - top.started_at == pytest.approx(2.0)


async def test_a_backend_that_is_down_costs_one_line_and_no_time(
    finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.05")
    store, rollout = finished
    await track(store, [rollout] * 3, tmp_path, ("otel", "jsonl"))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([record for record in said if record.name.startswith("opentelemetry")]) == 1
    assert threading.get_ident() not in {record.thread for record in said}, "the loop's thread sends nothing"
    assert "24 spans were not taken" in caplog.text


async def test_rollouts_that_wait_too_long_are_left_out_and_counted(
    finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    busy = threading.Event()
    monkeypatch.setattr(trackers, "MAX_WAITING", 2)
    told: list[object] = []

    class Slow(OpenTelemetry):
        def start(self, *args: object) -> None:
            busy.wait(20)

        async def attempt(self, record: object, store: object) -> None:
            told.append(record)

    monkeypatch.setattr("lightning_trackers.otel.OpenTelemetry", Slow)
    store, rollout = finished
    held = Trackers(["otel"], Config(), run="run", folder=tmp_path, store=store)
    held.__enter__()
    for _ in range(5):
        held.finished(rollout)
    busy.set()
    await asyncio.to_thread(held.__exit__, None, None, None)
    assert len(told) == 4  # two rollouts of two attempts
    assert "was not told of 3 rollouts" in caplog.text


def test_what_the_environment_cannot_have_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        with pytest.raises(ConfigError, match="set OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf"):
            OpenTelemetry().start("run", {}, tmp_path)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.delitem(sys.modules, "lightning_trackers.otel")
    with pytest.raises(MissingExtraError, match=re.escape(install_command("otel"))):
        plugins().get("trackers", "otel")(Config()).start("run", {}, tmp_path)
