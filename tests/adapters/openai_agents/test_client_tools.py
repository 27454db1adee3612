"""The tools that the Agents SDK runs and that are no functions: the model asks for them through the gateway's Responses API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import agents
import pytest
from agents import (
    Agent,
    ApplyPatchTool,
    Computer,
    ComputerTool,
    CustomTool,
    LocalShellTool,
    ModelResponse,
    RunConfig,
    Runner,
    ShellTool,
    Usage,
    function_tool,
)
from agents.editor import ApplyPatchResult
from agents.models.interface import Model
from agents.models.multi_provider import MultiProvider
from agents.run_internal.tool_actions import LocalShellAction, ShellAction
from agents.tracing import TracingProcessor
from lightning.instrument import activate, current_attempt, emit
from lightning.plugins import plugins
from lightning.testing import Reply, RolloutRecord, ToolCall, rollout
from lightning.types import LLM, Task, ToolEvent
from lightning_openai_agents import LightningProcessor
from lightning_openai_agents.steps import step_by_hand, watching
from openai import AsyncOpenAI
from openai.types.responses import ResponseComputerToolCall, ResponseOutputMessage, ResponseOutputText

PATCH = {"type": "create_file", "path": "a.md", "diff": "+tea"}
CALLS = {
    "shell": ToolCall("shell", '{"commands": ["ls"], "timeout_ms": 9}', id="call-1"),
    "local_shell": ToolCall("local_shell", '{"command": ["ls"]}', id="call-1"),
    "apply_patch": ToolCall("apply_patch", json.dumps({"operation": PATCH}), id="call-1"),
    "sql": ToolCall("sql", '{"input": "select 1"}', id="call-1"),
}
ARGUMENTS = {
    "shell": {"commands": ["ls"], "timeout_ms": 9},
    "local_shell": {"type": "exec", "env": {}, "command": ["ls"]},
    "apply_patch": PATCH,
    "sql": "select 1",
}
APPROVED = ("shell", "apply_patch", "sql")
"""Those that can wait for an approval."""
TRACING = pytest.mark.parametrize("disabled", [False, True], ids=["traced", "tracing disabled"])
Does = Callable[[], Any]


class Editor:
    """Does the same for every operation."""

    def __init__(self, does: Does) -> None:
        self._does = does

    def create_file(self, operation: Any) -> Any:
        return self._does()

    update_file = delete_file = create_file


def tool_of(kind: str, does: Does, **more: Any) -> Any:
    if kind == "shell":
        return ShellTool(executor=lambda request: does(), **more)
    if kind == "local_shell":
        return LocalShellTool(executor=lambda request: does())
    if kind == "apply_patch":
        return ApplyPatchTool(editor=Editor(does), **more)

    async def on_invoke(context: Any, text: str) -> Any:
        said = does()
        return await said if asyncio.iscoroutine(said) else said

    return CustomTool(name="sql", description="SQL.", on_invoke_tool=on_invoke, **more)


def fails() -> str:
    raise ValueError("no such thing")


def refuses(context: Any, item: Any) -> Any:
    return {"approve": False, "reason": "not that"}


@asynccontextmanager
async def settings(llm: LLM, **config: Any) -> AsyncIterator[RunConfig]:
    """For runs that ask the gateway by its Responses API."""
    async with AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        provider = MultiProvider(openai_client=client, openai_use_responses=True)
        yield RunConfig(model_provider=provider, **config)


def run(
    agent: Agent[Any], script: Any, decide: Any = None, adapters: Sequence[str] = ("openai-agents",), **config: Any
) -> RolloutRecord:
    """One rollout of an agent; `decide` gets the state of a run that waits, and what it waits for."""

    async def program(task: Task, llm: LLM) -> float:
        async with settings(llm, **config) as asked:
            result = await Runner.run(agent, "go", run_config=asked)
            while result.interruptions:
                state = result.to_state()
                decide(state, result.interruptions[0])
                result = await Runner.run(agent, state, run_config=asked)
        return 1.0

    return rollout(program, Task("go"), script, adapters=adapters)


def agent_of(*tools: Any, name: str = "boss") -> Agent[Any]:
    return Agent(name, instructions=f"You are {name}.", tools=list(tools), model="policy")


def told(events: Sequence[ToolEvent]) -> list[tuple[str, str, str]]:
    return [(event.name, event.status, event.call_id) for event in events]


@TRACING
@pytest.mark.parametrize("kind", list(CALLS))
def test_a_run_is_told_with_its_call(kind: str, disabled: bool) -> None:
    record = run(agent_of(tool_of(kind, lambda: "done so")), [CALLS[kind], "fine"], tracing_disabled=disabled)
    assert record.rollout.error == ""
    assert told(record.tool_events) == [(kind, "ok", "call-1")]
    (event,) = record.tool_events
    assert (event.arguments, event.error) == (ARGUMENTS[kind], "")
    assert event.output == "done so"
    assert event.caller is not None
    assert event.caller.path == ("boss",)
    assert [call.caller.path for call in record.transitions] == [("boss",)] * 2


@TRACING
@pytest.mark.parametrize("kind", list(CALLS))
def test_a_tool_that_raises_has_failed_whether_the_sdk_catches_it_or_not(kind: str, disabled: bool) -> None:
    record = run(agent_of(tool_of(kind, fails)), [CALLS[kind], "fine"], tracing_disabled=disabled)
    assert ("no such thing" in record.rollout.error) == (kind == "local_shell")
    assert told(record.tool_events) == [(kind, "error", "call-1")]
    assert record.tool_events[0].error == "no such thing"


@TRACING
@pytest.mark.parametrize("kind", APPROVED)
def test_a_run_that_is_refused_at_once_is_blocked(kind: str, disabled: bool) -> None:
    tool = tool_of(kind, fails, needs_approval=True, on_approval=refuses)
    record = run(agent_of(tool), [CALLS[kind], "fine"], tracing_disabled=disabled)
    assert record.rollout.error == ""
    assert told(record.tool_events) == [(kind, "blocked", "call-1")]


@TRACING
@pytest.mark.parametrize("kind", APPROVED)
@pytest.mark.parametrize("approved", [True, False])
def test_a_run_that_waits_is_told_once_it_is_decided(kind: str, approved: bool, disabled: bool) -> None:
    seen: list[int] = []

    def decide(state: Any, item: Any) -> None:
        attempt = current_attempt()
        seen.append(len(attempt.tool_events) if attempt else -1)
        if approved:
            state.approve(item)
        else:
            state.reject(item, always_reject=True)

    tool = tool_of(kind, lambda: "done so", needs_approval=True)
    record = run(agent_of(tool), [CALLS[kind], "fine"], decide, tracing_disabled=disabled)
    assert (record.rollout.error, seen) == ("", [0])
    assert told(record.tool_events) == [(kind, "ok" if approved else "blocked", "call-1")]
    (event,) = record.tool_events
    assert event.arguments == ARGUMENTS[kind]
    assert event.caller is not None
    assert event.caller.path == ("boss",)


@TRACING
def test_an_editor_that_says_it_failed_has_failed(disabled: bool) -> None:
    tool = tool_of("apply_patch", lambda: ApplyPatchResult(status="failed", output="no such file"))
    record = run(agent_of(tool), [CALLS["apply_patch"], "fine"], tracing_disabled=disabled)
    assert told(record.tool_events) == [("apply_patch", "error", "call-1")]
    assert record.tool_events[0].error == record.tool_events[0].output == "no such file"


def test_a_call_that_the_sdk_cannot_read_is_an_error_of_that_call() -> None:
    call = ToolCall("apply_patch", '{"operation": {"type": "create_file", "path": "a.md"}}', id="call-1")
    record = run(agent_of(tool_of("apply_patch", lambda: "done so")), [call])
    assert "missing the required diff" in record.rollout.error
    assert told(record.tool_events) == [("apply_patch", "error", "call-1")]


@TRACING
def test_calls_of_one_turn_keep_their_ids(disabled: bool) -> None:
    calls = [ToolCall("shell", '{"commands": ["ls"]}', id=f"call-{n}") for n in (1, 2)]
    said = iter([ValueError("first"), None])

    def once() -> str:
        if error := next(said):
            raise error
        return "files"

    script = [Reply("", tool_calls=[*calls, ToolCall("sql", '{"input": "1"}', id="call-3")]), "fine"]
    tools = tool_of("shell", once), tool_of("sql", lambda: "1")
    record = run(agent_of(*tools), script, tracing_disabled=disabled)
    assert sorted(told(record.tool_events)) == [
        ("shell", "error", "call-1"),
        ("shell", "ok", "call-2"),
        ("sql", "ok", "call-3"),
    ]


@TRACING
def test_an_agent_inside_a_tool_has_its_own_runs_and_names(disabled: bool) -> None:
    """Names are the same with a span and without; the inner agent's tool has the outer one's name."""

    @function_tool(name_override="sql")
    def inner_sql() -> str:
        """SQL."""
        return "inner"

    inner = agent_of(inner_sql, tool_of("shell", fails), name="inner")

    async def program(task: Task, llm: LLM) -> float:
        async with settings(llm, tracing_disabled=disabled) as asked:

            async def ask() -> str:
                return str((await Runner.run(inner, "go", run_config=asked)).final_output)

            await Runner.run(agent_of(tool_of("sql", ask)), "go", run_config=asked)
        return 1.0

    def script(body: Mapping[str, Any]) -> Reply:
        if body["messages"][-1]["role"] == "tool":
            return Reply("fine")
        if "inner" in str(body["messages"][0]["content"]):
            calls = [ToolCall("sql", "{}", id="call-2"), ToolCall("shell", '{"commands": ["ls"]}', id="call-3")]
            return Reply("", tool_calls=calls)
        return Reply("", tool_calls=[CALLS["sql"]])

    record = rollout(program, Task("go"), script, adapters=["openai-agents"])
    assert record.rollout.error == ""
    assert sorted(told(record.tool_events)) == [
        ("shell", "error", "call-3"),
        ("sql", "ok", "call-1"),
        ("sql", "ok", "call-2"),
    ]
    assert {event.call_id: event.caller and event.caller.path for event in record.tool_events} == {
        "call-1": ("boss",),
        "call-2": ("boss", "sql", "inner"),
        "call-3": ("boss", "sql", "inner"),
    }
    assert [call.caller.path for call in record.transitions] == [
        ("boss",),
        *[("boss", "sql", "inner")] * 2,
        ("boss",),
    ]


@TRACING
def test_without_data_in_traces_a_run_has_its_status_and_call_but_no_texts(disabled: bool) -> None:
    record = run(
        agent_of(tool_of("shell", fails)),
        [CALLS["shell"], "fine"],
        tracing_disabled=disabled,
        trace_include_sensitive_data=False,
    )
    (event,) = record.tool_events
    assert (event.status, event.call_id, event.arguments, event.output) == ("error", "call-1", None, "")
    assert "no such thing" not in event.error


@TRACING
def test_a_cancelled_run_is_unknown(disabled: bool) -> None:
    async def wait() -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        return ""

    record = run(agent_of(tool_of("sql", wait)), [CALLS["sql"], "fine"], tracing_disabled=disabled)
    assert told(record.tool_events) == [("sql", "unknown", "call-1")]


class Screen(Computer):
    """Shows a picture, or fails."""

    environment, dimensions = "browser", (1, 1)

    def __init__(self, does: Does) -> None:
        self._does = does

    def screenshot(self) -> str:
        return str(self._does())

    def _nothing(self, *args: Any, **more: Any) -> None: ...

    click = double_click = scroll = type = wait = move = keypress = drag = _nothing


class Asks(Model):
    """Asks for the computer, then says `done`."""

    def __init__(self) -> None:
        call = {"id": "c", "call_id": "call-1", "type": "computer_call", "status": "completed"}
        asked = ResponseComputerToolCall.model_validate(
            {**call, "action": {"type": "wait"}, "pending_safety_checks": []}
        )
        text = ResponseOutputText(type="output_text", text="done", annotations=[])
        said = ResponseOutputMessage(id="m", type="message", role="assistant", status="completed", content=[text])
        self._left: list[Any] = [asked, said]

    async def get_response(self, *args: Any, **more: Any) -> ModelResponse:
        return ModelResponse(output=[self._left.pop(0)], usage=Usage(), response_id=None)

    def stream_response(self, *args: Any, **more: Any) -> AsyncIterator[Any]:
        raise NotImplementedError


@TRACING
@pytest.mark.parametrize("does", [lambda: "aGk=", fails])
async def test_the_computer_too(does: Does, disabled: bool) -> None:
    """The gateway refuses it, so the model is made up."""
    undo = plugins().install_adapters(emit, ["openai-agents"])
    agent = Agent("boss", tools=[ComputerTool(Screen(does))], model=Asks())
    ends = pytest.raises(ValueError, match="no such thing") if does is fails else nullcontext()
    with activate(LLM("http://127.0.0.1:1/v1", "key", "policy")) as session, ends:
        await Runner.run(agent, "go", run_config=RunConfig(tracing_disabled=disabled))
    undo()
    assert told(session.tool_events) == [("computer", "error" if does is fails else "ok", "call-1")]
    assert session.tool_events[0].arguments == {"type": "wait"}


class Users(TracingProcessor):
    """The user's own."""

    def __init__(self) -> None:
        self.spans: list[str] = []

    def on_span_end(self, span: Any) -> None:
        self.spans.append(span.span_data.type)

    def on_trace_start(self, trace: Any) -> None: ...
    def on_trace_end(self, trace: Any) -> None: ...
    def on_span_start(self, span: Any) -> None: ...
    def shutdown(self) -> None: ...
    def force_flush(self) -> None: ...


@pytest.mark.parametrize("kind", ["shell", "local_shell"])
def test_by_hand_a_run_is_told_once(kind: str) -> None:
    users, undo = Users(), watching.add(step_by_hand)
    agents.set_trace_processors([LightningProcessor(), LightningProcessor(), users])
    try:
        record = run(agent_of(tool_of(kind, lambda: "files")), [CALLS[kind], "fine"], adapters=[])
    finally:
        agents.set_trace_processors([])
        undo()  # the next test's SDK is as it was
    assert told(record.tool_events) == [(kind, "ok", "call-1")]
    assert users.spans.count("function") == (kind == "shell"), "the SDK makes no span of a local shell, nor do we"


def test_the_sdk_is_as_it_was_after_the_undo() -> None:
    before = [vars(owner)["execute"] for owner in (ShellAction, LocalShellAction)]
    run(agent_of(tool_of("shell", fails)), [CALLS["shell"], "fine"])
    assert [vars(owner)["execute"] for owner in (ShellAction, LocalShellAction)] == before
