"""The conformance kit, for agents as the Agents SDK's documentation writes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import agents
import openai
from agents import Agent, RunConfig, RunContextWrapper, Runner, function_tool
from agents.models.multi_provider import MultiProvider
from agents.tracing import TracingProcessor
from lightning.testing import AdapterContract
from lightning.types import LLM

agents.set_trace_processors([])  # what runs here without the adapter is not to be posted to OpenAI, on any machine


def say_what_failed(context: RunContextWrapper[Any], error: Exception) -> str:
    return f"It failed: {error}"


@function_tool(failure_error_function=say_what_failed)
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    if expression == "bad":
        raise ValueError("bad expression")
    return str(eval(expression, {}))


@dataclass
class App:
    """What is run: agents one after the other, through one client."""

    llm: LLM
    agents: list[Agent[Any]]
    dialect: str = "chat"

    def config(self, client: openai.AsyncOpenAI) -> RunConfig:
        provider = MultiProvider(openai_client=client, openai_use_responses=self.dialect == "responses")
        return RunConfig(model_provider=provider)


class Listener(TracingProcessor):
    """The user's own."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.listens = True

    def on_trace_start(self, trace: Any) -> None:
        if self.listens:
            self.seen.append(trace)

    def on_span_end(self, span: Any) -> None:
        if self.listens:
            self.seen.append(span)

    def on_trace_end(self, trace: Any) -> None: ...
    def on_span_start(self, span: Any) -> None: ...
    def shutdown(self) -> None: ...
    def force_flush(self) -> None: ...


class TestOpenAIAgents(AdapterContract):
    adapter = "openai-agents"
    capabilities = frozenset(
        {
            "tools",
            "tool_call_ids",
            "cancel",
            "stream",
            "pair",
            "nested",
            "spans",
            "threads",
            "responses",
            "own_processor",
        }
    )

    def solver(self, llm: LLM, dialect: str = "chat") -> App:
        agent = Agent("solver", instructions="You are solver.", model=llm.model, tools=[calculator])
        return App(llm, [agent], dialect)

    def pair(self, llm: LLM) -> App:
        return App(
            llm, [Agent(name, instructions=f"You are {name}.", model=llm.model) for name in ("writer", "checker")]
        )

    def boss(self, llm: LLM) -> App:
        echo = Agent[Any]("echo", instructions="You are echo.", model=llm.model)
        (solver,) = self.solver(llm).agents
        tools = [solver.as_tool("ask_math", "Math."), echo.as_tool("ask_echo", "Echo.")]
        return App(llm, [Agent("boss", instructions="You are boss.", model=llm.model, tools=tools)])

    async def run(self, agent: App, text: str, *, stream: bool = False) -> str:
        async with openai.AsyncOpenAI(base_url=agent.llm.base_url, api_key=agent.llm.api_key) as client:
            config = agent.config(client)
            for one in agent.agents:
                if stream:
                    result = Runner.run_streamed(one, text, run_config=config)
                    try:
                        async for _ in result.stream_events():
                            pass
                    finally:
                        result.cancel()
                    text = result.final_output
                else:
                    text = (await Runner.run(one, text, run_config=config)).final_output
        return text

    @contextlib.contextmanager
    def own_processor(self) -> Iterator[list[object]]:
        listener = Listener()
        agents.add_trace_processor(listener)
        try:
            yield listener.seen
        finally:
            listener.listens = False  # the SDK has no way to take one back
