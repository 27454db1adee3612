"""Microsoft Agent Framework's agents, read by their spans, under the adapters' conformance kit."""

from __future__ import annotations

from typing import Any

from agent_framework import Agent
from agent_framework.observability import enable_sensitive_telemetry
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from lightning.types import LLM
from openai import AsyncOpenAI

from tests.adapters.pages.span_contract import SpanContract, calculator

enable_sensitive_telemetry()


class Runs:
    """Agents by name, together with the client to close after them."""

    def __init__(self, llm: LLM, dialect: str, *names: str) -> None:
        self.llm, self.dialect, self.names = llm, dialect, names

    async def run(self, text: str, stream: bool) -> str:
        async with AsyncOpenAI(base_url=self.llm.base_url, api_key=self.llm.api_key) as client:
            kind = OpenAIChatClient if self.dialect == "responses" else OpenAIChatCompletionClient
            self.client = kind(model=self.llm.model, async_client=client)
            for name in self.names:
                text = await self.ask(name, text, stream)
        return text

    async def ask(self, name: str, text: str, stream: bool = False) -> str:
        tools = {"solver": [calculator], "boss": [self.ask_math, self.ask_echo]}.get(name)
        agent = Agent(self.client, f"You are {name}.", name=name, tools=tools)
        if not stream:
            return str((await agent.run(text)).text)
        return "".join([update.text async for update in agent.run(text, stream=True)])

    async def ask_math(self, text: str) -> str:
        """Ask the solver."""
        return await self.ask("solver", text)

    async def ask_echo(self, text: str) -> str:
        """Ask the echo."""
        return await self.ask("echo", text)


class TestAgentFramework(SpanContract):
    capabilities = frozenset(
        {
            "tools", "tool_call_ids", "stream", "pair", "nested", "spans", "threads", "cancel", "responses",
            "own_processor",
        }
    )  # fmt: skip

    def solver(self, llm: LLM, dialect: str = "chat") -> Runs:
        return Runs(llm, dialect, "solver")

    def pair(self, llm: LLM) -> Runs:
        return Runs(llm, "chat", "writer", "checker")

    def boss(self, llm: LLM) -> Runs:
        return Runs(llm, "chat", "boss")

    async def run(self, agent: Any, text: str, *, stream: bool = False) -> str:
        return await agent.run(text, stream)
