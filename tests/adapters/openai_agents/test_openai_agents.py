"""Names and tool runs of real Agents SDK agents, beside the user's own tracing; only the model is made up."""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import json
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import agents
import lightning
import lightning_openai_agents
import mcp.types
import pytest
from agents import (
    Agent,
    GuardrailFunctionOutput,
    InputGuardrail,
    ModelResponse,
    RunConfig,
    Runner,
    ToolGuardrailFunctionOutput,
    ToolInputGuardrail,
    ToolOutputGuardrail,
    Usage,
    function_tool,
)
from agents.mcp import MCPServer, MCPUtil
from agents.models.interface import Model
from agents.tool_context import ToolContext
from agents.tracing import TracingProcessor, custom_span, generation_span, get_trace_provider, set_trace_provider, trace
from agents.tracing.processors import BackendSpanExporter, default_processor
from agents.tracing.provider import DefaultTraceProvider
from lightning.errors import PluginError
from lightning.instrument import ActiveAttempt, activate, components, current_caller, emit
from lightning.plugins import plugins
from lightning.types import LLM, Caller
from lightning_openai_agents import LightningProcessor, steps
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

LLM_ = LLM("http://127.0.0.1:1/v1", "key", "policy")


def note() -> Caller | None:
    """Who calls, as this adapter knows it."""
    caller = current_caller()
    return caller if caller and caller.framework == "openai-agents" else None


class Scripted(Model):
    """Calls the tools of each of its turns (name, or name and arguments), then says `done`; `callers` says who asked."""

    def __init__(self, *turns: list[str | tuple[str, dict[str, Any]]]) -> None:
        self.turns, self.count = list(turns), 0
        self.callers: list[Caller | None] = []

    def _item(self, wanted: str | tuple[str, dict[str, Any]]) -> ResponseFunctionToolCall:
        name, arguments = (wanted, {"text": "hi"}) if isinstance(wanted, str) else wanted
        self.count += 1
        return ResponseFunctionToolCall(
            type="function_call", call_id=f"call-{self.count}", name=name, arguments=json.dumps(arguments)
        )

    async def get_response(self, *args: Any, **more: Any) -> ModelResponse:
        tracing = args[6] if len(args) > 6 else more["tracing"]
        with generation_span(model="policy", disabled=tracing.is_disabled()) as span:
            await asyncio.sleep(0)
            self.callers.append(note())
            calls = [self._item(wanted) for wanted in self.turns.pop(0)] if self.turns else []
            if tracing.include_data():
                asked = [{"id": c.call_id, "function": {"name": c.name, "arguments": c.arguments}} for c in calls]
                span.span_data.output = [{"role": "assistant", "content": None, "tool_calls": asked or None}]
        text = ResponseOutputText(type="output_text", text="done", annotations=[])
        said = ResponseOutputMessage(id="m", type="message", role="assistant", status="completed", content=[text])
        return ModelResponse(output=calls or [said], usage=Usage(), response_id=None)

    def stream_response(self, *args: Any, **more: Any) -> AsyncIterator[Any]:
        raise NotImplementedError

    def paths(self) -> list[str | None]:
        return [caller and "/".join(caller.path) for caller in self.callers]


def say_what_failed(context: Any, error: Exception) -> str:
    return f"failed: {error}"


@function_tool(failure_error_function=say_what_failed)
def shout(text: str) -> str:
    """Say it louder; not when it is bad."""
    if text == "bad":
        raise ValueError("bad text")
    return text.upper()


class Listener(TracingProcessor):
    """The user's own."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_trace_start(self, trace: Any) -> None:
        self.seen.append("trace")

    def on_trace_end(self, trace: Any) -> None:
        self.seen.append("/trace")

    def on_span_start(self, span: Any) -> None:
        self.seen.append(span.span_data.type)

    def on_span_end(self, span: Any) -> None:
        self.seen.append("/" + span.span_data.type)

    def shutdown(self) -> None: ...
    def force_flush(self) -> None: ...


@pytest.fixture(autouse=True)
def real() -> Iterator[DefaultTraceProvider]:
    """The SDK as just imported, but for its exporter: a provider that nobody has touched."""
    before, fresh = get_trace_provider(), DefaultTraceProvider()
    set_trace_provider(fresh)
    yield fresh
    assert get_trace_provider() is fresh, "the adapter's undo puts back what was there"
    set_trace_provider(before)


@pytest.fixture
def session() -> Iterator[ActiveAttempt]:
    undo = plugins().install_adapters(emit, ["openai-agents"])
    with activate(LLM_) as active:
        yield active
    undo()


def agent_of(name: str, model: Model, *tools: Any, **more: Any) -> Agent[Any]:
    return Agent(name, instructions=f"You are {name}.", model=model, tools=list(tools), **more)


def events(session: ActiveAttempt) -> list[tuple[str, str, str]]:
    return [(event.name, event.status, event.call_id) for event in session.tool_events]


# names -----------------------------------------------------------------------------------------------------------------
async def test_an_agent_and_its_turns(session: ActiveAttempt) -> None:
    model = Scripted(["shout"])
    await Runner.run(agent_of("solver", model, shout), "hi")
    assert model.paths() == ["solver", "solver"]
    first, second = model.callers
    assert (first.agent, first.framework) == ("solver", "openai-agents")
    assert len({first.span_id, second.span_id, first.parent_id, second.parent_id}) == 4
    assert current_caller() is None or current_caller().framework == "raw"


async def test_handoffs_go_from_name_to_name(session: ActiveAttempt) -> None:
    triage, math = Scripted([("transfer_to_math", {})]), Scripted()
    result = await Runner.run(agent_of("triage", triage, handoffs=[agent_of("math", math)]), "hi")
    assert result.last_agent.name == "math"
    assert (triage.paths(), math.paths()) == (["triage"], ["math"])


async def test_agents_as_tools_in_parallel(session: ActiveAttempt) -> None:
    boss, math, echo = (
        Scripted([("ask_math", {"input": "a"}), ("ask_echo", {"input": "b"})]),
        Scripted(["shout"]),
        Scripted(),
    )
    tools = agent_of("solver", math, shout).as_tool("ask_math", ""), agent_of("echo", echo).as_tool("ask_echo", "")
    await Runner.run(agent_of("boss", boss, *tools), "hi")
    assert (boss.paths(), echo.paths()) == (["boss"] * 2, ["boss/ask_echo/echo"])
    assert math.paths() == ["boss/ask_math/solver"] * 2
    assert {event.name: event.caller.path for event in session.tool_events} == {
        "shout": ("boss", "ask_math", "solver"),
        "ask_math": ("boss",),
        "ask_echo": ("boss",),
    }


async def test_an_agent_in_a_guardrail_is_not_the_agent_it_guards(session: ActiveAttempt) -> None:
    guard, model = Scripted(), Scripted()

    async def relevant(context: Any, agent: Agent[Any], text: Any) -> GuardrailFunctionOutput:
        await Runner.run(agent_of("judge", guard), text)
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=False)

    await Runner.run(agent_of("boss", model, input_guardrails=[InputGuardrail(relevant)]), "hi")
    assert (guard.paths(), model.paths()) == (["boss/relevant/judge"], ["boss"])


async def test_components_stand_where_they_were_entered(session: ActiveAttempt) -> None:
    boss, inner = Scripted(["consult"]), Scripted()
    asked: list[Caller | None] = []

    @function_tool
    async def consult(text: str) -> str:
        """Consult."""
        with lightning.component("draft"):
            asked.append(note())
            await Runner.run(agent_of("writer", inner), text)
        asked.append(note())
        return text

    with lightning.component("app"):
        await Runner.run(agent_of("boss", boss, consult), "hi")
    assert boss.paths() == ["app/boss"] * 2
    assert inner.paths() == ["app/boss/consult/draft/writer"]
    assert [caller.path for caller in asked] == [("app", "boss", "consult", "draft"), ("app", "boss", "consult")]


async def test_outside_every_agent_nobody_is_named(session: ActiveAttempt) -> None:
    model = Scripted()
    with trace("mine"), custom_span("own"):
        assert note() is None
        await Runner.run(agent_of("solver", model), "hi")
        assert note() is None
    assert model.paths() == ["solver"]


async def test_what_outlives_a_step_is_named_by_what_is_still_there(session: ActiveAttempt) -> None:
    late: list[asyncio.Task[Caller | None]] = []
    ended = asyncio.Event()

    @function_tool
    async def start(text: str) -> str:
        """Start something that goes on."""

        async def afterwards() -> Caller | None:
            await ended.wait()
            return note()

        late.append(asyncio.create_task(afterwards()))
        return text

    await Runner.run(agent_of("boss", Scripted(["start"]), start), "hi")
    ended.set()
    assert await late[0] is None


async def test_rollouts_side_by_side_do_not_mix() -> None:
    undo = plugins().install_adapters(emit, ["openai-agents"])

    async def one(number: int) -> tuple[list[str | None], list[str]]:
        model = Scripted([("shout", {"text": f"text{number}"})])
        with activate(LLM_) as active:
            await Runner.run(agent_of(f"agent{number}", model, shout), "hi")
        return model.paths(), [event.output for event in active.tool_events]

    found = await asyncio.gather(*map(one, range(8)))
    undo()
    assert found == [([f"agent{number}"] * 2, [f"TEXT{number}"]) for number in range(8)]


# tools ------------------------------------------------------------------------------------------------------------------
async def test_tool_runs_carry_their_call_arguments_and_status(session: ActiveAttempt) -> None:
    model = Scripted([("shout", {"text": "a"}), ("shout", {"text": "bad"}), ("shout", {"text": "a"})], ["shout"])
    await Runner.run(agent_of("solver", model, shout), "hi")
    found = {event.call_id: event for event in session.tool_events}
    assert sorted(found) == ["call-1", "call-2", "call-3", "call-4"]
    assert [found[f"call-{n}"].status for n in (1, 2, 3, 4)] == ["ok", "error", "ok", "ok"]
    assert (found["call-2"].arguments, found["call-2"].error) == ({"text": "bad"}, "bad text")
    assert (found["call-1"].arguments, found["call-1"].output, found["call-1"].error) == ({"text": "a"}, "A", "")
    assert {event.caller.path for event in session.tool_events} == {("solver",)}


async def test_a_failure_that_the_sdk_keeps_to_itself_is_an_error_all_the_same(session: ActiveAttempt) -> None:
    @function_tool
    def fail(text: str) -> str:
        """Fail."""
        raise ValueError("a secret")

    @function_tool(failure_error_function=None)
    def crash(text: str) -> str:
        """Fail, and the run with it."""
        raise ValueError("out")

    await Runner.run(agent_of("solver", Scripted(["fail"]), fail), "hi")
    with pytest.raises(agents.UserError, match="out"):
        await Runner.run(agent_of("solver", Scripted(["crash"]), crash), "hi")
    assert events(session) == [("fail", "error", "call-1"), ("crash", "error", "call-1")]


async def test_a_cancelled_tool_is_reported_as_unknown(session: ActiveAttempt) -> None:
    started = asyncio.Event()

    @function_tool
    async def wait(text: str) -> str:
        """Wait for ever."""
        started.set()
        await asyncio.Event().wait()
        return text

    running = asyncio.create_task(Runner.run(agent_of("solver", Scripted(["wait"]), wait), "hi"))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.sleep(0.01)
    assert events(session) == [("wait", "unknown", "call-1")]
    assert note() is None


async def test_a_tool_that_waits_for_an_approval_has_not_run(session: ActiveAttempt) -> None:
    ran: list[str] = []

    @function_tool(needs_approval=True)
    def pay(text: str) -> str:
        """Pay."""
        ran.append(text)
        return "paid"

    agent = agent_of("solver", Scripted(["pay"]), pay)
    waiting = await Runner.run(agent, "hi")
    assert ran == []
    assert events(session) == [("pay", "unknown", "call-1")]
    state = waiting.to_state()
    state.approve(waiting.interruptions[0])
    await Runner.run(agent, state)
    assert ran == ["hi"]
    assert events(session) == [("pay", "ok", "call-1")], "one call is one event"


async def test_a_run_that_a_person_refuses_is_blocked(session: ActiveAttempt) -> None:
    @function_tool(needs_approval=True)
    def pay(text: str) -> str:
        """Pay."""
        return "paid"

    agent = agent_of("solver", Scripted(["pay"], ["pay"]), pay)
    waiting = await Runner.run(agent, "hi")
    state = waiting.to_state()
    state.reject(waiting.interruptions[0], always_reject=True)
    await Runner.run(agent, state)
    assert events(session) == [("pay", "unknown", "call-1"), ("pay", "blocked", "call-2")], "the first never ran"


async def test_a_tool_inside_a_tool_that_waits_for_an_approval_is_one_event(session: ActiveAttempt) -> None:
    @function_tool(needs_approval=True)
    def pay(text: str) -> str:
        """Pay."""
        return "paid"

    math = Scripted()
    math.turns, math.count = [["pay"]], 10
    agent = agent_of(
        "boss", Scripted([("ask_math", {"input": "a"})]), agent_of("math", math, pay).as_tool("ask_math", "")
    )
    waiting = await Runner.run(agent, "hi")
    state = waiting.to_state()
    state.approve(waiting.interruptions[0])
    await Runner.run(agent, state)
    assert sorted(events(session)) == [("ask_math", "ok", "call-1"), ("pay", "ok", "call-11")]


async def test_two_identical_calls_keep_their_own_ids(session: ActiveAttempt) -> None:
    """The first one ends last, and is the one that fails."""
    slow = asyncio.Event()
    begun: list[str] = []

    @function_tool(failure_error_function=say_what_failed)
    async def wait(context: ToolContext[Any], text: str) -> str:
        """Wait."""
        begun.append(context.tool_call_id)
        if context.tool_call_id == "call-1":
            await slow.wait()
            raise ValueError("slow")
        slow.set()
        return text

    await Runner.run(agent_of("solver", Scripted(["wait", "wait"]), wait), "hi")
    assert sorted(begun) == ["call-1", "call-2"]
    assert events(session) == [("wait", "ok", "call-2"), ("wait", "error", "call-1")]


async def test_a_tool_that_is_out_of_time_has_failed(session: ActiveAttempt) -> None:
    @function_tool(timeout=0.01)
    async def wait(text: str) -> str:
        """Wait for ever."""
        await asyncio.Event().wait()
        return text

    await Runner.run(agent_of("solver", Scripted(["wait"]), wait), "hi")
    assert events(session) == [("wait", "error", "call-1")]
    assert "timed out after 0.01 seconds" in session.tool_events[0].error


@pytest.mark.parametrize("side", ["input", "output"])
async def test_what_a_guardrail_rejects_is_blocked(side: str, session: ActiveAttempt) -> None:
    def reject(data: Any) -> ToolGuardrailFunctionOutput:
        return ToolGuardrailFunctionOutput.reject_content("not that")

    @function_tool
    def pay(text: str) -> str:
        """Pay."""
        return "paid"

    if side == "input":
        pay.tool_input_guardrails = [ToolInputGuardrail(reject, "no")]
    else:
        pay.tool_output_guardrails = [ToolOutputGuardrail(reject, "no")]
    await Runner.run(agent_of("solver", Scripted(["pay"]), pay), "hi")
    assert events(session) == [("pay", "blocked", "call-1")]
    assert session.tool_events[0].error == "not that"


class Server(MCPServer):
    """Has one tool, which answers that it failed."""

    name = "shop"

    async def connect(self) -> None: ...
    async def cleanup(self) -> None: ...
    async def list_prompts(self) -> Any: ...
    async def get_prompt(self, name: str, arguments: Any = None) -> Any: ...

    async def list_tools(self, run_context: Any = None, agent: Any = None) -> list[Any]:
        schema = {"type": "object", "properties": {"text": {"type": "string"}}}
        return [mcp.types.Tool.model_validate({"name": "buy", "inputSchema": schema})]

    async def call_tool(self, tool_name: str, arguments: Any, meta: Any = None) -> Any:
        failed = arguments["text"] == "bad"
        content = [{"type": "text", "text": "sold out" if failed else "bought"}]
        return mcp.types.CallToolResult.model_validate({"content": content, "isError": failed})


async def test_a_tool_of_an_mcp_server_fails_when_the_server_says_so(session: ActiveAttempt) -> None:
    model = Scripted([("buy", {"text": "bad"}), ("buy", {"text": "good"})])
    await Runner.run(agent_of("solver", model, mcp_servers=[Server()]), "hi")
    assert sorted(events(session)) == [("buy", "error", "call-1"), ("buy", "ok", "call-2")]
    assert {event.error for event in session.tool_events} == {"sold out", ""}


async def test_the_sdk_is_as_it_was_after_the_undo() -> None:
    owners = {ToolContext: "from_agent_context", ToolInputGuardrail: "run", MCPUtil: "invoke_mcp_tool"}
    before = [vars(owner)[name] for owner, name in owners.items()]
    undo = plugins().install_adapters(emit, ["openai-agents"])
    assert [vars(owner)[name] for owner, name in owners.items()] != before
    undo()
    assert [vars(owner)[name] for owner, name in owners.items()] == before


async def test_a_tool_that_returns_nothing_has_run(session: ActiveAttempt) -> None:
    @function_tool
    def note_down(text: str) -> None:
        """Keep it."""

    before = time.time()
    await Runner.run(agent_of("solver", Scripted(["note_down", "shout"]), note_down, shout), "hi")
    assert sorted(events(session)) == [("note_down", "ok", "call-1"), ("shout", "ok", "call-2")]
    (event,) = (event for event in session.tool_events if event.name == "note_down")
    assert before <= event.at <= time.time()


async def test_without_data_in_traces_a_run_has_its_status_and_call_but_no_texts(session: ActiveAttempt) -> None:
    config = RunConfig(trace_include_sensitive_data=False)
    await Runner.run(agent_of("solver", Scripted([("shout", {"text": "bad"})]), shout), "hi", run_config=config)
    (event,) = session.tool_events
    assert (event.status, event.call_id, event.arguments, event.output) == ("error", "call-1", None, "")


# the user's own tracing -------------------------------------------------------------------------------------------------
def by_environment(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    return RunConfig()


def by_switch(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    agents.set_tracing_disabled(True)
    return RunConfig()


def by_run(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    return RunConfig(tracing_disabled=True)


@pytest.mark.parametrize("first", ["installed", "disabled"])
@pytest.mark.parametrize("disable", [by_environment, by_switch, by_run])
async def test_where_tracing_is_disabled_names_are_known_and_it_stays_disabled(
    disable: Callable[[pytest.MonkeyPatch], RunConfig], first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, model = Listener(), Scripted([("shout", {"text": "bad"})])
    agents.add_trace_processor(listener)
    config = disable(monkeypatch) if first == "disabled" else RunConfig()
    undo = plugins().install_adapters(emit, ["openai-agents"])
    config = disable(monkeypatch) if first == "installed" else config
    with activate(LLM_) as session:
        await Runner.run(agent_of("solver", model, shout), "hi", run_config=config)
    undo()
    assert model.paths() == ["solver", "solver"]
    assert len({caller.span_id for caller in model.callers}) == 2
    assert [(event.name, event.status, event.error) for event in session.tool_events] == [
        ("shout", "error", "bad text")
    ]
    assert listener.seen == []


async def test_the_users_processors_see_what_they_saw_before() -> None:
    async def run() -> None:
        await Runner.run(agent_of("solver", Scripted([("shout", {"text": "bad"})]), shout), "hi")

    before, after = Listener(), Listener()
    agents.add_trace_processor(before)
    await run()
    alone = list(before.seen)
    undo = plugins().install_adapters(emit, ["openai-agents"])
    agents.add_trace_processor(after)
    await run()
    undo()
    await run()
    assert "function" in alone
    assert (before.seen, after.seen) == (alone * 3, alone * 2)


async def test_a_provider_the_user_sets_meanwhile_stays(real: DefaultTraceProvider) -> None:
    undo = lightning_openai_agents.adapter.lightning_install(emit)
    of_the_user = DefaultTraceProvider()
    set_trace_provider(of_the_user)
    undo()
    assert get_trace_provider() is of_the_user
    set_trace_provider(real)


async def test_installed_twice_it_goes_with_the_last_undo(real: DefaultTraceProvider) -> None:
    heard: list[lightning.ToolEvent] = []
    first, second = (lightning_openai_agents.adapter.lightning_install(receiver) for receiver in (heard.append, emit))
    ours = get_trace_provider()
    second()
    assert get_trace_provider() is ours is not real
    await Runner.run(agent_of("solver", Scripted(["shout"]), shout), "hi")
    first()
    assert get_trace_provider() is real
    await Runner.run(agent_of("solver", Scripted(["shout"]), shout), "hi")
    assert [event.name for event in heard] == ["shout"]


async def test_the_default_exporter_sends_nothing_meanwhile(
    real: DefaultTraceProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had taken in before waits until the adapter is gone; what ran under the adapter is never sent."""
    sent: list[str] = []

    def export(self: BackendSpanExporter, items: list[Any]) -> None:
        sent.extend("trace:" + item.name for item in items if isinstance(item, agents.Trace))

    monkeypatch.setattr(BackendSpanExporter, "export", export)
    monkeypatch.setenv("OPENAI_API_KEY", "the rollout's token")
    real.register_processor(default_processor())

    async def run(name: str) -> None:
        await Runner.run(agent_of("solver", Scripted()), "hi", run_config=RunConfig(workflow_name=name))

    agents.flush_traces()
    await run("before")
    undo = plugins().install_adapters(emit, ["openai-agents"])
    await run("meanwhile")
    agents.flush_traces()
    assert sent == []
    undo()
    await run("after")
    agents.flush_traces()
    assert sent == ["trace:before", "trace:after"]


# by hand ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("installed", [False, True])
async def test_by_hand_reports_once_whether_the_adapter_is_installed_or_not(installed: bool) -> None:
    undo = plugins().install_adapters(emit, ["openai-agents"] if installed else [])
    for _ in range(2):
        agents.add_trace_processor(LightningProcessor())
    boss, math = Scripted([("ask_math", {"input": "a"})]), Scripted([("shout", {"text": "bad"})])
    with activate(LLM_) as session:
        await Runner.run(agent_of("boss", boss, agent_of("solver", math, shout).as_tool("ask_math", "")), "hi")
    undo()
    assert (boss.paths(), math.paths()) == (["boss"] * 2, ["boss/ask_math/solver"] * 2)
    assert events(session) == [("shout", "error", "call-1"), ("ask_math", "ok", "call-1")]
    assert steps._by_hand == {}


def test_processors_made_again_and_again_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(components, "_asked", ())
    for _ in range(3):
        LightningProcessor()
    assert len(components._asked) == 1


async def test_by_hand_forgets_spans_that_nobody_ended() -> None:
    agents.add_trace_processor(LightningProcessor())
    with trace("one"):
        agents.agent_span("lost").start()
        assert len(steps._by_hand) == 1
    assert steps._by_hand == {}


async def test_nothing_outlives_a_run(session: ActiveAttempt) -> None:
    """Steps hang on the spans they belong to, and go with them; also when the model fails."""

    class Failing(Scripted):
        async def get_response(self, *args: Any, **more: Any) -> ModelResponse:
            await super().get_response(*args, **more)
            raise ConnectionError("the model is down")

    made: list[weakref.ref[steps.Step]] = []
    original = steps.Step.caller

    def caller(self: steps.Step) -> Caller | None:
        made.append(weakref.ref(self))
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps.Step, "caller", caller)
        model = Failing()
        with pytest.raises(ConnectionError):
            await Runner.run(agent_of("solver", model), "hi")
    assert model.paths() == ["solver"]
    assert note() is None
    gc.collect()
    assert made
    assert [reference() for reference in made] == [None] * len(made)


@pytest.mark.parametrize("version", ["0.19.9", "1.0.0"])
def test_a_version_out_of_range_is_refused_with_the_cure(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    cure = rf"openai-agents {version} is installed.*pip install 'openai-agents>=0.20,<1'"
    with pytest.raises(PluginError, match=cure):
        lightning_openai_agents.adapter.lightning_install(emit)
    assert not steps.installations
