"""smolagents' names, managed agents, plans, code and tools, with models that say what they are told to."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import lightning
import lightning_smolagents
import pytest
from lightning.errors import PluginError
from lightning.instrument import ActiveAttempt, activate, current_caller, emit, install_tap
from lightning.plugins import plugins
from lightning.testing import ChatServer
from lightning.types import LLM
from smolagents import (
    ActionStep,
    AgentMaxStepsError,
    ChatMessage,
    CodeAgent,
    LogLevel,
    MessageRole,
    Model,
    MultiStepAgent,
    OpenAIModel,
    Tool,
    ToolCallingAgent,
    tool,
)
from smolagents.models import ChatMessageStreamDelta, ChatMessageToolCall, ChatMessageToolCallFunction
from smolagents.monitoring import TokenUsage
from smolagents.utils import AgentParsingError, AgentToolCallError

NOWHERE = LLM("http://127.0.0.1:1/v1", "key", "policy")
Call = tuple[str, Any]
Said = str | list[Call]


class Scripted(Model):
    """Says what it is told to: texts, or tool calls; notes who was calling."""

    def __init__(self, *says: Said) -> None:
        super().__init__(model_id="scripted")
        self.says = list(says)
        self.callers: list[lightning.Caller | None] = []

    def generate(self, *args: Any, **more: Any) -> ChatMessage:
        self.callers.append(current_caller())
        said = self.says.pop(0)
        usage = TokenUsage(input_tokens=1, output_tokens=1)
        if isinstance(said, str):
            return ChatMessage(MessageRole.ASSISTANT, said, token_usage=usage)
        functions = [ChatMessageToolCallFunction(arguments, name) for name, arguments in said]
        calls = [ChatMessageToolCall(one, f"call-{index}", "function") for index, one in enumerate(functions)]
        return ChatMessage(MessageRole.ASSISTANT, "", calls, token_usage=usage)

    @property
    def paths(self) -> list[str]:
        assert all(
            caller is not None and caller.framework == "smolagents" and caller.span_id for caller in self.callers
        )
        assert len({caller.span_id for caller in self.callers if caller}) == len(self.callers)
        return ["/".join(caller.path) for caller in self.callers if caller is not None]


class Streaming(Scripted):
    """The same in words, one by one."""

    def generate_stream(self, *args: Any, **more: Any) -> Iterator[ChatMessageStreamDelta]:
        for word in str(self.generate().content).split(" "):
            yield ChatMessageStreamDelta(f"{word} ")


def code(text: str) -> str:
    return f"I write code.\n<code>\n{text}\n</code>"


def final(text: str = "42") -> list[Call]:
    return [("final_answer", {"answer": text})]


def make(kind: type[MultiStepAgent], *says: Said, tools: Any = (), **options: Any) -> MultiStepAgent:
    return kind(tools=list(tools), model=Scripted(*says), verbosity_level=LogLevel.OFF, **options)


@tool
def shout(text: str) -> str:
    """Say it louder; not when it is bad.

    Args:
        text: It.
    """
    if text == "bad":
        raise ValueError("bad text")
    return text.upper()


@pytest.fixture
def session() -> Iterator[ActiveAttempt]:
    undo = [install_tap(), plugins().install_adapters(emit, ["smolagents"])]
    with activate(NOWHERE) as active:
        yield active
    for each in undo:
        each()


def statuses(session: ActiveAttempt) -> list[tuple[str, str]]:
    return [(event.name, event.status) for event in session.tool_events]


# names ------------------------------------------------------------------------------------------------------------------
class Researcher(CodeAgent):
    """A class of the user's."""


@pytest.mark.parametrize(
    ("kind", "options", "path"),
    [
        (CodeAgent, {"name": "coder", "description": "Writes code."}, "coder"),
        (CodeAgent, {}, "CodeAgent"),
        (Researcher, {}, "Researcher"),
    ],
)
def test_an_agent_has_its_name_or_that_of_its_class(
    session: ActiveAttempt, kind: type[CodeAgent], options: Any, path: str
) -> None:
    agent = make(kind, code("final_answer(42)"), **options)
    assert agent.run("hi") == 42
    assert agent.model.paths == [path]


def test_a_component_stands_around_an_agent(session: ActiveAttempt) -> None:
    agent = make(CodeAgent, code("final_answer(42)"), name="coder")
    with lightning.component("team"):
        agent.run("hi")
    assert agent.model.paths == ["team/coder"]


def test_an_agent_that_a_tool_calling_agent_manages_stands_once_in_the_path(session: ActiveAttempt) -> None:
    solver = make(ToolCallingAgent, final("42"), name="solver", description="Solves.")
    boss = make(
        ToolCallingAgent,
        [("solver", {"task": "6 * 7"})],
        final(),
        name="boss",
        description="b",
        managed_agents=[solver],
    )
    boss.run("hi")
    assert (boss.model.paths, solver.model.paths) == (["boss", "boss"], ["boss/solver"])
    (event,) = session.tool_events
    assert (event.name, event.status, event.call_id, event.arguments) == ("solver", "ok", "call-0", {"task": "6 * 7"})
    assert event.caller is not None
    assert event.caller.path == ("boss",)
    assert "42" in event.output


def test_an_agent_that_a_code_agent_manages_is_called_in_another_thread(session: ActiveAttempt) -> None:
    solver = make(
        ToolCallingAgent, [("shout", {"text": "a"})], final("42"), tools=[shout], name="solver", description="s"
    )
    boss = make(CodeAgent, code("final_answer(solver('6 * 7'))"), name="boss", managed_agents=[solver])
    boss.run("hi")
    assert (boss.model.paths, solver.model.paths) == (["boss"], ["boss/solver"] * 2)
    assert statuses(session) == [("shout", "ok"), ("solver", "ok"), ("python_interpreter", "ok")]
    shouted, solved, ran = session.tool_events
    assert [event.caller.path for event in (shouted, solved, ran) if event.caller] == [
        ("boss", "solver"), ("boss",), ("boss",),
    ]  # fmt: skip
    assert solved.arguments == {"task": "6 * 7"}


def test_agents_that_run_at_the_same_time_inside_an_agent_are_told_apart(session: ActiveAttempt) -> None:
    inner = [make(ToolCallingAgent, final(), name=name, description=name) for name in ("solver", "checker")]
    both: Said = [("solver", {"task": "a"}), ("checker", {"task": "b"})]
    boss = make(ToolCallingAgent, both, final(), name="boss", managed_agents=inner)
    boss.run("hi")
    assert [agent.model.paths for agent in inner] == [["boss/solver"], ["boss/checker"]]
    assert sorted((event.name, event.call_id) for event in session.tool_events) == [
        ("checker", "call-1"), ("solver", "call-0"),
    ]  # fmt: skip


def test_plans_and_the_answer_after_too_many_steps_are_the_agents_own(session: ActiveAttempt) -> None:
    agent = make(
        ToolCallingAgent,
        "I shout.",
        [("shout", {"text": "a"})],
        "42",
        tools=[shout],
        name="planner",
        planning_interval=5,
    )
    assert agent.run("hi", max_steps=1) == "42"
    assert agent.model.paths == ["planner"] * 3


class Asks(Tool):
    """A tool whose code asks the model, and another client."""

    name = "asks"
    description = "Asks."
    inputs: ClassVar[Any] = {}
    output_type = "string"

    def __init__(self, ask: Callable[[], str]) -> None:
        self.ask = ask
        super().__init__()

    def forward(self) -> str:
        return self.ask()


def test_a_tool_that_asks_a_model_is_named_and_another_clients_call_has_no_span(session: ActiveAttempt) -> None:
    model, others = Scripted("yes"), []

    def ask() -> str:
        others.append(current_caller())
        return str(model.generate([]).content)

    agent = make(ToolCallingAgent, [("asks", {})], final(), tools=[Asks(ask)], name="boss")
    agent.run("hi")
    assert model.paths == ["boss/asks"]
    (other,) = others
    assert (other.agent, other.path, other.span_id) == ("asks", ("boss", "asks"), "")
    assert other.parent_id == model.callers[0].parent_id  # type: ignore[union-attr]


def test_whoever_iterates_over_a_streamed_run_has_no_name_of_it(session: ActiveAttempt) -> None:
    model = Streaming(code("print('a')"), code("final_answer(42)"))
    agent = CodeAgent(tools=[], model=model, name="coder", stream_outputs=True, verbosity_level=LogLevel.OFF)
    between = [current_caller() for _ in agent.run("hi", stream=True)]
    assert len(between) > 6
    assert not any(between)
    assert model.paths == ["coder", "coder"]


# tools ------------------------------------------------------------------------------------------------------------------
def test_tool_runs_have_their_outcome_and_their_call(session: ActiveAttempt) -> None:
    says: list[Said] = [
        [("shout", {"text": "bad"})],
        [("shout", {"words": "a"})],
        [("invented", {})],
        [("shout", {"text": "a"}), ("shout", {"text": "b"})],
        final(),
    ]
    agent = make(ToolCallingAgent, *says, tools=[shout], name="boss")
    agent.run("hi")
    failed, misused, *shouted = session.tool_events
    assert (failed.status, failed.error, failed.arguments) == ("error", "ValueError('bad text')", {"text": "bad"})
    assert (misused.status, misused.call_id) == ("error", "call-0")
    assert "words" in misused.error
    found = sorted((event.call_id, event.output, event.status) for event in shouted)
    assert found == [("call-0", "A", "ok"), ("call-1", "B", "ok")]


def test_code_is_reported_as_a_run_of_the_interpreter(session: ActiveAttempt) -> None:
    agent = make(
        CodeAgent, code("print(shout('a'))"), code("1 / 0"), code("final_answer(shout(text='b'))"), tools=[shout]
    )
    assert agent.run("hi") == "B"
    assert statuses(session) == [
        ("shout", "ok"), ("python_interpreter", "ok"), ("python_interpreter", "error"),
        ("shout", "ok"), ("python_interpreter", "ok"),
    ]  # fmt: skip
    first, ran, failed, *_ = session.tool_events
    assert (first.arguments, first.output) == ({"text": "a"}, "A")
    assert ran.arguments == {"code": "print(shout('a'))"}
    assert ran.output.startswith("A\n")
    assert "ZeroDivisionError" in failed.error


def test_code_that_cannot_be_read_is_no_run(session: ActiveAttempt) -> None:
    agent = make(CodeAgent, "I would rather not.", code("final_answer(42)"))
    agent.run("hi")
    assert statuses(session) == [("python_interpreter", "ok")]


def test_a_tool_that_no_agent_uses_is_not_reported(session: ActiveAttempt) -> None:
    assert shout("a") == "A"
    assert session.tool_events == ()


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_a_result_that_has_no_text_stays_the_tools_result(session: ActiveAttempt) -> None:
    class Gives(Tool):
        name = "gives"
        description = "Gives."
        inputs: ClassVar[Any] = {}
        output_type = "any"

        def forward(self) -> Any:
            return Unprintable()

    agent = make(CodeAgent, code("thing = gives()\nfinal_answer(42)"), tools=[Gives()])
    assert agent.run("hi") == 42
    event = session.tool_events[0]
    assert (event.name, event.status, event.output) == ("gives", "ok", "Unprintable")


# around it --------------------------------------------------------------------------------------------------------------
def test_a_class_of_the_users_is_watched_and_gets_its_methods_back() -> None:
    class Own(Scripted):
        def generate(self, *args: Any, **more: Any) -> ChatMessage:
            return super().generate(*args, **more)

    kinds = [(Own, "generate"), (MultiStepAgent, "run"), (MultiStepAgent, "__call__"), (Tool, "__call__")]
    before = [vars(kind)[name] for kind, name in kinds]
    first = lightning_smolagents.adapter.lightning_install(lambda event: None)
    second = lightning_smolagents.adapter.lightning_install(lambda event: None)
    agent = CodeAgent(tools=[shout], model=Own(code("final_answer(42)")), name="coder", verbosity_level=LogLevel.OFF)
    agent.run("hi")
    assert agent.model.paths == ["coder"]
    assert all(vars(kind)[name] is not method for (kind, name), method in zip(kinds, before, strict=True))
    first()
    assert vars(Own)["generate"] is not before[0]
    second()
    assert [vars(kind)[name] for kind, name in kinds] == before


def test_the_newest_installation_hears_of_a_run_once() -> None:
    heard: dict[str, list[str]] = {"first": [], "second": []}
    undo = [
        lightning_smolagents.adapter.lightning_install(lambda event, name=name: heard[name].append(event.name))
        for name in heard
    ]
    make(ToolCallingAgent, [("shout", {"text": "a"})], final(), tools=[shout]).run("hi")
    for each in undo:
        each()
    assert heard == {"first": [], "second": ["shout"]}


def test_the_tap_writes_the_name_on_the_request() -> None:
    answer = json.dumps({"name": "final_answer", "arguments": {"answer": "42"}})
    with ChatServer(answer=lambda call: answer) as server, activate(server.llm()) as session:
        undo = [install_tap(), plugins().install_adapters(emit, ["smolagents"])]
        llm = server.llm()
        model = OpenAIModel(llm.model, api_base=llm.base_url, api_key=llm.api_key)
        agent = ToolCallingAgent(tools=[], model=model, name="solver", verbosity_level=LogLevel.OFF)
        with model.client:
            assert agent.run("hi") == "42"
        for each in undo:
            each()
    (call,) = server.calls
    assert call.caller is not None
    assert call.caller.path == ("solver",)
    assert call.rollout == llm.api_key
    assert session.tool_events == ()


@pytest.mark.parametrize("version", ["1.25.0", "2.0.0"])
def test_other_versions_are_refused_with_the_cure(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(PluginError, match=r"pip install 'smolagents>=1.26,<2'"):
        lightning_smolagents.adapter.lightning_install(lambda event: None)


def test_what_the_model_did_wrong_is_a_fault_of_the_policys() -> None:
    logger = make(CodeAgent).logger
    faults = [
        AgentMaxStepsError("", logger),
        AgentParsingError("", logger),
        AgentToolCallError("", logger),
        ValueError(),
    ]
    assert [lightning_smolagents.adapter.lightning_policy_fault(error) for error in faults] == [
        "max_turns", "malformed_output", "malformed_output", None,
    ]  # fmt: skip


def test_a_run_that_came_to_no_end_says_so_in_its_memory(session: ActiveAttempt) -> None:
    agent = make(ToolCallingAgent, [("shout", {"text": "a"})], "42", tools=[shout], max_steps=1)
    agent.run("hi")
    last = agent.memory.steps[-1]
    assert isinstance(last, ActionStep)
    assert isinstance(last.error, AgentMaxStepsError)
