"""AutoGen's teams, handoffs, agents as tools, cancelled tools and logs, with AutoGen's own scripted model client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning
import lightning_autogen
import pytest
from autogen_agentchat.agents import AssistantAgent, BaseChatAgent, SocietyOfMindAgent
from autogen_agentchat.base import TaskRunner
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat, SelectorGroupChat, Swarm
from autogen_agentchat.tools import AgentTool, TeamTool
from autogen_core import (
    EVENT_LOGGER_NAME,
    AgentId,
    CancellationToken,
    FunctionCall,
    MessageContext,
    RoutedAgent,
    SingleThreadedAgentRuntime,
    message_handler,
)
from autogen_core.models import CreateResult, ModelFamily, ModelInfo, RequestUsage
from autogen_core.tools import FunctionTool
from autogen_ext.models.replay import ReplayChatCompletionClient
from lightning.instrument import activate, components, emit
from lightning.plugins import plugins
from opentelemetry import trace

INFO = ModelInfo(
    vision=False, function_calling=True, json_output=True, structured_output=False, family=ModelFamily.UNKNOWN
)
LOG = logging.getLogger(EVENT_LOGGER_NAME)


class Model(ReplayChatCompletionClient):
    """Says what it is told to, and notes who was calling."""

    calls: list[lightning.Caller | None]

    async def create(self, *args: Any, **options: Any) -> CreateResult:
        self.calls.append(components.current_caller())
        return await super().create(*args, **options)


def use(tool: str, call_id: str = "call-1", arguments: str = "{}") -> CreateResult:
    content = [FunctionCall(id=call_id, name=tool, arguments=arguments)]
    usage = RequestUsage(prompt_tokens=0, completion_tokens=0)
    return CreateResult(finish_reason="function_calls", content=content, usage=usage, cached=False)


def model(calls: list[lightning.Caller | None], *says: str | CreateResult) -> Model:
    made = Model(list(says), model_info=INFO)
    made.calls = calls
    return made


@pytest.fixture
def events() -> Iterator[list[lightning.ToolEvent]]:
    found: list[lightning.ToolEvent] = []
    undo = lightning_autogen.adapter.lightning_install(found.append)
    yield found
    undo()


@pytest.fixture
def calls() -> list[lightning.Caller | None]:
    return []


def paths(calls: Sequence[lightning.Caller | None]) -> list[str]:
    assert all(call is not None and call.framework == "autogen" and call.parent_id for call in calls)
    return ["/".join(call.path) for call in calls if call is not None]


async def by_run(agent: AssistantAgent) -> None:
    await agent.run(task="hi")


async def by_messages(agent: AssistantAgent) -> None:
    await agent.on_messages([TextMessage(content="hi", source="user")], CancellationToken())


async def by_messages_stream(agent: AssistantAgent) -> None:
    async for _ in agent.on_messages_stream([TextMessage(content="hi", source="user")], CancellationToken()):
        caller = components.current_caller()
        assert caller is None or caller.framework != "autogen", "what a consumer does between the items is its own"


@pytest.mark.parametrize("adapters", [["autogen"], ["autogen", "otel"], ["langchain", "autogen", "otel"]])
@pytest.mark.parametrize("ask", [by_run, by_messages, by_messages_stream])
async def test_an_agent_that_is_asked_directly_is_named_and_its_tool_run_is_one_event(
    ask: Callable[[AssistantAgent], Any], adapters: list[str], calls: list[Any]
) -> None:
    import langchain_core.tracers.context  # noqa: F401 — its adapter waits for it

    undo = plugins().install_adapters(emit, adapters)
    helper = AgentTool(AssistantAgent("helper", model(calls, "helped")))
    script = use("look", "call-1"), use("helper", "call-2", '{"task": "help"}'), "done"

    async def look() -> str:
        return "seen"

    boss = AssistantAgent("boss", model(calls, *script), tools=[look, helper], max_tool_iterations=3)
    with activate(lightning.LLM("http://127.0.0.1:1/v1", "key", "policy")) as session:
        await ask(boss)
    undo()
    assert paths(calls) == ["boss", "boss", "boss/helper", "boss"]
    found = [(event.name, event.status, event.call_id, event.output) for event in session.tool_events]
    assert found[0] == ("look", "ok", "call-1", "seen")
    assert [event[:3] for event in found[1:]] == [("helper", "ok", "call-2")]
    assert {event.caller and event.caller.path for event in session.tool_events} == {("boss",)}


def test_the_undo_puts_the_methods_back() -> None:
    before = BaseChatAgent.__init__, AssistantAgent.on_messages, AssistantAgent.on_messages_stream
    undo = plugins().install_adapters(emit, ["autogen"])
    assert before[1] is not AssistantAgent.on_messages
    undo()
    assert before == (BaseChatAgent.__init__, AssistantAgent.on_messages, AssistantAgent.on_messages_stream)


def pair(calls: list[Any], **options: Any) -> RoundRobinGroupChat:
    agents = [AssistantAgent(name, model(calls, f"{name} speaks")) for name in ("writer", "checker")]
    return RoundRobinGroupChat(agents, termination_condition=MaxMessageTermination(3), **options)


async def selector(calls: list[Any]) -> TaskRunner:
    agents = [AssistantAgent(name, model(calls, f"{name} speaks")) for name in ("writer", "checker")]
    chooser = model(calls, "checker", "writer")
    return SelectorGroupChat(agents, chooser, termination_condition=MaxMessageTermination(3))


async def swarm(calls: list[Any]) -> TaskRunner:
    alice = AssistantAgent("alice", model(calls, use("transfer_to_bob")), handoffs=["bob"])
    bob = AssistantAgent("bob", model(calls, "done"))
    return Swarm([alice, bob], termination_condition=MaxMessageTermination(3))


async def team_in_a_team(calls: list[Any]) -> TaskRunner:
    judge = AssistantAgent("judge", model(calls, "judged"))
    return RoundRobinGroupChat([pair(calls, name="drafting"), judge], termination_condition=MaxMessageTermination(4))


async def agent_as_tool(calls: list[Any]) -> TaskRunner:
    helper = AgentTool(AssistantAgent("helper", model(calls, "helped")))
    script = use("helper", arguments='{"task": "help"}'), "done"
    return AssistantAgent("boss", model(calls, *script), tools=[helper], max_tool_iterations=2)


async def team_as_tool(calls: list[Any]) -> TaskRunner:
    office = TeamTool(pair(calls), name="office", description="Writes.")
    script = use("office", arguments='{"task": "help"}'), "done"
    return AssistantAgent("boss", model(calls, *script), tools=[office], max_tool_iterations=2)


async def team_as_agent(calls: list[Any]) -> TaskRunner:
    return SocietyOfMindAgent("society", pair(calls), model(calls, "summed up"))


@pytest.mark.parametrize("stream", [False, True], ids=["run", "run_stream"])
@pytest.mark.parametrize(
    ("make", "expected", "tools"),
    [
        (selector, ["SelectorGroupChatManager", "checker", "writer"], []),
        (swarm, ["alice", "bob"], [("transfer_to_bob", "alice")]),
        (team_in_a_team, ["drafting/writer", "drafting/checker", "judge"], []),
        (agent_as_tool, ["boss", "boss/helper", "boss"], [("helper", "boss")]),
        (team_as_tool, ["boss", "boss/office/writer", "boss/office/checker", "boss"], [("office", "boss")]),
        (team_as_agent, ["society/writer", "society/checker", "society"], []),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_paths(
    make: Callable[..., Any], expected: Any, tools: Any, stream: bool, events: Any, calls: Any
) -> None:
    runner = await make(calls)
    if stream:
        async for _ in runner.run_stream(task="go"):
            pass
    else:
        await runner.run(task="go")
    assert paths(calls) == expected
    assert [(event.name, event.status) for event in events] == [(name, "ok") for name, _ in tools]
    assert [event.caller.path for event in events] == [(by,) for _, by in tools]
    assert components.current_caller() is None or components.current_caller().framework != "autogen"


async def test_an_agent_of_autogen_core(events: Any, calls: Any) -> None:
    class Plain(RoutedAgent):
        @message_handler
        async def heard(self, message: TextMessage, ctx: MessageContext) -> TextMessage:
            said = await model(calls, "hello").create([])
            return TextMessage(content=str(said.content), source="greeter")

    runtime = SingleThreadedAgentRuntime()
    await Plain.register(runtime, "greeter", lambda: Plain("greets"))
    runtime.start()
    await runtime.send_message(TextMessage(content="hi", source="user"), AgentId("greeter", "default"))
    await runtime.stop_when_idle()
    assert paths(calls) == ["greeter"]


def solver(calls: list[Any], function: Any, arguments: str = "{}") -> AssistantAgent:
    tool = FunctionTool(function, "A tool.", name="tool")
    return AssistantAgent("solver", model(calls, use("tool", arguments=arguments)), tools=[tool])


async def test_what_a_tool_was_given_and_returned(events: Any, calls: Any) -> None:
    async def add(a: int, b: int) -> int:
        return a + b

    await solver(calls, add, '{"a": 1, "b": 2}').run(task="go")
    (event,) = events
    assert (event.name, event.status, event.call_id) == ("tool", "ok", "call-1")
    assert (event.arguments, event.output, event.error) == ({"a": 1, "b": 2}, "3", "")


async def test_a_tool_that_raises(events: Any, calls: Any) -> None:
    async def fail() -> int:
        raise KeyError("nothing")

    await solver(calls, fail).run(task="go")
    (event,) = events
    assert (event.status, event.error) == ("error", "KeyError: 'nothing'")


async def test_a_cancelled_tool_is_neither_good_nor_bad(events: Any, calls: Any) -> None:
    started = asyncio.Event()

    async def wait() -> int:
        started.set()
        await asyncio.sleep(60)
        return 1

    token = CancellationToken()
    running = asyncio.create_task(solver(calls, wait).run(task="go", cancellation_token=token))
    await started.wait()
    token.cancel()
    while not events:
        await asyncio.sleep(0)
    running.cancel()  # AutoGen goes on waiting for the tool that it has cancelled
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [(event.status, event.error) for event in events] == [("unknown", "")]


async def test_a_log_that_was_silenced_costs_only_the_result(events: Any, calls: Any, monkeypatch: Any) -> None:
    async def one() -> int:
        return 1

    monkeypatch.setattr(LOG, "level", logging.ERROR)
    LOG.manager._clear_cache()
    await solver(calls, one).run(task="go")
    LOG.manager._clear_cache()
    assert (events[0].status, events[0].output) == ("ok", "")


async def test_a_tool_that_autogen_does_not_log(events: Any, calls: Any) -> None:
    """As MCP's: they open a span, which closes alike whether their server answered well or that the tool failed."""

    class Quiet(FunctionTool):
        async def run_json(self, args: Any, cancellation_token: Any, call_id: str | None = None) -> Any:
            from autogen_core import trace_tool_span

            with trace_tool_span(self.name, tool_call_id=call_id):
                return 1

    async def one() -> int:
        return 1

    agent = AssistantAgent("solver", model(calls, use("quiet")), tools=[Quiet(one, "A tool.", name="quiet")])
    await agent.run(task="go")
    assert [(event.name, event.status, event.call_id) for event in events] == [("quiet", "unknown", "call-1")]


@pytest.mark.parametrize("level", [logging.NOTSET, logging.INFO, logging.WARNING], ids=logging.getLevelName)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
async def test_the_log_is_as_it_was(level: int, late: bool, calls: Any, monkeypatch: Any) -> None:
    """The user's handler gets what it gets without us, whenever they chose their level; afterwards nothing is left."""

    async def logged() -> list[str]:
        heard: list[str] = []
        handler = logging.Handler()
        monkeypatch.setattr(handler, "emit", lambda record: heard.append(type(record.msg).__name__))
        LOG.addHandler(handler)
        await agent_as_tool_run(calls)
        LOG.removeHandler(handler)
        return heard

    LOG.setLevel(level)
    without = await logged()
    if late:
        LOG.setLevel(logging.NOTSET)
    undo = lightning_autogen.adapter.lightning_install(lambda event: None)
    if late and level != logging.NOTSET:
        LOG.setLevel(level)
    assert await logged() == without
    undo()
    assert LOG.level == level
    assert LOG.filters == []
    LOG.setLevel(logging.NOTSET)
    assert ("ToolCallEvent" in without) == (level == logging.INFO)


async def agent_as_tool_run(calls: list[Any]) -> None:
    await (await agent_as_tool(calls)).run(task="go")


async def test_by_hand(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(components, "_asked", ())
    found: list[lightning.ToolEvent] = []
    undo = lightning_autogen.adapter.lightning_install(lambda event: None)  # a provider is set
    undo()
    handler = lightning_autogen.LightningHandler(found.append)
    trace.get_tracer_provider().add_span_processor(handler)  # type: ignore[attr-defined]
    await agent_as_tool_run(calls)
    assert paths(calls) == ["boss", "boss/helper", "boss"]
    assert [event.name for event in found] == ["helper"]
    reported: list[lightning.ToolEvent] = []
    undo = lightning_autogen.adapter.lightning_install(reported.append)
    await agent_as_tool_run(calls)
    undo()
    assert len(found) + len(reported) == 2
    handler.on_start = lambda *_, **__: None  # type: ignore[method-assign]  # it stays on the provider


@pytest.mark.parametrize("distribution", ["autogen-core", "opentelemetry-sdk"])
@pytest.mark.parametrize("version", ["0.7.1", "3.0"])
def test_versions_out_of_range(distribution: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"autogen-core": "0.7.5", "autogen-agentchat": "0.7.5", "opentelemetry-sdk": "1.45", distribution: version}
    monkeypatch.setattr("importlib.metadata.version", known.__getitem__)
    with pytest.raises(
        lightning.LightningError, match=rf"{distribution} {version} is installed.*pip install '{distribution}"
    ):
        lightning_autogen.adapter.lightning_install(print)
