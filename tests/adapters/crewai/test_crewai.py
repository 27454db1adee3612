"""Names and tool runs of real CrewAI crews, agents and flows; only what the model says is made up."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import crewai
import httpx
import lightning
import lightning_crewai
import openai
import pytest
from crewai import Agent, Crew, Flow, PlanningConfig, Process, Task
from crewai.events import ToolUsageFinishedEvent, crewai_event_bus
from crewai.events.event_bus import CrewAIEventsBus
from crewai.flow.flow import listen, start
from crewai.hooks import register_before_tool_call_hook, unregister_before_tool_call_hook
from crewai.llms.providers.openai.completion import OpenAICompletion
from crewai.memory.unified_memory import Memory
from crewai.tools import BaseTool, tool
from crewai.tools.tool_usage import ToolUsage
from lightning.instrument import ActiveAttempt, Installations, activate, emit, install_tap
from lightning.plugins import plugins
from lightning.types import LLM
from lightning_crewai import methods
from pydantic import BaseModel

from tests.adapters import scripted_model
from tests.adapters.scripted_model import URL, Say

# CrewAI reads its own deprecated attributes.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LLM_ = LLM(URL, "key", "policy")
WATCHED = (
    (Agent, "execute_task"),
    (Agent, "aexecute_task"),
    (Agent, "kickoff"),
    (Agent, "kickoff_async"),
    (Task, "_execute_core"),
    (Flow.__mro__[2], "_execute_method"),
    (CrewAIEventsBus, "emit"),
)


class Scripted(scripted_model.Scripted):
    """What it says goes through CrewAI's own client of OpenAI."""

    def __init__(self, answer: list[Say] | Callable[[Mapping[str, Any]], Say]) -> None:
        super().__init__("crewai", answer)

    def llm(self, kind: Callable[..., Any] | None = None, **options: Any) -> Any:
        made = kind(model="policy", base_url=URL, api_key="key", **options) if kind else None
        made = made or crewai.LLM(model="openai/policy", base_url=URL, api_key="key", **options)
        made._client = openai.OpenAI(base_url=URL, api_key="key", http_client=self.client)
        made._async_client = openai.AsyncOpenAI(base_url=URL, api_key="key", http_client=self.async_client)
        return made


class TextModel(OpenAICompletion):
    """A model that has no native tool calls."""

    def supports_function_calling(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def _adapter() -> Iterator[None]:
    """The tap and the adapter; when they are gone nothing may be left."""
    before = [getattr(owner, name) for owner, name in WATCHED]
    undo = [install_tap(), plugins().install_adapters(emit, ["crewai"])]
    assert all(getattr(owner, name) is not was for (owner, name), was in zip(WATCHED, before, strict=True))
    yield
    for each in reversed(undo):
        each()
    assert [getattr(owner, name) for owner, name in WATCHED] == before


@pytest.fixture
def session() -> Iterator[ActiveAttempt]:
    with activate(LLM_) as active:
        yield active


@tool("Look up")
def look_up(topic: str) -> str:
    """Look something up."""
    return f"{topic} is large."


@tool("fail")
def fail() -> str:
    """Fail."""
    raise KeyError("nothing")


def agent(model: Scripted, role: str = "Researcher", *tools: BaseTool, **more: Any) -> Agent:
    llm = more.pop("llm", None) or model.llm()
    return Agent(role=role, goal="Help.", backstory="Careful.", llm=llm, tools=list(tools), **more)


def task(who: Agent | None, **more: Any) -> Task:
    return Task(description="Do it.", expected_output="A sentence.", agent=who, **more)


def crew(model: Scripted, *tools: BaseTool, **more: Any) -> Crew:
    who = agent(model, "Researcher", *tools)
    return Crew(agents=[who], tasks=[task(who)], **more)


def uses(name: str, **arguments: Any) -> Callable[[Mapping[str, Any]], Say]:
    """Whoever has this tool calls it once, then answers."""

    def answer(body: Mapping[str, Any]) -> Say:
        offered = [each["function"]["name"] for each in body.get("tools") or ()]
        has_used = any(message["role"] == "tool" for message in body["messages"])
        return {name: arguments} if name in offered and not has_used else "done"

    return answer


# crews -----------------------------------------------------------------------------------------------------------------
def pair(model: Scripted, **more: Any) -> Crew:
    first, second = agent(model, "Researcher"), agent(model, "Writer")
    return Crew(agents=[first, second], tasks=[task(first), task(second)], **more)


async def a_crew(model: Scripted) -> None:
    await asyncio.to_thread(pair(model).kickoff)


async def a_crew_that_waits(model: Scripted) -> None:
    await pair(model).kickoff_async()


async def a_crew_of_coroutines(model: Scripted) -> None:
    await pair(model).akickoff()


async def a_crew_for_each(model: Scripted) -> None:
    await asyncio.to_thread(pair(model).kickoff_for_each, [{"topic": "the sea"}, {"topic": "the land"}])


async def a_streamed_crew(model: Scripted) -> None:
    def consume() -> None:
        for _ in pair(model, stream=True).kickoff():
            model.ask()  # between the parts it is the consumer who calls

    model.answer = lambda body: "done" if body["messages"] else ""
    await asyncio.to_thread(consume)


async def a_crew_with_a_task_in_a_thread(model: Scripted) -> None:
    first, second = agent(model, "Researcher"), agent(model, "Writer")
    await asyncio.to_thread(
        Crew(agents=[first, second], tasks=[task(first, async_execution=True), task(second)]).kickoff
    )


async def a_role_of_a_template(model: Scripted) -> None:
    who = agent(model, "  Senior {topic}\n  Researcher\n")
    await asyncio.to_thread(Crew(agents=[who], tasks=[task(who)]).kickoff, {"topic": "AI"})


async def a_task_with_a_name(model: Scripted) -> None:
    who = agent(model)
    await asyncio.to_thread(Crew(agents=[who], tasks=[task(who, name="research")]).kickoff)


async def a_hierarchy(model: Scripted) -> None:
    model.answer = uses("ask_question_to_coworker", question="Why?", context="None.", coworker="Researcher")
    work = Crew(agents=[agent(model)], tasks=[task(None)], process=Process.hierarchical, manager_llm=model.llm())
    await asyncio.to_thread(work.kickoff)


async def a_hierarchy_of_the_users_manager(model: Scripted) -> None:
    model.answer = uses("delegate_work_to_coworker", task="Do it.", context="None.", coworker="Researcher")
    boss = agent(model, "Boss", allow_delegation=True)
    work = Crew(agents=[agent(model)], tasks=[task(None)], process=Process.hierarchical, manager_agent=boss)
    await asyncio.to_thread(work.kickoff)


async def a_delegation(model: Scripted) -> None:
    model.answer = uses("delegate_work_to_coworker", task="Do it.", context="None.", coworker="Researcher")
    writer = agent(model, "Writer", allow_delegation=True)
    await asyncio.to_thread(Crew(agents=[agent(model), writer], tasks=[task(writer)]).kickoff)


async def an_agent_without_native_tools(model: Scripted) -> None:
    model.answer = lambda _: "Thought: I know.\nFinal Answer: done"
    who = agent(model, "Researcher", look_up, llm=model.llm(TextModel))
    await asyncio.to_thread(Crew(agents=[who], tasks=[task(who)]).kickoff)


# what else asks a model ------------------------------------------------------------------------------------------------
class Answer(BaseModel):
    number: int


async def a_guardrail(model: Scripted) -> None:
    model.answer = lambda body: '{"valid": true, "feedback": null}' if "guardrail" in str(body).lower() else "done"
    who = agent(model)
    work = Crew(agents=[who], tasks=[task(who, guardrail="It is short.", name="count")])
    await asyncio.to_thread(work.kickoff)


async def an_answer_of_a_class(model: Scripted) -> None:
    said = iter(["It is 3.", '{"number": 3}'])
    model.answer = lambda _: next(said)
    who = agent(model, "Researcher", look_up)  # with tools, the answer is converted afterwards
    work = Crew(agents=[who], tasks=[task(who, output_pydantic=Answer)])
    assert (await asyncio.to_thread(work.kickoff)).pydantic == Answer(number=3)


async def a_memory(model: Scripted) -> None:
    memory = Memory(llm=model.llm(), embedder=lambda texts: [[0.1, 0.2] for _ in texts])
    model.answer = lambda body: '{"memories": ["It is large."]}' if "response_format" in body else "done"
    await asyncio.to_thread(crew(model, memory=memory).kickoff)


async def a_plan(model: Scripted) -> None:
    step = {"step_number": 1, "description": "Look.", "tool_to_use": "look_up", "depends_on": []}
    plan = {"plan": "Look.", "steps": [step], "ready": True}
    said: Iterator[Say] = iter([{"create_reasoning_plan": plan}, {"look_up": {"topic": "The sea"}}, "It is large."])
    model.answer = lambda _: next(said, "done")
    who = agent(model, "Researcher", look_up, planning_config=PlanningConfig(max_attempts=1, reasoning_effort="low"))
    await asyncio.to_thread(Crew(agents=[who], tasks=[task(who)]).kickoff)


# agents and flows by themselves ----------------------------------------------------------------------------------------
async def an_agent_alone(model: Scripted) -> None:
    await asyncio.to_thread(agent(model, "Alone").kickoff, "hi")
    await agent(model, "Waiting").kickoff_async("hi")


def flow_of(model: Scripted) -> type[Flow[Any]]:
    class City(Flow[Any]):
        @start()
        def pick(self) -> str:
            return str(model.llm().call("Name a city."))

        @listen(pick)
        async def fact(self, city: str) -> str:
            return str(await model.llm().acall(f"Tell a fact about {city}."))

        @listen(fact)
        def report(self, fact: str) -> str:
            return str(crew(model).kickoff().raw)

        @listen(report)
        def check(self, report: str) -> Any:
            return agent(model, "Checker").kickoff(report)  # in a flow, a coroutine

    return City


async def a_flow(model: Scripted) -> None:
    await flow_of(model)().kickoff_async()


async def a_flow_that_blocks(model: Scripted) -> None:
    await asyncio.to_thread(flow_of(model)().kickoff)


async def a_crew_in_a_tool(model: Scripted) -> None:
    model.answer = uses("ask", text="hi")
    inner = pair(model)

    @tool("ask")
    def ask(text: str) -> str:
        """Ask the others."""
        model.ask()
        return str(inner.kickoff().raw)

    boss = agent(model, "Boss", ask)
    await asyncio.to_thread(Crew(agents=[boss], tasks=[task(boss)]).kickoff)


async def a_tool_in_a_component(model: Scripted) -> None:
    model.answer = uses("ask")

    @tool("ask")
    def ask() -> str:
        """Ask an expert."""
        with lightning.component("expert"):
            return str(model.llm().call("hi"))

    def run() -> None:
        with lightning.component("team"):
            agent(model, "Boss", ask).kickoff("hi")

    await asyncio.to_thread(run)


async def a_model_alone(model: Scripted) -> None:
    model.llm().call("hi")


MEMORY = ["Researcher", "Researcher", "EncodingFlow"]
CITY = ["City/pick", "City/fact", "City/report/Researcher", "City/check/Checker"]
NAMED: dict[Callable[[Scripted], Awaitable[None]], list[str | None]] = {
    a_crew: ["Researcher", "Writer"],
    a_crew_that_waits: ["Researcher", "Writer"],
    a_crew_of_coroutines: ["Researcher", "Writer"],
    a_crew_for_each: ["Researcher", "Writer"] * 2,
    a_crew_with_a_task_in_a_thread: ["Researcher", "Writer"],
    a_role_of_a_template: ["Senior {topic} Researcher"],
    a_task_with_a_name: ["research/Researcher"],
    a_hierarchy: ["Crew Manager", "Crew Manager/ask_question_to_coworker/Researcher", "Crew Manager"],
    a_hierarchy_of_the_users_manager: ["Boss", "Boss/delegate_work_to_coworker/Researcher", "Boss"],
    a_delegation: ["Writer", "Writer/delegate_work_to_coworker/Researcher", "Writer"],
    an_agent_without_native_tools: ["Researcher"],
    a_guardrail: ["count/Researcher", "count/Researcher/Guardrail Agent"],
    an_answer_of_a_class: ["Researcher", "Researcher"],
    a_memory: MEMORY,
    a_plan: ["Researcher"] * 4,
    an_agent_alone: ["Alone", "Waiting"],
    a_flow: CITY,
    a_flow_that_blocks: CITY,
    a_crew_in_a_tool: ["Boss", "Boss/ask", "Boss/ask/Researcher", "Boss/ask/Writer", "Boss"],
    a_tool_in_a_component: ["team/Boss", "team/Boss/ask/expert", "team/Boss"],
    a_model_alone: [None],
}


@pytest.mark.parametrize("name", NAMED, ids=lambda function: function.__name__)
async def test_names(name: Callable[[Scripted], Awaitable[None]], session: ActiveAttempt) -> None:
    model = Scripted(lambda body: "done")
    await name(model)
    assert model.paths() == NAMED[name]
    assert plugins().identify() is None
    spans = [caller.span_id for caller in model.callers if caller and caller.span_id]
    assert len(set(spans)) == len(spans) >= len([path for path in NAMED[name] if path not in (None, "Boss/ask")])


async def test_a_consumer_of_a_stream_has_no_name(session: ActiveAttempt) -> None:
    model = Scripted([])
    await a_streamed_crew(model)
    of_agents = [path for path, body in zip(model.paths(), model.bodies, strict=True) if body["messages"]]
    others = [path for path, body in zip(model.paths(), model.bodies, strict=True) if not body["messages"]]
    assert of_agents == ["Researcher", "Writer"]
    assert set(others) == {None}


async def test_code_of_a_tool_has_no_span(session: ActiveAttempt) -> None:
    """Another framework's agent may be calling there."""
    model = Scripted([])
    await a_crew_in_a_tool(model)
    asked = next(caller for caller in model.callers if caller and caller.agent == "ask")
    assert (asked.span_id, bool(asked.parent_id)) == ("", True)


# tools -----------------------------------------------------------------------------------------------------------------
def told(session: ActiveAttempt) -> list[tuple[str, str, str, str]]:
    return [(event.name, event.status, event.call_id, event.output or event.error) for event in session.tool_events]


SEA = ("look_up", "ok", "call-look_up", "The sea is large.")


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
def test_a_tool_that_worked(old: bool, session: ActiveAttempt) -> None:
    module = pytest.importorskip("crewai.agents.crew_agent_executor") if old else None
    more = {"executor_class": module.CrewAgentExecutor} if module else {}
    who = agent(Scripted(uses("look_up", topic="The sea")), "Researcher", look_up, **more)
    Crew(agents=[who], tasks=[task(who)]).kickoff()
    assert told(session) == [SEA]
    (event,) = session.tool_events
    assert event.arguments == {"topic": "The sea"}
    assert event.caller is not None
    assert event.caller.path == ("Researcher",)


def test_a_tool_that_raised(session: ActiveAttempt) -> None:
    crew(Scripted(uses("fail")), fail).kickoff()
    assert told(session) == [("fail", "error", "call-fail", "KeyError('nothing')")]


def test_a_tool_that_says_that_it_failed(session: ActiveAttempt) -> None:
    from crewai.tools.tool_failure import ToolFailure

    @tool("refuse")
    def refuse() -> Any:
        """Refuse."""
        return ToolFailure(message="not now")

    crew(Scripted(uses("refuse")), refuse).kickoff()
    assert told(session) == [("refuse", "error", "call-refuse", "not now")]


def test_a_tool_that_there_is_not(session: ActiveAttempt) -> None:
    """CrewAI says so to the model; nothing has run."""
    crew(Scripted([{"invented": {}}, "sorry"]), look_up).kickoff()
    assert session.tool_events == ()


def test_a_tool_that_may_not_run(session: ActiveAttempt) -> None:
    def block(context: Any) -> bool:
        return False

    register_before_tool_call_hook(block)
    crew(Scripted(uses("look_up", topic="The sea")), look_up).kickoff()
    unregister_before_tool_call_hook(block)
    assert [(event.name, event.status) for event in session.tool_events] == [("look_up", "blocked")]


def test_a_tool_that_has_run_often_enough(session: ActiveAttempt) -> None:
    @tool("once", max_usage_count=1)
    def once(topic: str) -> str:
        """Look something up."""
        return topic

    crew(Scripted([{"once": {"topic": "a"}}, {"once": {"topic": "b"}}, "done"]), once).kickoff()
    assert [(event.status, event.arguments) for event in session.tool_events] == [
        ("ok", {"topic": "a"}),
        ("blocked", {"topic": "b"}),
    ]


def test_tools_at_the_same_time(session: ActiveAttempt) -> None:
    crew(Scripted([{"look_up": {"topic": "The sea"}, "fail": {}}, "done"]), look_up, fail).kickoff()
    assert sorted(told(session)) == [("fail", "error", "call-fail", "KeyError('nothing')"), SEA]


def acts(name: str, arguments: str = "{}") -> str:
    return f"Thought: I use a tool.\nAction: {name}\nAction Input: {arguments}"


@pytest.mark.parametrize("how", ["kickoff", "akickoff"])
def test_a_tool_in_the_form_of_a_text(how: str, session: ActiveAttempt) -> None:
    """CrewAI runs one that raises three times; the model has asked for it once."""
    said = [
        acts("Look up", '{"topic": "The sea"}'),
        acts("fail"),
        acts("invented"),
        "Thought: Done.\nFinal Answer: done",
    ]
    model = Scripted(list(said))
    who = agent(model, "Researcher", look_up, fail, llm=model.llm(TextModel))
    work = Crew(agents=[who], tasks=[task(who)])
    work.kickoff() if how == "kickoff" else asyncio.run(work.akickoff())
    assert told(session) == [("look_up", "ok", "", "The sea is large."), ("fail", "error", "", "KeyError('nothing')")]


async def test_a_tool_of_a_planned_step(session: ActiveAttempt) -> None:
    """The call by which the model gives its plan is no tool's."""
    await a_plan(Scripted([]))
    assert told(session) == [SEA]


def test_a_function_that_a_model_calls_by_itself(session: ActiveAttempt) -> None:
    model = Scripted([{"add": {"a": 1, "b": 2}}])
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": parameters}}]
    assert model.llm().call("hi", tools=tools, available_functions={"add": lambda a, b: a + b}) == "3"
    assert told(session) == [("add", "ok", "", "3")]


async def test_a_delegation_is_a_tool_of_who_delegates(session: ActiveAttempt) -> None:
    await a_delegation(Scripted([]))
    (event,) = session.tool_events
    assert (event.name, event.status, event.output) == ("delegate_work_to_coworker", "ok", "done")
    assert event.caller is not None
    assert event.caller.path == ("Writer",)


def test_the_users_listener_hears_what_it_heard(session: ActiveAttempt) -> None:
    heard: list[Any] = []

    def hear(source: Any, event: Any) -> None:
        heard.append(event)

    crewai_event_bus.on(ToolUsageFinishedEvent)(hear)
    crew(Scripted(uses("look_up", topic="The sea")), look_up).kickoff()
    crewai_event_bus.flush()
    crewai_event_bus.off(ToolUsageFinishedEvent, hear)
    assert [event.output for event in heard] == ["The sea is large."]


def test_rollouts_at_the_same_time() -> None:
    def rollout(name: str) -> tuple[list[str | None], list[str]]:
        model = Scripted(uses("look_up", topic="The sea"))
        with activate(LLM(URL, name, "policy")) as own:
            who = agent(model, name, look_up)
            Crew(agents=[who], tasks=[task(who)]).kickoff()
        return model.paths(), [event.caller.agent for event in own.tool_events if event.caller]

    names = [f"agent-{number}" for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda name: copy_context().run(rollout, name), names))
    assert found == [([name] * 2, [name]) for name in names]


def test_installed_twice_a_run_is_reported_once() -> None:
    first: list[Any] = []
    second: list[Any] = []
    undo = [lightning_crewai.adapter.lightning_install(each.append) for each in (first, second)]
    crew(Scripted(uses("look_up", topic="The sea")), look_up).kickoff()
    for each in undo:
        each()
    assert ([event.name for event in first], [event.name for event in second]) == ([], ["look_up"])


# faults, telemetry and versions ----------------------------------------------------------------------------------------
TOO_LONG: Callable[[Any], Any] = lambda _: (False, "It is too long.")  # noqa: E731 — CrewAI reads the annotations of a def


def guarded() -> Any:
    who = agent(Scripted(lambda _: "done"))
    return Crew(agents=[who], tasks=[task(who, guardrail=TOO_LONG, guardrail_max_retries=1)]).kickoff()


def too_long(_: Mapping[str, Any]) -> Say:
    error = {"message": "This model's maximum context length is 16 tokens.", "code": "context_length_exceeded"}
    return httpx.Response(400, json={"error": error})


FAULTS: dict[str, tuple[Callable[[], Any], str | None]] = {
    "an answer without a word": (lambda: crew(Scripted(lambda _: "")).kickoff(), "malformed_output"),
    "an answer that the task's guardrail refuses": (guarded, "malformed_output"),
    "an answer that the agent's guardrail refuses": (
        lambda: agent(Scripted(lambda _: "done"), guardrail=TOO_LONG, guardrail_max_retries=1).kickoff("hi"),
        "malformed_output",
    ),
    "a conversation that is too long": (lambda: Scripted(too_long).llm().call("hi"), "context_overflow"),
    "a key that is wrong": (lambda: Scripted(lambda _: httpx.Response(401, json={})).llm().call("hi"), None),
}


@pytest.mark.parametrize("case", FAULTS)
def test_policy_faults(case: str, session: ActiveAttempt) -> None:
    work, fault = FAULTS[case]
    with pytest.raises(Exception) as caught:
        work()
    assert lightning_crewai.adapter.lightning_policy_fault(caught.value) == fault, repr(caught.value)


def test_an_agent_that_does_not_end_is_made_to_answer(session: ActiveAttempt) -> None:
    """CrewAI raises nothing then, so there is no fault to tell of."""
    model = Scripted(lambda body: {"look_up": {"topic": str(len(body["messages"]))}} if body.get("tools") else "forced")
    who = agent(model, "Researcher", look_up, max_iter=2)
    assert Crew(agents=[who], tasks=[task(who)]).kickoff().raw == "forced"


SILENCE = """
import os, sys
asked = []
sys.stdin = type("Terminal", (), {"isatty": lambda self: True, "readline": lambda *_: asked.append(1) or "n"})()
import crewai, lightning_crewai
from crewai.telemetry import Telemetry
from lightning.testing import ChatServer, hold_network
assert Telemetry().ready, "it is on without the adapter"
with hold_network() as refused, ChatServer(answer=lambda call: "done") as server:
    undo = lightning_crewai.adapter.lightning_install(print)
    llm = crewai.LLM(model="openai/policy", base_url=server.llm().base_url, api_key="key")
    agent = crewai.Agent(role="Writer", goal="Write.", backstory="Brief.", llm=llm)
    task = crewai.Task(description="Write.", expected_output="A word.", agent=agent)
    print(crewai.Crew(agents=[agent], tasks=[task]).kickoff().raw)
    Telemetry().provider.force_flush()
    undo()
assert refused == [], refused
assert asked == []
assert [name for name in os.environ if name in lightning_crewai.methods.QUIET] == []
"""


def test_nothing_is_sent_or_asked_while_the_adapter_is_installed(tmp_path: Any) -> None:
    others = {name: value for name, value in os.environ.items() if not name.startswith("CREWAI_")}
    there = {**others, "HOME": str(tmp_path), "CREWAI_STORAGE_DIR": str(tmp_path)}
    run = [sys.executable, "-W", "ignore", "-c", SILENCE]
    done = subprocess.run(run, env=there, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREWAI_TRACING_ENABLED", "true")
    lightning_crewai.adapter.lightning_install(print)()
    assert os.environ["CREWAI_TRACING_ENABLED"] == "true"


def test_a_release_that_lacks_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter says so and leaves all others as they were."""
    methods.replaced.put_back()
    monkeypatch.setattr(lightning_crewai.adapter, "installations", Installations(methods._attach))
    before = [getattr(owner, name) for owner, name in WATCHED]
    monkeypatch.delattr(ToolUsage, "ause")
    with pytest.raises(lightning.LightningError, match=r"has no ToolUsage\.ause.*pip install 'crewai=="):
        lightning_crewai.adapter.lightning_install(print)
    assert [getattr(owner, name) for owner, name in WATCHED] == before


@pytest.mark.parametrize("version", ["1.15.9", "2.0"])
def test_versions_out_of_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", {"crewai": version}.__getitem__)
    with pytest.raises(lightning.LightningError, match=rf"crewai {version} is installed.*pip install 'crewai"):
        lightning_crewai.adapter.lightning_install(print)
