"""Beside the user's own TracerProvider, set before or after: their exporter, our names, and no trace afterwards."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning
import lightning_otel
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.bounded import Once as SaidOnce
from lightning.instrument import components
from lightning.plugins import plugins
from lightning_otel import adapter, spans
from lightning_otel.processor import LightningProcessor
from lightning_otel.tracer_provider import ProviderWatch, StandIn
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.util._once import Once

REFUSED = "Overriding of current TracerProvider is not allowed"

Events = list[lightning.ToolEvent]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which nobody has set a provider yet."""
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", Once())
    setter: Any = trace.set_tracer_provider
    while hasattr(setter, "__self__"):  # an adapter's, whose stand-in still waits
        setter = setter.__self__._inner
    monkeypatch.setattr(trace, "set_tracer_provider", setter)
    monkeypatch.setattr(components, "_asked", ())
    monkeypatch.setattr(adapter, "_watch", ProviderWatch(adapter._reporter))


@contextmanager
def installed() -> Iterator[Events]:
    events: Events = []
    undo = adapter.lightning_install(events.append)
    yield events
    undo()


def users() -> tuple[TracerProvider, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({"service.name": "theirs"}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider, exporter


class Ended(SpanProcessor):
    def __init__(self, names: list[str]) -> None:
        self.names = names

    def on_end(self, span: ReadableSpan) -> None:
        self.names.append(span.name)


def agent(tracer: trace.Tracer, name: str = "writer") -> lightning.Caller | None:
    """A framework at work: an agent that calls a model, then a tool."""
    with tracer.start_as_current_span(
        f"invoke_agent {name}", attributes={"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name}
    ):
        with tracer.start_as_current_span("chat", attributes={"gen_ai.operation.name": "chat"}):
            caller = adapter.lightning_identify()
        tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "search", "gen_ai.tool.call.id": "call-1"}
        with tracer.start_as_current_span("execute_tool search", attributes=tool):
            pass
    return caller


def named(caller: lightning.Caller | None, name: str = "writer") -> bool:
    return caller is not None and (caller.agent, caller.path, caller.framework) == (name, (name,), "otel")


def test_users_provider_first() -> None:
    provider, exporter = users()
    trace.set_tracer_provider(provider)
    before = trace.set_tracer_provider
    with installed() as events:
        assert named(agent(trace.get_tracer("theirs")))
        assert trace.get_tracer_provider() is provider
    assert [span.name for span in exporter.get_finished_spans()] == [
        "chat",
        "execute_tool search",
        "invoke_agent writer",
    ]
    assert [(event.name, event.status, event.call_id) for event in events] == [("search", "ok", "call-1")]
    assert trace.set_tracer_provider is before


def test_users_provider_later(warnings_of: Callable[[], list[str]]) -> None:
    original = trace.set_tracer_provider
    early = trace.get_tracer("before anything")
    with installed() as events:
        between = trace.get_tracer("between")
        assert named(agent(early))
        assert named(agent(between))
        provider, exporter = users()
        trace.set_tracer_provider(provider)
        for tracer in (early, between, trace.get_tracer("after"), provider.get_tracer("their own")):
            assert named(agent(tracer))
        assert len(events) == 6
    assert warnings_of() == []
    finished = exporter.get_finished_spans()
    assert len(finished) == 4 * 3
    assert {span.resource.attributes["service.name"] for span in finished} == {"theirs"}
    assert trace.set_tracer_provider is original


def test_code_that_looks_for_a_provider_finds_the_users() -> None:
    """As tracing libraries do, which set up one of their own where nobody has, and add to the user's where there is one."""
    with installed():
        assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
        assert not isinstance(trace.get_tracer_provider(), TracerProvider)
        trace.set_tracer_provider(users()[0])
        assert isinstance(trace.get_tracer_provider(), TracerProvider)
        assert not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def test_a_second_provider_of_the_users_is_refused_as_ever(warnings_of: Callable[[], list[str]]) -> None:
    with installed():
        trace.set_tracer_provider(users()[0])
        trace.set_tracer_provider(users()[0])
    assert warnings_of() == [REFUSED]


def test_a_name_imported_before_reaches_us_too(monkeypatch: pytest.MonkeyPatch, warnings_of) -> None:
    module = types.ModuleType("users_setup")
    module.set_tracer_provider = original = trace.set_tracer_provider  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "users_setup", module)
    provider, exporter = users()
    with installed():
        module.set_tracer_provider(provider)
        assert named(agent(trace.get_tracer("theirs")))
    assert module.set_tracer_provider is original
    assert len(exporter.get_finished_spans()) == 3
    assert warnings_of() == []


def test_users_provider_after_the_undo(warnings_of: Callable[[], list[str]]) -> None:
    original = trace.set_tracer_provider
    with installed() as events:
        pass
    provider, exporter = users()
    trace.set_tracer_provider(provider)
    assert agent(trace.get_tracer("theirs")) is None
    assert events == []
    assert len(exporter.get_finished_spans()) == 3
    assert trace.set_tracer_provider is original
    with installed() as again:
        assert named(agent(trace.get_tracer("theirs")))
    assert len(again) == 1
    assert warnings_of() == []


def test_installed_again_and_twice() -> None:
    for _ in range(3):
        with installed() as outer, installed() as inner:
            assert named(agent(trace.get_tracer("any")))
        assert (len(outer), len(inner)) == (0, 1)


def test_the_stand_in_counts_as_no_provider_and_takes_processors() -> None:
    exporter = InMemorySpanExporter()
    with installed():
        standing = trace.get_tracer_provider()
        assert isinstance(standing, StandIn)
        assert isinstance(standing, trace.ProxyTracerProvider)
        trace.set_tracer_provider(standing)
        standing.add_span_processor(SimpleSpanProcessor(exporter))
        assert named(agent(trace.get_tracer("any")))
    assert len(exporter.get_finished_spans()) == 3


def test_two_adapters_watch_side_by_side(warnings_of: Callable[[], list[str]]) -> None:
    original = trace.set_tracer_provider
    seen: tuple[list[str], list[str]] = ([], [])
    watches = [ProviderWatch(lambda ended=ended: Ended(ended)) for ended in seen]
    for watch in watches:
        watch.start()
    agent(trace.get_tracer("any"))
    assert [len(ended) for ended in seen] == [3, 3]
    provider, exporter = users()
    trace.set_tracer_provider(provider)
    agent(trace.get_tracer("any"))
    assert [len(ended) for ended in seen] == [6, 6]
    assert len(exporter.get_finished_spans()) == 3
    for watch in reversed(watches):
        watch.stop()
    assert trace.set_tracer_provider is original
    assert warnings_of() == []


def test_a_provider_that_takes_no_processors(warnings_of: Callable[[], list[str]]) -> None:
    with installed():
        trace.set_tracer_provider(trace.NoOpTracerProvider())
        assert agent(trace.get_tracer("any")) is None
    assert "a NoOpTracerProvider, takes no span processors" in warnings_of()[0]
    trace._TRACER_PROVIDER = trace.NoOpTracerProvider()
    with pytest.raises(lightning.LightningError, match="takes no span processors"):
        adapter.lightning_install(print)


@pytest.mark.parametrize("why", ["disabled", "missing"])
def test_without_the_sdk_there_is_nothing_to_miss(
    why: str, monkeypatch: pytest.MonkeyPatch, warnings_of: Callable[[], list[str]]
) -> None:
    if why == "disabled":
        monkeypatch.setenv("OTEL_SDK_DISABLED", "TRUE")
    else:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    undo = plugins().install_adapters(print, ["otel"])
    assert plugins().identify() is None, "no call is marked"
    undo()
    assert warnings_of() == []


def test_unsampled_traces_are_named_as_the_cause(caplog: pytest.LogCaptureFixture) -> None:
    spans.open_spans._told = SaidOnce()
    provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    with installed():
        trace.set_tracer_provider(provider)
        assert agent(trace.get_tracer("any")) is None
        assert agent(trace.get_tracer("any")) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "OTEL_TRACES_SAMPLER=always_on" in caplog.text


@pytest.mark.parametrize("installed", ["1.33.1", "2.0.0"])
def test_versions_out_of_range(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: installed)
    with pytest.raises(
        lightning.LightningError, match=rf"{installed} is installed.*pip install 'opentelemetry-api>=1.34,<2'"
    ):
        adapter.lightning_install(print)


def test_no_sdk_before_the_first_span() -> None:
    """Many things import OpenTelemetry; only what starts spans pays for the SDK. Nothing is said at the process's end."""
    program = """
import sys
from lightning.plugins import plugins
undo = plugins().install_adapters(print, ["otel"])
from opentelemetry import trace
tracer = trace.get_tracer("any")
assert "lightning_otel.adapter" in sys.modules and plugins().identify() is None
assert "opentelemetry.sdk" not in sys.modules
with tracer.start_as_current_span("a", attributes={"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "x"}):
    assert plugins().identify().agent == "x"
assert "opentelemetry.sdk" in sys.modules and not any(name.startswith("opentelemetry.exporter") for name in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


KINDS = st.sampled_from(["invoke_agent", "create_agent", "execute_tool", "chat", "other"])


@given(st.lists(st.tuples(KINDS, st.sampled_from(["a", "b", "c"])), max_size=8))
def test_a_path_is_its_open_spans(nested: list[tuple[str, str]]) -> None:
    """Whatever stands inside what: agents and tools in order, each run of equal names once; the agent is the innermost."""
    tracer = TracerProvider(shutdown_on_exit=False)
    tracer.add_span_processor(LightningProcessor())
    key = {"invoke_agent": "gen_ai.agent.name", "create_agent": "gen_ai.agent.name", "execute_tool": "gen_ai.tool.name"}
    path: list[str] = []
    opened = []
    for kind, name in nested:
        attributes = {"gen_ai.operation.name": kind, key.get(kind, "other"): name}
        opened.append(
            trace.use_span(tracer.get_tracer("any").start_span(kind, attributes=attributes), end_on_exit=True)
        )
        opened[-1].__enter__()
        if kind in key and path[-1:] != [name]:
            path.append(name)
    caller = spans.caller_here()
    for manager in reversed(opened):
        manager.__exit__(None, None, None)
    agents = [name for kind, name in nested if kind.endswith("_agent")]
    if not agents:
        assert caller is None
    else:
        assert caller is not None
        assert (caller.agent, list(caller.path)) == (agents[-1], path)
        assert bool(caller.span_id) == (nested[-1][0] == "chat" or _model_call_is_innermost(nested))
    assert spans.caller_here() is None
    assert not spans.open_spans


def _model_call_is_innermost(nested: list[tuple[str, str]]) -> bool:
    last = max(
        (n for n, (kind, _) in enumerate(nested) if kind.endswith("_agent") or kind == "execute_tool"), default=-1
    )
    return any(kind == "chat" for kind, _ in nested[last + 1 :])


def test_agents_that_have_no_spans_are_named_by_their_model_calls() -> None:
    with installed():
        attributes = {"gen_ai.operation.name": "chat", "gen_ai.agent.name": "planner"}
        with trace.get_tracer("any").start_as_current_span("chat", attributes=attributes):
            caller = adapter.lightning_identify()
    assert caller is not None
    assert (caller.agent, caller.path) == ("planner", ("planner",))


def test_tool_runs_in_full() -> None:
    tracer = trace.get_tracer("any")
    tool = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "add",
        "gen_ai.tool.call.arguments": '{"a": 1}',
    }
    with installed() as events:
        with tracer.start_as_current_span("t", attributes=tool) as span:
            span.set_attribute("gen_ai.tool.call.result", "3")
        with pytest.raises(KeyError), tracer.start_as_current_span("t", attributes=tool):
            raise KeyError("a")
        with pytest.raises(GeneratorExit), tracer.start_as_current_span("t", attributes=tool):
            raise GeneratorExit
    assert [(event.status, event.arguments, event.output) for event in events] == [
        ("ok", {"a": 1}, "3"),
        ("error", {"a": 1}, ""),
        ("unknown", {"a": 1}, ""),
    ]
    assert events[1].error == "KeyError: 'a'"


@pytest.mark.parametrize(
    ("status", "result", "raised", "error"),
    [
        ("", "", None, "error"),
        ("TOOL_ERROR", "", None, "TOOL_ERROR"),
        ("TOOL_ERROR", '{"error": "no tea"}', None, 'TOOL_ERROR: {"error": "no tea"}'),
        ("ValueError", '{"error": "no tea"}', ValueError("no tea"), "ValueError: no tea"),
        ("no tea left", '{"error": "no tea"}', ValueError("no tea"), "no tea left"),
    ],
)
def test_an_error_says_what_happened(status: str, result: str, raised: Exception | None, error: str) -> None:
    attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "buy", "gen_ai.tool.call.result": result}
    with installed() as events, trace.get_tracer("any").start_as_current_span("t", attributes=attributes) as span:
        if raised is not None:
            span.record_exception(raised)
        span.set_status(trace.Status(trace.StatusCode.ERROR, status))
    assert [event.error for event in events] == [error]


def test_what_google_adk_puts_into_spans_of_tools() -> None:
    """Attributes as it ends, a span for several tools that ran at once beside those of each, no call id where one raises."""
    tracer = trace.get_tracer("gcp.vertex.agent")
    invoke = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "clerk"}
    agent_span = tracer.start_as_current_span("invoke_agent clerk", attributes=invoke)
    with installed(), tracer.start_as_current_span("execute_tool ask"), agent_span:
        caller = adapter.lightning_identify()
    assert caller is not None
    assert caller.path == ("ask", "clerk")
    with installed() as events:
        for name, call_id in (("search", "<not specified>"), ("(merged tools)", "event-1")):
            attributes = {
                "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name, "gen_ai.tool.call.id": call_id
            }  # fmt: skip
            with tracer.start_as_current_span(f"execute_tool {name}", attributes=attributes):
                pass
    assert [(event.name, event.call_id) for event in events] == [("search", "")]


@pytest.mark.parametrize(
    ("scope", "reported"),
    [("pydantic-ai", 1), ("opentelemetry.instrumentation.openai_agents", 0)],
)
def test_a_tool_inside_another_frameworks_code_is_reported_unless_that_has_its_own_adapter(
    scope: str, reported: int
) -> None:
    with installed() as events:
        components.ask(lambda: lightning.Caller("desk", ("desk",), framework="openai-agents"))
        agent(trace.get_tracer(scope))
    assert len(events) == reported


def test_by_hand() -> None:
    """Where the adapter is not installed; beside the installed one, runs are reported once."""
    provider, _ = users()
    events: Events = []
    provider.add_span_processor(lightning_otel.LightningProcessor(events.append))
    tracer = provider.get_tracer("any")
    invoke = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "writer"}
    with tracer.start_as_current_span("invoke_agent", attributes=invoke):
        assert named(components.current_caller())
    assert components.current_caller() is None or components.current_caller().framework == "raw"
    agent(tracer)
    assert [event.name for event in events] == ["search"]
    trace.set_tracer_provider(provider)
    with installed() as ours:
        agent(tracer)
    assert len(events) + len(ours) == 2
