"""AutoGen's agents, teams and tools under the adapters' conformance kit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import lightning_autogen.handler
import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult, TaskRunner
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import ChatCompletionClient, ModelFamily, ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient
from lightning.instrument import emit, install_tap
from lightning.plugins import plugins
from lightning.testing import AdapterContract
from lightning.types import LLM
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

# The gateway answers with the policy server's name for the model; AutoGen remarks on it.
pytestmark = pytest.mark.filterwarnings("ignore:Resolved model mismatch:UserWarning")

INFO = ModelInfo(
    vision=False, function_calling=True, json_output=True, structured_output=False, family=ModelFamily.UNKNOWN
)


def calculator(expression: str) -> str:
    """Evaluate a product."""
    if expression == "bad":
        raise ValueError("bad expression")
    left, right = expression.split("*")
    return str(int(left) * int(right))


class Runs:
    """A task runner together with the clients to close after it."""

    def __init__(self, make: Callable[..., TaskRunner], llm: LLM) -> None:
        self.llm = llm
        self.clients: list[ChatCompletionClient] = []
        self.make = make

    def agent(self, name: str, *, stream: bool = False, **options: Any) -> AssistantAgent:
        options = {"max_tool_iterations": 5, **options}
        return AssistantAgent(
            name, self.client(), system_message=f"You are {name}.", model_client_stream=stream, **options
        )

    def client(self) -> ChatCompletionClient:
        client = OpenAIChatCompletionClient(
            model=self.llm.model, base_url=self.llm.base_url, api_key=self.llm.api_key, model_info=INFO
        )
        self.clients.append(client)
        return client

    async def run(self, text: str, stream: bool) -> str:
        try:
            runner = self.make(self, stream)
            if not stream:
                result = await runner.run(task=text)
            else:
                async for item in runner.run_stream(task=text):
                    if isinstance(item, TaskResult):
                        result = item
            return result.messages[-1].to_text()
        finally:
            for client in self.clients:
                await client.close()


class Own(SpanProcessor):
    """The user's own processor."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def on_end(self, span: object) -> None:
        self.seen.append(span)


class TestAutoGen(AdapterContract):
    adapter = "autogen"
    capabilities = frozenset(
        {"tools", "cancel", "tool_call_ids", "stream", "pair", "nested", "threads", "own_processor"}
    )

    def solver(self, llm: LLM, dialect: str = "chat") -> Runs:
        return Runs(lambda runs, stream: runs.agent("solver", stream=stream, tools=[calculator]), llm)

    def pair(self, llm: LLM) -> Runs:
        def team(runs: Runs, stream: bool) -> TaskRunner:
            agents = [runs.agent("writer"), runs.agent("checker")]
            return RoundRobinGroupChat(agents, termination_condition=MaxMessageTermination(3))

        return Runs(team, llm)

    def boss(self, llm: LLM) -> Runs:
        def boss(runs: Runs, stream: bool) -> TaskRunner:
            solver, echo = runs.agent("solver", tools=[calculator]), runs.agent("echo")

            async def ask_math(text: str) -> str:
                """Ask the solver."""
                return (await solver.run(task=text)).messages[-1].to_text()

            async def ask_echo(text: str) -> str:
                """Ask the echo."""
                return (await echo.run(task=text)).messages[-1].to_text()

            return runs.agent("boss", tools=[ask_math, ask_echo])

        return Runs(boss, llm)

    async def run(self, agent: Any, text: str, *, stream: bool = False) -> str:
        return await agent.run(text, stream)

    @contextlib.contextmanager
    def own_processor(self) -> Iterator[list[object]]:
        own = Own()
        if type(trace.get_tracer_provider()) is trace.ProxyTracerProvider:
            trace.set_tracer_provider(TracerProvider(shutdown_on_exit=False))
        trace.get_tracer_provider().add_span_processor(own)
        yield own.seen
        own.seen = []  # it stays on the provider

    def leftovers(self) -> object:
        return len(lightning_autogen.handler.open_spans)

    def test_beside_the_generic_adapter(self) -> None:
        """Both see AutoGen's spans: AutoGen's own adapter answers, and a tool is reported once."""
        with contextlib.ExitStack() as undoing:
            undoing.callback(install_tap())
            undoing.callback(plugins().install_adapters(emit, ["otel", "autogen"]))
            ran = self.play(self.boss)
        assert {call.caller.framework for call in ran.calls} == {"autogen"}
        assert sorted(event.name for event in ran.events) == ["ask_echo", "ask_math", "calculator"]
        with contextlib.ExitStack() as undoing:
            undoing.callback(install_tap())
            undoing.callback(plugins().install_adapters(emit, ["otel"]))
            ran = self.play(self.boss)
        assert {call.caller.framework for call in ran.calls} == {"otel"}
        assert sorted(event.name for event in ran.events) == ["ask_echo", "ask_math", "calculator"]
