"""Names and tool runs of real LangChain and LangGraph agents; only the model is made up: it notes who asks it."""

from __future__ import annotations

import asyncio
import contextvars
import importlib.metadata
import operator
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypedDict
from uuid import uuid4

import lightning
import lightning_langchain
import pytest
from langchain.agents import create_agent
from langchain_core.callbacks import BaseCallbackHandler, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel
from langchain_core.tools import BaseTool, InjectedToolCallId, ToolException, tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent
from langgraph.types import Command, Send, interrupt
from lightning.errors import PluginError
from lightning.instrument import ActiveAttempt, activate, current_caller, emit
from lightning.plugins import plugins
from lightning.testing import Reply, ToolCall, rollout
from lightning.types import LLM, Caller, Fault, Task
from lightning_langchain import LightningCallback, callback

LLM_ = LLM("http://127.0.0.1:1/v1", "key", "policy")
HI = {"messages": [("user", "hi")]}


class Model(BaseChatModel):
    """Calls each of `tools` once, with what it was told, then says `done`; `callers` says who asked, each time."""

    tools: tuple[str, ...] = ()
    fails: bool = False
    callers: list[Caller | None] = []  # noqa: RUF012 — pydantic copies it

    @property
    def _llm_type(self) -> str:
        return "recorder"

    def bind_tools(self, tools: Any, **_: Any) -> Runnable[Any, AIMessage]:
        return self

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        self.note()
        if self.fails:
            raise ConnectionError("the model is down")
        if self.tools and not isinstance(messages[-1], ToolMessage):
            text = str(messages[-1].content)
            calls = [
                {"name": name, "args": {"text": text}, "id": f"call-{name}-{index}"}
                for index, name in enumerate(self.tools)
            ]
            return ChatResult(generations=[ChatGeneration(message=AIMessage("", tool_calls=calls))])
        return ChatResult(generations=[ChatGeneration(message=AIMessage("done"))])

    async def _agenerate(self, messages: list[BaseMessage], *args: Any, **more: Any) -> ChatResult:
        await asyncio.sleep(0)
        return self._generate(messages)

    def note(self) -> None:
        caller = current_caller()
        self.callers.append(caller if caller and caller.framework == "langchain" else None)

    def paths(self) -> list[str | None]:
        return [caller and "/".join(caller.path) for caller in self.callers]


class Streamer(Model):
    """The same in words, one by one."""

    def _stream(self, messages: list[BaseMessage], *_: Any, **__: Any) -> Iterator[ChatGenerationChunk]:
        self.note()
        for word in ("not", "yet", "done"):
            yield ChatGenerationChunk(message=AIMessageChunk(word))


@tool
def shout(text: str) -> str:
    """Say it louder; not when it is bad."""
    if text == "bad":
        raise ValueError("bad text")
    return text.upper()


@tool
def refuse(text: str) -> str:
    """Refuse in the way LangChain hands to the model."""
    raise ToolException(f"not {text}")


refuse.handle_tool_error = True


def node_of(model: Runnable[Any, Any]) -> Callable[[MessagesState], MessagesState]:
    return lambda state: {"messages": [model.invoke(state["messages"])]}


def graph_of(name: str | None = None, **nodes: Any) -> Any:
    """Its nodes run one after the other."""
    graph = StateGraph(MessagesState)
    for node, action in nodes.items():
        graph.add_node(node, action)
    for first, second in zip([START, *nodes], nodes, strict=False):
        graph.add_edge(first, second)
    return graph.compile(name=name)


def boss_of(model: Model, *tools: BaseTool | Callable[..., Any]) -> Any:
    return create_agent(model, list(tools), name="boss")


@pytest.fixture
def session() -> Iterator[ActiveAttempt]:
    """A rollout with the adapter installed; when it ends nothing may be left."""
    undo = plugins().install_adapters(emit, ["langchain"])
    with activate(LLM_) as active:
        yield active
    undo()
    assert callback._runs == {}


def statuses(session: ActiveAttempt) -> list[tuple[str, str]]:
    return [(event.name, event.status) for event in session.tool_events]


# names -----------------------------------------------------------------------------------------------------------------
def chain(model: Model, name: str | None = None) -> Runnable[Any, Any]:
    made = ChatPromptTemplate.from_messages([("human", "{messages}")]) | model
    return made.with_config(run_name=name) if name else made


def in_component(name: str, agent: Any) -> Runnable[Any, Any]:
    def call(state: Any) -> Any:
        with lightning.component(name):
            return agent.invoke(state)

    return RunnableLambda(call)


class Rephrasing(BaseRetriever):
    """Asks a model for a better query, in the way LangChain's own retrievers do."""

    asks: Any
    fails: bool = False

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        found = self.asks.invoke(query, config={"callbacks": run_manager.get_child()})
        if self.fails:
            raise KeyError(query)
        return [Document(str(found.content))]


def retrieving(model: Model) -> Callable[[MessagesState], MessagesState]:
    return lambda state: {"messages": [page.page_content for page in Rephrasing(asks=model).invoke("hi")]}


def react(model: Model, **more: Any) -> Any:
    with warnings.catch_warnings(action="ignore"):  # LangGraph names its successor
        return create_react_agent(model, [shout], **more)


NAMED: dict[str, tuple[Callable[[Model], Any], list[str | None]]] = {
    "nodes": (lambda model: graph_of(write=node_of(model), check=node_of(model)), ["write", "check"]),
    "nodes of a named graph": (lambda model: graph_of("sql", write=node_of(model)), ["sql/write"]),
    "nodes called as create_agent calls its own": (lambda model: graph_of(model=node_of(model)), ["model"]),
    "an agent": (lambda model: create_agent(model, [], name="solver"), ["solver"]),
    "an agent without a name": (lambda model: create_agent(model, []), ["agent"]),
    "an agent as a node": (
        lambda model: graph_of(research=create_agent(model, [], name="solver")),
        ["research/solver"],
    ),
    "an agent as a node of its name": (
        lambda model: graph_of(solver=create_agent(model, [], name="solver")),
        ["solver"],
    ),
    "an agent without a name as a node": (lambda model: graph_of(research=create_agent(model, [])), ["research"]),
    "a deep agent": (
        lambda model: create_agent(model, []).with_config(metadata={"ls_integration": "deepagents"}),
        ["agent"],
    ),
    "a react agent": (lambda model: react(model, name="solver"), ["solver"]),
    "a react agent without a name": (lambda model: react(model), ["agent"]),
    "react agents under a supervisor": (
        lambda model: graph_of("team", supervisor=react(model, name="supervisor"), math=react(model), art=react(model)),
        ["team/supervisor", "team/math", "team/art"],
    ),
    "an agent in a node of langgraph-supervisor": (
        lambda model: graph_of(
            math=RunnableLambda(lambda _: react(model, name="math").invoke(HI) and {}, name="call_agent")
        ),
        ["math"],
    ),
    "a link called as langgraph-supervisor calls its own": (
        lambda model: (RunnableLambda(lambda _: HI["messages"]) | model).with_config(run_name="call_agent"),
        ["call_agent"],
    ),
    "nodes called as create_react_agent calls its own": (lambda model: graph_of(agent=node_of(model)), ["agent"]),
    "a model that is retried": (lambda model: graph_of(write=node_of(model.with_retry())), ["write"]),
    "a node of the model's class name": (lambda model: graph_of(Model=node_of(model)), ["Model"]),
    "a graph as a node": (lambda model: graph_of("sql", inner=graph_of(write=node_of(model))), ["sql/inner/write"]),
    "a chain": (lambda model: chain(model, "writer"), ["writer"]),
    "a chain in a node": (lambda model: graph_of(write=chain(model, "draft")), ["write/draft"]),
    "a chain without a name in a node": (lambda model: graph_of(write=chain(model)), ["write"]),
    "a chain of unnamed links": (lambda model: chain(model).with_retry().with_fallbacks([model]), [None]),
    "a model with a name": (lambda model: graph_of(write=node_of(model.with_config(run_name="m"))), ["write/m"]),
    "branches": (
        lambda model: RunnableParallel(a=chain(model, "a"), b=chain(model, "b")).with_config(run_name="both"),
        ["both/a", "both/b"],
    ),
    "a retriever in a node": (lambda model: graph_of("sql", retrieve=retrieving(model)), ["sql/retrieve"]),
    "a retriever alone in a component": (
        lambda model: in_component("search", RunnableLambda(lambda _: "hi") | Rephrasing(asks=model)),
        ["call/search"],
    ),
    "a component around": (lambda model: in_component("sql", graph_of(write=node_of(model))), ["call/sql/write"]),
    "a component inside": (lambda model: graph_of(write=in_component("draft", chain(model))), ["write/call/draft"]),
}


@pytest.mark.parametrize("case", NAMED)
async def test_a_caller_has_the_name_its_user_gave_it(case: str, session: ActiveAttempt) -> None:
    build, expected = NAMED[case]
    plain, awaited = Model(), Model()
    build(plain).invoke(HI)
    await build(awaited).ainvoke(HI)
    assert sorted(plain.paths(), key=str) == sorted(awaited.paths(), key=str) == sorted(expected, key=str)
    for caller in plain.callers:
        if caller is not None:
            assert (caller.agent, caller.framework) == (caller.path[-1], "langchain")
            assert caller.span_id


@pytest.mark.parametrize("status", ["success", "error"])
def test_a_tool_without_arguments_that_returns_a_command(status: str, session: ActiveAttempt) -> None:
    @tool
    def hand_over(tool_call_id: Annotated[str, InjectedToolCallId]) -> Command:
        """Hand over."""
        said = ToolMessage("moved", tool_call_id=tool_call_id, status=status)
        return Command(update={"messages": [said], "secret": "the whole state"})

    class Silent(Model):
        def _generate(self, *args: Any, **more: Any) -> ChatResult:
            result = super()._generate(*args, **more)
            for call in result.generations[0].message.tool_calls:
                call["args"] = {}
            return result

    boss_of(Silent(tools=("hand_over",)), hand_over).invoke(HI)
    (event,) = session.tool_events
    assert (event.status, event.output) == ("ok" if status == "success" else "error", "moved")
    assert event.call_id == "call-hand_over-0"


def test_a_tool_without_arguments_has_an_empty_object(session: ActiveAttempt) -> None:
    @tool
    def now() -> str:
        """Say the time."""
        return "12"

    now.invoke({"type": "tool_call", "name": "now", "args": {}, "id": "call-1"})
    assert [event.arguments for event in session.tool_events] == [{}]


@pytest.mark.parametrize(("name", "expected"), [("solver", "solver"), (None, "agent")])
def test_the_tools_of_a_react_agent_are_its_own(name: str | None, expected: str, session: ActiveAttempt) -> None:
    react(Model(tools=("shout",)), name=name).invoke(HI)
    assert [event.caller and event.caller.name for event in session.tool_events] == [expected]


def test_calls_of_one_node_differ_by_span_and_share_the_parent(session: ActiveAttempt) -> None:
    model = Model()
    graph_of(write=lambda state: {"messages": [model.invoke("a"), model.invoke("b")]}).invoke(HI)
    first, second = model.callers
    assert first.span_id != second.span_id
    assert first.parent_id == second.parent_id != ""


def test_a_model_in_plain_python_is_left_to_the_other_adapters(session: ActiveAttempt) -> None:
    model = Model()
    model.invoke("hi")
    assert model.callers == [None]


async def test_code_of_a_node_or_tool_that_asks_by_itself_is_named(session: ActiveAttempt) -> None:
    """A node may use a client of its own; so may a tool. A model call that has ended names nobody."""
    seen: list[Caller | None] = []
    model = Model(tools=("look",))

    @tool
    async def look(text: str) -> str:
        """Look."""
        seen.append(current_caller())
        return text

    async def write(state: MessagesState) -> MessagesState:
        seen.append(current_caller())
        await model.ainvoke("hi")
        seen.append(current_caller())
        return {"messages": []}

    await graph_of(write=write).ainvoke(HI)
    await boss_of(model, look).ainvoke(HI)
    assert [caller and caller.path for caller in seen] == [("write",), ("write",), ("boss", "look")]
    assert seen[0] == seen[1]
    assert current_caller() is None


# running side by side ---------------------------------------------------------------------------------------------------
async def test_agents_as_tools_in_parallel(session: ActiveAttempt) -> None:
    model = Model(tools=("ask_math", "ask_echo"))
    math, echo = Model(tools=("shout",)), Model()
    solver, echoer = create_agent(math, [shout], name="solver"), create_agent(echo, [], name="echo")

    @tool
    async def ask_math(text: str) -> str:
        """Ask."""
        return (await solver.ainvoke(HI))["messages"][-1].content

    @tool
    def ask_echo(text: str) -> str:
        """Ask."""
        return echoer.invoke(HI)["messages"][-1].content

    await boss_of(model, ask_math, ask_echo).ainvoke(HI)
    assert model.paths() == ["boss", "boss"]
    assert math.paths() == ["boss/ask_math/solver"] * 2
    assert echo.paths() == ["boss/ask_echo/echo"]
    assert {event.name: event.caller.path for event in session.tool_events} == {
        "shout": ("boss", "ask_math", "solver"),
        "ask_math": ("boss",),
        "ask_echo": ("boss",),
    }
    by_name = {event.name: event.call_id for event in session.tool_events}
    assert by_name["ask_math"] == "call-ask_math-0"
    assert by_name["ask_echo"] == "call-ask_echo-1"


def test_nodes_sent_out_in_parallel(session: ActiveAttempt) -> None:
    class State(TypedDict):
        said: Annotated[list[str], operator.add]

    model = Model()
    graph = StateGraph(State)
    graph.add_node("worker", lambda state: {"said": [model.invoke("x").content]})
    graph.add_conditional_edges(START, lambda state: [Send("worker", {"said": []}) for _ in range(5)], ["worker"])
    assert graph.compile(name="map").invoke({"said": []})["said"] == ["done"] * 5
    assert model.paths() == ["map/worker"] * 5
    assert len({caller.span_id for caller in model.callers}) == 5


def test_batches_and_threads(session: ActiveAttempt) -> None:
    model = Model()
    app = graph_of(write=node_of(model))
    app.batch([HI] * 4)
    with ThreadPoolExecutor(2) as pool:
        copied = contextvars.copy_context()
        pool.submit(copied.run, app.invoke, HI).result()
        pool.submit(app.invoke, HI).result()
    assert model.paths() == ["write"] * 6


def test_rollouts_side_by_side_do_not_mix() -> None:
    undo = plugins().install_adapters(emit, ["langchain"])

    async def one(number: int) -> tuple[list[str | None], list[str]]:
        model = Model(tools=("shout",))
        with activate(LLM_) as active:
            await create_agent(model, [shout], name=f"agent{number}").ainvoke({"messages": [("user", f"text{number}")]})
        return model.paths(), [event.output for event in active.tool_events]

    async def all_of_them() -> list[tuple[list[str | None], list[str]]]:
        return await asyncio.gather(*map(one, range(8)))

    try:
        found = asyncio.run(all_of_them())
    finally:
        undo()
    assert found == [([f"agent{number}"] * 2, [f"TEXT{number}"]) for number in range(8)]
    assert callback._runs == {}


async def test_streams_are_named_like_plain_calls(session: ActiveAttempt) -> None:
    model = Streamer()
    app = graph_of(write=node_of(model))
    assert "".join(chunk.content for chunk, _ in app.stream(HI, stream_mode="messages")) == "notyetdone"
    assert [chunk.content async for chunk in chain(model, "w").astream(HI)][:3] == ["not", "yet", "done"]
    async for _ in app.astream_events(HI, version="v2"):
        pass
    assert model.paths() == ["write", "w", "write"]


# tools ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("awaited", [False, True])
async def test_tool_runs_carry_their_call_arguments_and_status(awaited: bool, session: ActiveAttempt) -> None:
    tools = ToolNode([shout, refuse], handle_tool_errors=True)
    app = graph_of("sql", write=node_of(Model(tools=("shout", "refuse"))), tools=tools)
    for text in ("good", "bad"):
        asked = {"messages": [("user", text)]}
        await app.ainvoke(asked) if awaited else app.invoke(asked)
    found = sorted(session.tool_events, key=lambda event: (event.arguments["text"], event.name))
    bad_refuse, bad_shout, good_refuse, good_shout = found
    assert (good_shout.status, good_shout.output, good_shout.error) == ("ok", "GOOD", "")
    assert (good_shout.call_id, good_shout.arguments) == ("call-shout-0", {"text": "good"})
    assert good_shout.caller.path == ("sql", "tools")
    assert (good_refuse.status, good_refuse.call_id, good_refuse.error) == ("error", "call-refuse-1", "not good")
    assert (bad_shout.status, bad_shout.call_id) == ("error", "call-shout-0")
    assert "bad text" in bad_shout.error
    assert bad_refuse.status == "error"


def test_arguments_that_do_not_fit_are_an_error(session: ActiveAttempt) -> None:
    call = {"name": "shout", "args": {"wrong": 1}, "id": "c", "type": "tool_call"}
    with pytest.raises(ValueError, match="text"):
        shout.invoke(call)
    (event,) = session.tool_events
    assert (event.status, event.call_id, event.arguments) == ("error", "c", {"wrong": 1})


def test_a_tool_that_waits_for_a_human_has_not_failed(session: ActiveAttempt) -> None:
    @tool
    def confirm(text: str) -> str:
        """Ask a human."""
        return str(interrupt("may I?"))

    agent = create_agent(Model(tools=("confirm",)), [confirm], checkpointer=InMemorySaver())
    thread = {"configurable": {"thread_id": "1"}}
    agent.invoke(HI, thread)
    assert statuses(session) == [("confirm", "unknown")]
    agent.invoke(Command(resume="yes"), thread)
    assert [(event.status, event.output) for event in session.tool_events] == [("ok", "yes")]


# failures ---------------------------------------------------------------------------------------------------------------
async def test_nothing_is_left_after_failures(session: ActiveAttempt) -> None:
    with pytest.raises(ConnectionError):
        boss_of(Model(fails=True)).invoke(HI)
    with pytest.raises(ValueError, match="bad text"):
        await boss_of(Model(tools=("shout",)), shout).ainvoke({"messages": [("user", "bad")]})
    assert callback._runs == {}
    assert statuses(session) == [("shout", "error")]


async def test_a_retriever_that_fails_is_forgotten(session: ActiveAttempt) -> None:
    model = Model()
    retriever = Rephrasing(asks=model, fails=True)
    with lightning.component("search"):
        with pytest.raises(KeyError):
            retriever.invoke("hi")
        with pytest.raises(KeyError):
            await retriever.ainvoke("hi")
    assert callback._runs == {}
    assert model.paths() == ["search"] * 2


async def test_a_cancelled_tool_is_reported_as_unknown_and_forgotten(session: ActiveAttempt) -> None:
    started = asyncio.Event()

    @tool
    async def wait(text: str) -> str:
        """Wait for ever."""
        started.set()
        await asyncio.Event().wait()
        return text

    running = asyncio.create_task(boss_of(Model(tools=("wait",)), wait).ainvoke(HI))
    await started.wait()
    assert callback._runs
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert callback._runs == {}
    assert statuses(session) == [("wait", "unknown")]


async def test_an_abandoned_stream_leaves_nothing(session: ActiveAttempt) -> None:
    stream: AsyncIterator[Any] = graph_of(a=node_of(Streamer()), b=node_of(Streamer())).astream(HI)
    await anext(stream)
    await stream.aclose()
    assert callback._runs == {}


async def test_what_never_ends_is_bounded(monkeypatch: pytest.MonkeyPatch, session: ActiveAttempt) -> None:
    monkeypatch.setattr(callback, "MAX_RUNS", 10)
    handler, model = LightningCallback(), Model()
    for _ in range(30):
        handler.on_tool_start({"name": "lost"}, "", run_id=uuid4(), parent_run_id=None)
    assert len(callback._runs) == 10
    graph_of(write=node_of(model)).invoke(HI)
    assert model.paths() == ["write"], "the youngest are kept"
    callback._runs.clear()


# by hand, and gone --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("installed", [False, True])
def test_by_hand_reports_once_whether_the_adapter_is_installed_or_not(installed: bool) -> None:
    undo = plugins().install_adapters(emit, ["langchain"] if installed else [])
    model = Model(tools=("shout",))
    heard: list[str] = []

    class Users(BaseCallbackHandler):
        def on_tool_end(self, output: Any, **_: Any) -> None:
            heard.append(str(output.content))

    with activate(LLM_) as session:
        config = {"callbacks": [Users(), LightningCallback(), LightningCallback()]}
        create_agent(model, [shout], name="solver").invoke(HI, config)
    undo()
    assert model.paths() == ["solver", "solver"]
    assert [(event.name, event.status, event.call_id) for event in session.tool_events] == [
        ("shout", "ok", "call-shout-0")
    ]
    assert heard == ["HI"]
    assert callback._runs == {}


def test_after_the_undo_langchain_is_as_before() -> None:
    model, events = Model(tools=("shout",)), list[lightning.ToolEvent]()
    agent = create_agent(model, [shout], name="solver")
    first = lightning_langchain.adapter.lightning_install(events.append)
    second = lightning_langchain.adapter.lightning_install(emit)
    second()
    agent.invoke(HI)
    assert [event.name for event in events] == ["shout"], "what is left installed still hears"
    first()
    model.callers.clear()
    agent.invoke(HI)
    assert len(events) == 1
    assert model.callers == [None, None]


@pytest.mark.parametrize(
    ("name", "version"), [("langchain-core", "1.1.9"), ("langchain-core", "2.0"), ("langgraph", "1.0")]
)
def test_a_version_out_of_range_is_refused_with_the_cure(
    name: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda asked: version if asked == name else real(asked))
    low, high = lightning_langchain.SUPPORTED[name]
    with pytest.raises(PluginError, match=rf"{name} {version} is installed.*pip install '{name}>={low},<{high}'"):
        lightning_langchain.adapter.lightning_install(emit)
    model = Model()
    graph_of(write=node_of(model)).invoke(HI)
    assert model.callers == [None]


def test_what_a_node_is_called_with_is_a_state_of_the_next_call(session: ActiveAttempt) -> None:
    class State(MessagesState):
        turn: int
        board: list[int]

    def play(state: State) -> dict[str, Any]:
        session.calls.add(f"call-{state['turn']}", "game/play")
        return {"turn": state["turn"] + 1, "board": [*state["board"], state["turn"]]}

    graph = StateGraph(State)
    graph.add_node("play", play)
    graph.add_edge(START, "play")
    graph.add_conditional_edges("play", lambda state: "play" if state["turn"] < 2 else "__end__")
    graph.compile(name="game").invoke({**HI, "turn": 0, "board": []}, config={"callbacks": [LightningCallback()]})
    assert [(state.name, state.values, state.response_id) for state in session.step_states] == [
        ("game/play", {"messages": "1 messages", "turn": 0, "board": []}, "call-0"),
        ("game/play", {"messages": "1 messages", "turn": 1, "board": [0]}, "call-1"),
    ]


def test_a_graph_of_messages_alone_tells_no_states_and_a_large_state_is_cut(session: ActiveAttempt) -> None:
    class Large(TypedDict):
        text: str

    graph_of(write=node_of(Model())).invoke(HI)
    assert session.step_states == ()
    graph = StateGraph(Large)
    graph.add_node("read", lambda state: {"text": ""})
    graph.add_edge(START, "read")
    graph.compile().invoke({"text": "x" * 1_000_000})
    (state,) = session.step_states
    assert (state.name, state.response_id) == ("read", "")
    assert isinstance(state.values, str)
    assert len(state.values) == 4096


def chat(llm: LLM) -> ChatOpenAI:
    return ChatOpenAI(model=llm.model, base_url=llm.base_url, api_key=llm.api_key)


def test_a_tool_that_raises_ends_the_rollout_as_it_ends_the_agent() -> None:
    def solve(task: Task, llm: LLM) -> float:
        create_agent(chat(llm), [shout], name="solver").invoke(HI)
        return 1.0

    record = rollout(solve, "hi", [Reply("", tool_calls=[ToolCall("shout", '{"text": "bad"}', "call-1")])])
    assert (record.rollout.reward, record.rollout.fault) == (None, Fault.AGENT)
    assert "ValueError: bad text" in record.rollout.error
    (event,) = record.tool_events
    assert (event.name, event.status, event.kind, event.call_id) == ("shout", "error", "", "call-1")


async def test_calls_of_a_batch_are_those_of_the_function_that_makes_it() -> None:
    async def writer(llm: LLM) -> None:
        await chat(llm).abatch(["a", "b"])

    def planner(llm: LLM) -> None:
        chat(llm).batch(["a", "b"])

    async def solve(task: Task, llm: LLM) -> float:
        planner(llm)
        await writer(llm)
        return 1.0

    record = rollout(solve, "hi", ["1", "2", "3", "4"])
    assert [call.caller.agent for call in record.transitions] == ["planner", "planner", "writer", "writer"]
