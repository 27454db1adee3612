"""Names and tool runs of real LlamaIndex agents, workflows and query engines; only what the model says is made up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import lightning
import lightning_llama_index
import pytest
from lightning.instrument import ActiveAttempt, activate, emit, install_tap
from lightning.plugins import plugins
from lightning.types import LLM
from lightning_llama_index.spans import steps
from llama_index.core import Document, MockEmbedding, PromptTemplate, VectorStoreIndex
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.postprocessor import LLMRerank
from llama_index.core.query_engine import CustomQueryEngine, RouterQueryEngine
from llama_index.core.selectors import LLMSingleSelector
from llama_index.core.tools import BaseTool, FunctionTool, QueryEngineTool, ToolMetadata, ToolOutput
from llama_index.core.workflow import (
    Context,
    Event,
    HumanResponseEvent,
    InputRequiredEvent,
    StartEvent,
    StopEvent,
    Workflow,
    step,
)
from llama_index.llms.openai_like import OpenAILike
from llama_index_instrumentation import get_dispatcher, root_dispatcher
from pydantic import BaseModel

from tests.adapters import scripted_model
from tests.adapters.scripted_model import URL, Say

# LlamaIndex looks at all attributes of its own agents, also at those that pydantic has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")

LLM_ = LLM(URL, "key", "policy")


class Scripted(scripted_model.Scripted):
    """What it says goes through LlamaIndex's own client of OpenAI-like servers."""

    def __init__(self, answer: list[Say] | Callable[[Mapping[str, Any]], Say]) -> None:
        super().__init__("llama-index", answer)

    def llm(self, **options: Any) -> OpenAILike:
        options = {"is_chat_model": True, "is_function_calling_model": True, **options}
        clients = {"http_client": self.client, "async_http_client": self.async_client}
        return OpenAILike("policy", api_base=URL, api_key="key", **clients, **options)


@pytest.fixture(autouse=True)
def _adapter() -> Iterator[None]:
    """The tap and the adapter; when they are gone nothing may be left."""
    handlers = list(root_dispatcher.span_handlers)
    undo = [install_tap(), plugins().install_adapters(emit, ["llama-index"])]
    yield
    for each in reversed(undo):
        each()
    assert root_dispatcher.span_handlers == handlers
    assert dict(steps.open) == {}


@pytest.fixture
def session() -> Iterator[ActiveAttempt]:
    with activate(LLM_) as active:
        yield active


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def fail() -> str:
    """Fail."""
    raise KeyError("nothing")


def agent(model: Scripted, name: str = "solver", *tools: Any, **more: Any) -> FunctionAgent:
    return FunctionAgent(name=name, description=name, tools=list(tools), llm=model.llm(), **more)


def index() -> VectorStoreIndex:
    return VectorStoreIndex.from_documents([Document(text="The sea is wide.")], embed_model=MockEmbedding(embed_dim=4))


def engine(model: Scripted, **more: Any) -> Any:
    return index().as_query_engine(llm=model.llm(), **more)


def docs(model: Scripted) -> QueryEngineTool:
    return QueryEngineTool.from_defaults(engine(model), name="docs", description="Documents.")


def uses(tool: str, **arguments: Any) -> Callable[[Mapping[str, Any]], Say]:
    """Whoever has this tool calls it once, then answers."""

    def answer(body: Mapping[str, Any]) -> Say:
        offered = [each["function"]["name"] for each in body.get("tools") or ()]
        return {tool: arguments} if tool in offered and body["messages"][-1]["role"] != "tool" else "done"

    return answer


async def run(workflow: Workflow, text: str = "hi", **more: Any) -> str:
    return str(await workflow.run(user_msg=text, **more))


# agents ----------------------------------------------------------------------------------------------------------------
async def an_agent(model: Scripted) -> None:
    await run(agent(model))


async def an_agent_that_is_not_streamed(model: Scripted) -> None:
    await run(agent(model, streaming=False))


async def an_agent_without_a_name(model: Scripted) -> None:
    await run(FunctionAgent(llm=model.llm()))


async def an_agent_of_tools(model: Scripted) -> None:
    await run(AgentWorkflow.from_tools_or_functions([add], llm=model.llm()))


async def a_react_agent(model: Scripted) -> None:
    await run(ReActAgent(name="react", llm=model.llm(is_function_calling_model=False)))


async def a_handoff(model: Scripted) -> None:
    said = iter([{"handoff": {"to_agent": "checker", "reason": "It is written."}}, "checked"])
    model.answer = lambda _: next(said)
    await run(AgentWorkflow([agent(model, "writer"), agent(model, "checker")], root_agent="writer"))


class Answer(BaseModel):
    """An answer."""

    number: int


async def an_answer_of_a_class(model: Scripted) -> None:
    said: Iterator[Say] = iter(["It is 3.", {"Answer": {"number": 3}}])
    model.answer = lambda _: next(said)
    result = await agent(model, output_cls=Answer).run("hi")
    assert result.structured_response == {"number": 3}


async def an_early_stop(model: Scripted) -> None:
    said: Iterator[Say] = iter([{"add": {"a": 1, "b": 2}}, "stopped"])
    model.answer = lambda _: next(said)
    await run(agent(model, "solver", add, early_stopping_method="generate"), max_iterations=1)


# workflows -------------------------------------------------------------------------------------------------------------
class Joke(Event):
    joke: str


class JokeFlow(Workflow):
    """As LlamaIndex's documentation has it."""

    def __init__(self, llm: Any, **more: Any) -> None:
        super().__init__(**more)
        self.llm = llm

    @step
    async def generate_joke(self, ev: StartEvent) -> Joke:
        return Joke(joke=str(await self.llm.acomplete("Write a joke.")))

    @step
    async def critique_joke(self, ev: Joke) -> StopEvent:
        return StopEvent(result=str(await self.llm.acomplete(f"Criticise: {ev.joke}")))


class Outer(Workflow):
    def __init__(self, inner: Workflow) -> None:
        super().__init__()
        self.inner = inner

    @step
    async def call(self, ev: StartEvent) -> StopEvent:
        return StopEvent(result=str(await self.inner.run(user_msg="hi")))


class Threaded(Workflow):
    """Its step is no coroutine, and runs in a thread."""

    def __init__(self, llm: Any) -> None:
        super().__init__()
        self.llm = llm

    @step
    def ask(self, ev: StartEvent) -> StopEvent:
        return StopEvent(result=str(self.llm.complete("hi")))


async def a_workflow(model: Scripted) -> None:
    await run(JokeFlow(model.llm()))


async def a_workflow_with_a_name(model: Scripted) -> None:
    await run(JokeFlow(model.llm(), workflow_name="jokes"))


async def an_agent_in_a_workflow(model: Scripted) -> None:
    await run(Outer(agent(model)))


async def a_workflow_in_a_workflow(model: Scripted) -> None:
    await run(Outer(JokeFlow(model.llm())))


async def a_step_in_a_thread(model: Scripted) -> None:
    await run(Threaded(model.llm()))


# query engines and chat engines ----------------------------------------------------------------------------------------
async def a_query_engine(model: Scripted) -> None:
    await engine(model).aquery("hi")


async def a_query_engine_that_blocks(model: Scripted) -> None:
    engine(model, response_mode="tree_summarize").query("hi")


async def a_router(model: Scripted) -> None:
    said = iter(['[{"choice": 1, "reason": "The only one."}]', "wide"])
    model.answer = lambda _: next(said)
    selector = LLMSingleSelector.from_defaults(llm=model.llm())
    RouterQueryEngine(selector, [docs(model)], llm=model.llm()).query("hi")


async def a_reranker(model: Scripted) -> None:
    said = iter(["Doc: 1, Relevance: 7", "wide"])
    model.answer = lambda _: next(said)
    engine(model, node_postprocessors=[LLMRerank(llm=model.llm())]).query("hi")


class Own(CustomQueryEngine):
    """A user's own query engine."""

    llm: Any

    def custom_query(self, query_str: str) -> str:
        return str(self.llm.complete(query_str))


async def a_query_engine_of_the_users(model: Scripted) -> None:
    Own(llm=model.llm()).query("hi")


async def a_chat_engine(model: Scripted) -> None:
    chat = index().as_chat_engine(chat_mode="condense_plus_context", llm=model.llm())
    await chat.achat("hi")
    await chat.achat("again")


async def a_streamed_query(model: Scripted) -> None:
    response = engine(model, streaming=True).query("hi")
    for _ in response.response_gen:
        model.ask()  # between the items it is the consumer who calls
    model.ask()


async def a_streamed_query_that_waits(model: Scripted) -> None:
    response = await engine(model, streaming=True).aquery("hi")
    async for _ in response.async_response_gen():
        model.ask()


async def a_streamed_query_beside_an_agent(model: Scripted) -> None:
    """While a part of an answer is awaited, another task's agent has its own name."""
    response = await engine(model, streaming=True).aquery("hi")
    ready, asked = asyncio.Event(), asyncio.Event()

    async def look() -> str:
        """Look it up, once the query has been sent."""
        ready.set()
        await asked.wait()
        model.ask()
        return "wide"

    async def wait_for_the_other() -> None:
        if ready.is_set() and not asked.is_set():
            asked.set()
            await other

    other = asyncio.create_task(run(agent(model, "writer", look)))
    model.answer, model.pause = uses("look"), wait_for_the_other
    await ready.wait()
    assert "".join([part async for part in response.async_response_gen()]) == "done"


async def a_streamed_chat(model: Scripted) -> None:
    for _ in index().as_chat_engine(chat_mode="context", llm=model.llm()).stream_chat("hi").response_gen:
        pass


# tools that ask a model ------------------------------------------------------------------------------------------------
async def a_query_engine_as_a_tool(model: Scripted) -> None:
    model.answer = uses("docs", input="hi")
    await run(agent(model, "boss", docs(model)))


async def an_agent_as_a_tool(model: Scripted) -> None:
    model.answer = uses("ask", text="hi")
    solver = agent(model)

    async def ask(text: str) -> str:
        """Ask the solver."""
        return str(await solver.run(text))

    await run(agent(model, "boss", ask))


async def a_tool_in_a_thread(model: Scripted) -> None:
    model.answer = uses("look", text="hi")

    def look(text: str) -> str:
        """Look it up."""
        model.ask()  # LlamaIndex runs such a tool in a thread, without its context
        return str(engine(model).query(text))

    await run(agent(model, "boss", look))


async def a_tool_in_a_component(model: Scripted) -> None:
    model.answer = uses("look")

    async def look() -> str:
        """Look it up."""
        with lightning.component("expert"):
            return str(await model.llm().acomplete("hi"))

    with lightning.component("team"):
        await run(agent(model, "boss", look))


async def a_model_alone(model: Scripted) -> None:
    await model.llm().acomplete("hi")
    with lightning.component("writer"):
        await model.llm().acomplete("hi")


ENGINE = "RetrieverQueryEngine/CompactAndRefine"
NAMED: dict[Callable[[Scripted], Awaitable[None]], list[str | None]] = {
    an_agent: ["solver"],
    an_agent_that_is_not_streamed: ["solver"],
    an_agent_without_a_name: ["Agent"],
    an_agent_of_tools: ["Agent"],
    a_react_agent: ["react"],
    a_handoff: ["writer", "checker"],
    an_answer_of_a_class: ["solver", "solver"],
    an_early_stop: ["solver", "solver"],
    a_workflow: ["JokeFlow/generate_joke", "JokeFlow/critique_joke"],
    a_workflow_with_a_name: ["jokes/generate_joke", "jokes/critique_joke"],
    an_agent_in_a_workflow: ["Outer/call/solver"],
    a_workflow_in_a_workflow: ["Outer/call/JokeFlow/generate_joke", "Outer/call/JokeFlow/critique_joke"],
    a_step_in_a_thread: ["Threaded/ask"],
    a_query_engine: [ENGINE],
    a_query_engine_that_blocks: ["RetrieverQueryEngine/TreeSummarize"],
    a_router: ["RouterQueryEngine/LLMSingleSelector", f"RouterQueryEngine/{ENGINE}"],
    a_reranker: ["RetrieverQueryEngine/LLMRerank", ENGINE],
    a_query_engine_of_the_users: ["Own"],
    a_chat_engine: [
        "CondensePlusContextChatEngine/CompactAndRefine",
        "CondensePlusContextChatEngine",
        "CondensePlusContextChatEngine/CompactAndRefine",
    ],
    a_streamed_query: [ENGINE, None, None],
    a_streamed_query_that_waits: [ENGINE, None],
    a_streamed_query_beside_an_agent: ["writer", ENGINE, "writer/look", "writer"],
    a_streamed_chat: ["ContextChatEngine/CompactAndRefine"],
    a_query_engine_as_a_tool: ["boss", f"boss/docs/{ENGINE}", "boss"],
    an_agent_as_a_tool: ["boss", "boss/ask/solver", "boss"],
    a_tool_in_a_thread: ["boss", "boss/look", f"boss/look/{ENGINE}", "boss"],
    a_tool_in_a_component: ["team/boss", "team/boss/look/expert", "team/boss"],
    a_model_alone: [None, "writer"],
}


@pytest.mark.parametrize("name", NAMED, ids=lambda function: function.__name__)
async def test_names(name: Callable[[Scripted], Awaitable[None]], session: ActiveAttempt) -> None:
    model = Scripted(lambda body: "Thought: I know.\nAnswer: done")
    await name(model)
    assert model.paths() == NAMED[name]
    assert plugins().identify() is None
    spans = [caller.span_id for caller in model.callers if caller and caller.span_id]
    assert len(set(spans)) == len(spans)


async def test_code_of_a_tool_has_no_span() -> None:
    """Another framework's agent may be calling there."""
    model = Scripted(uses("look", text="hi"))
    with activate(LLM_):
        await a_tool_in_a_thread(model)
    _, raw, _, _ = model.callers
    assert [bool(caller and caller.span_id) for caller in model.callers] == [True, False, True, True]
    assert raw is not None
    assert raw.parent_id


async def test_a_call_that_is_made_for_a_part_of_an_answer_has_its_span(session: ActiveAttempt) -> None:
    model = Scripted(lambda body: "done")
    dispatcher = get_dispatcher()

    class Parts(Workflow):
        @step
        def ask(self, ev: StartEvent) -> StopEvent:
            lazy = dispatcher.span(lambda: (str(model.llm().complete(word)) for word in ("a", "b")))
            return StopEvent(result=" ".join(lazy()))

    assert await run(Parts()) == "done done"
    assert model.paths() == ["Parts/ask", "Parts/ask"]
    assert len({caller.span_id for caller in model.callers if caller and caller.span_id}) == 2


# tools -----------------------------------------------------------------------------------------------------------------
def told(session: ActiveAttempt) -> list[tuple[str, str, str, str]]:
    return [(event.name, event.status, event.call_id, event.output or event.error) for event in session.tool_events]


async def test_a_tool_that_worked(session: ActiveAttempt) -> None:
    await run(agent(Scripted(uses("add", a=1, b=2)), "solver", add))
    (event,) = session.tool_events
    assert (event.name, event.status, event.call_id, event.output) == ("add", "ok", "call-add", "3")
    assert event.arguments == {"a": 1, "b": 2}
    assert event.caller is not None
    assert event.caller.path == ("solver",)


async def test_a_tool_that_raised(session: ActiveAttempt) -> None:
    await run(agent(Scripted(uses("fail")), "solver", fail))
    assert told(session) == [("fail", "error", "call-fail", "KeyError('nothing')")]


async def test_a_tool_that_says_that_it_failed(session: ActiveAttempt) -> None:
    class Refusing(BaseTool):
        metadata = ToolMetadata("Refuses.", name="refuse")

        def __call__(self, input: Any) -> ToolOutput:  # noqa: A002 — LlamaIndex's name
            return ToolOutput(tool_name="refuse", content="not now", raw_input={}, raw_output=None, is_error=True)

    await run(agent(Scripted(uses("refuse", input="hi")), "solver", Refusing()))
    assert told(session) == [("refuse", "error", "call-refuse", "not now")]


async def test_a_tool_that_there_is_not(session: ActiveAttempt) -> None:
    """LlamaIndex says so to the model; nothing has run."""
    await run(agent(Scripted([{"invented": {}}, "sorry"]), "solver", add))
    assert session.tool_events == ()


async def test_tools_at_the_same_time(session: ActiveAttempt) -> None:
    await run(agent(Scripted([{"add": {"a": 1, "b": 2}, "fail": {}}, "done"]), "solver", add, fail))
    assert sorted(told(session)) == [
        ("add", "ok", "call-add", "3"),
        ("fail", "error", "call-fail", "KeyError('nothing')"),
    ]


async def test_a_handoff_is_a_tool_of_who_hands_over(session: ActiveAttempt) -> None:
    await a_handoff(Scripted([]))
    (event,) = session.tool_events
    assert (event.name, event.status, event.call_id) == ("handoff", "ok", "call-handoff")
    assert event.caller is not None
    assert event.caller.path == ("writer",)


async def test_a_react_agents_call_ids_are_not_the_models(session: ActiveAttempt) -> None:
    acts = 'Thought: I add.\nAction: add\nAction Input: {"a": 1, "b": 2}'
    model = Scripted([acts, "Thought: I can answer without using any more tools.\nAnswer: 3"])
    await run(ReActAgent(name="react", tools=[add], llm=model.llm(is_function_calling_model=False)))
    assert told(session) == [("add", "ok", "", "3")]


async def test_tools_that_no_agent_calls(session: ActiveAttempt) -> None:
    Scripted([{"add": {"a": 1, "b": 2}}]).llm().predict_and_call([FunctionTool.from_defaults(add)], "hi")
    failing = FunctionTool.from_defaults(fail)
    with pytest.raises(KeyError):
        failing()
    assert told(session) == [("add", "ok", "", "3"), ("fail", "error", "", "KeyError('nothing')")]
    assert session.tool_events[0].arguments == {"a": 1, "b": 2}


async def test_a_tool_that_waits_for_a_human(session: ActiveAttempt) -> None:
    """LlamaIndex runs it again once the human has answered."""

    async def confirm(ctx: Context) -> str:
        """Ask whether to go on."""
        said = await ctx.wait_for_event(HumanResponseEvent, waiter_event=InputRequiredEvent(prefix="Go on?"))
        return str(said.response)

    confirm.__annotations__["ctx"] = Context  # LlamaIndex does not resolve the name
    handler = agent(Scripted(uses("confirm")), "solver", confirm).run("hi")
    async for event in handler.stream_events():
        if isinstance(event, InputRequiredEvent):
            handler.ctx.send_event(HumanResponseEvent(response="yes"))
    await handler
    assert told(session) == [("confirm", "ok", "call-confirm", "yes")]


async def test_a_cancelled_tool_is_neither_good_nor_bad(session: ActiveAttempt) -> None:
    started = asyncio.Event()

    async def wait() -> str:
        """Wait."""
        started.set()
        await asyncio.sleep(60)
        return "late"

    handler = agent(Scripted(uses("wait")), "solver", wait).run("hi")
    await started.wait()
    await handler.cancel_run()
    assert told(session) == [("wait", "unknown", "call-wait", "")]


async def test_rollouts_at_the_same_time(session: ActiveAttempt) -> None:
    async def rollout(name: str) -> tuple[list[str | None], list[str]]:
        model = Scripted(uses("add", a=1, b=2))
        with activate(LLM(URL, name, "policy")) as own:
            await run(agent(model, name, add))
        return model.paths(), [event.caller.agent for event in own.tool_events if event.caller]

    found = await asyncio.gather(*(rollout(f"agent-{number}") for number in range(6)))
    assert found == [([f"agent-{number}"] * 2, [f"agent-{number}"]) for number in range(6)]
    assert session.tool_events == ()


def test_installed_twice_a_run_is_reported_once() -> None:
    first: list[Any] = []
    second: list[Any] = []
    undo = [lightning_llama_index.adapter.lightning_install(each.append) for each in (first, second)]
    FunctionTool.from_defaults(add)(a=1, b=2)
    for each in undo:
        each()
    assert ([event.name for event in first], [event.name for event in second]) == ([], ["add"])


# faults and versions ---------------------------------------------------------------------------------------------------
def selecting(said: str) -> Any:
    return LLMSingleSelector.from_defaults(llm=Scripted([said]).llm()).aselect([ToolMetadata("Documents.")], "hi")


def structured(said: Say, function_calling: bool) -> Any:
    llm = Scripted([said]).llm(is_function_calling_model=function_calling)
    return llm.astructured_predict(Answer, PromptTemplate("hi"))


FAULTS: dict[str, tuple[Callable[[], Any], str | None]] = {
    "an agent that does not end": (
        lambda: run(agent(Scripted(lambda _: {"add": {"a": 1, "b": 2}}), "solver", add), max_iterations=2),
        "max_turns",
    ),
    "a team that does not end": (
        lambda: run(
            AgentWorkflow([agent(Scripted(lambda _: {"add": {"a": 1, "b": 2}}), "solver", add)]), max_iterations=2
        ),
        "max_turns",
    ),
    "no choice of a selector": (lambda: selecting("none of them"), "malformed_output"),
    "a broken choice of a selector": (lambda: selecting("[{'choice': 1, '"), "malformed_output"),
    "an answer that calls no tool": (lambda: structured("three", True), "malformed_output"),
    "an answer without JSON": (lambda: structured("three", False), "malformed_output"),
    "a step of the user's that is wrong": (lambda: run(Wrong()), None),
}


class Wrong(Workflow):
    @step
    async def go(self, ev: StartEvent) -> StopEvent:
        return "no event"  # type: ignore[return-value]


@pytest.mark.parametrize("case", FAULTS)
async def test_policy_faults(case: str) -> None:
    work, fault = FAULTS[case]
    with pytest.raises(Exception) as caught:
        await work()
    assert lightning_llama_index.adapter.lightning_policy_fault(caught.value) == fault, repr(caught.value)


@pytest.mark.parametrize(
    ("distribution", "version"),
    [("llama-index-core", "0.13.6"), ("llama-index-core", "0.15.0"), ("llama-index-workflows", "2.14")],
)
def test_versions_out_of_range(distribution: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"llama-index-core": "0.14.25", "llama-index-workflows": "2.26.1", distribution: version}
    monkeypatch.setattr("importlib.metadata.version", known.__getitem__)
    with pytest.raises(
        lightning.LightningError, match=rf"{distribution} {version} is installed.*pip install '{distribution}"
    ):
        lightning_llama_index.adapter.lightning_install(print)
