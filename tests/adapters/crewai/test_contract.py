"""The conformance kit, for CrewAI's agents and crews."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import crewai
import pytest
from crewai import Agent, Crew, Task
from crewai.events import LLMCallCompletedEvent, crewai_event_bus
from crewai.tools import tool
from lightning.testing import AdapterContract
from lightning.types import LLM
from lightning_crewai.methods import replaced

# CrewAI reads its own deprecated attributes.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@tool("calculator")
def calculator(expression: str) -> str:
    """Evaluate a product."""
    if expression == "bad":
        raise ValueError("bad expression")
    left, right = expression.split("*")
    return str(int(left) * int(right))


class Runs:
    """Agents that work one after the other: as a crew, or by themselves, each on what the one before it said."""

    def __init__(self, llm: LLM, dialect: str, crew: bool) -> None:
        self.llm, self.api, self.as_crew = llm, "responses" if dialect == "responses" else "completions", crew
        self.clients: list[Any] = []
        self.agents: list[Agent] = []

    def agent(self, name: str, *tools: Any) -> Agent:
        llm = self.llm
        client = crewai.LLM(model=f"openai/{llm.model}", base_url=llm.base_url, api_key=llm.api_key, api=self.api)
        self.clients.append(client)
        return Agent(role=name, goal="Help", backstory=f"You are {name}.", tools=list(tools), llm=client)

    def run(self, text: str, stream: bool = False) -> str:
        for client in self.clients:
            client.stream = stream
        try:
            return self._crew(text) if self.as_crew else self._one_by_one(text)
        finally:
            for client in self.clients:
                client._get_sync_client().close()

    def _crew(self, text: str) -> str:
        tasks = [Task(description=text, expected_output="An answer.", agent=agent) for agent in self.agents]
        return str(Crew(agents=self.agents, tasks=tasks).kickoff().raw)

    def _one_by_one(self, text: str) -> str:
        for agent in self.agents:
            text = str(agent.kickoff(text))
        return text


class TestCrew(AdapterContract):
    adapter = "crewai"
    capabilities = frozenset(
        {"tools", "tool_call_ids", "stream", "pair", "nested", "spans", "threads", "own_processor"}
    )
    as_crew: ClassVar[bool] = True

    def solver(self, llm: LLM, dialect: str = "chat") -> Runs:
        runs = Runs(llm, dialect, self.as_crew)
        runs.agents.append(runs.agent("solver", calculator))
        return runs

    def pair(self, llm: LLM) -> Runs:
        runs = Runs(llm, "chat", self.as_crew)
        runs.agents += [runs.agent("writer"), runs.agent("checker")]
        return runs

    def boss(self, llm: LLM) -> Runs:
        runs = Runs(llm, "chat", self.as_crew)
        solver, echo = runs.agent("solver", calculator), runs.agent("echo")

        @tool("ask_math")
        def ask_math(text: str) -> str:
            """Ask the solver."""
            return str(solver.kickoff(text))

        @tool("ask_echo")
        def ask_echo(text: str) -> str:
            """Ask the echo."""
            return str(echo.kickoff(text))

        runs.agents.append(runs.agent("boss", ask_math, ask_echo))
        return runs

    async def run(self, agent: Any, text: str, *, stream: bool = False) -> str:
        return await asyncio.to_thread(agent.run, text, stream)

    def run_sync(self, agent: Any, text: str) -> str:
        return str(agent.run(text))

    @contextlib.contextmanager
    def own_processor(self) -> Iterator[list[object]]:
        seen: list[object] = []

        def see(source: object, event: object) -> None:
            seen.append(event)

        crewai_event_bus.on(LLMCallCompletedEvent)(see)
        try:
            yield seen
        finally:
            crewai_event_bus.flush()
            crewai_event_bus.off(LLMCallCompletedEvent, see)

    def leftovers(self) -> object:
        return len(replaced)


class TestAgent(TestCrew):
    """An agent that works by itself. CrewAI loses the tool calls of a streamed answer of the Responses API."""

    capabilities = (TestCrew.capabilities | {"responses"}) - {"stream"}
    as_crew = False
