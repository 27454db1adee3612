"""PydanticAI's agents, for which lightning has no line of its own, under the adapters' conformance kit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import lightning_otel.spans
import openai
from lightning.testing import AdapterContract
from lightning.types import LLM
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from pydantic_ai import Agent, ModelRetry
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

# As a user's module does: before anything of ours is installed, and before anybody has set a provider.
Agent.instrument_all()


def calculator(expression: str) -> str:
    """Evaluate a product."""
    if expression == "bad":
        raise ModelRetry("bad expression")
    left, right = expression.split("*")
    return str(int(left) * int(right))


class Runs:
    """Agents together with the client to close after them."""

    def __init__(self, run: Callable[[Runs, str, bool], Any], llm: LLM, dialect: str = "chat") -> None:
        self._run, self.llm, self.dialect = run, llm, dialect

    def agent(self, name: str, tools: Any = ()) -> Agent:
        kind = OpenAIResponsesModel if self.dialect == "responses" else OpenAIChatModel
        model = kind(self.llm.model, provider=OpenAIProvider(openai_client=self.client))
        return Agent(model, name=name, system_prompt=f"You are {name}.", tools=tools, retries=3)

    async def run(self, text: str, stream: bool) -> str:
        async with openai.AsyncOpenAI(base_url=self.llm.base_url, api_key=self.llm.api_key) as self.client:
            return await self._run(self, text, stream)


async def solve(runs: Runs, text: str, stream: bool) -> str:
    agent = runs.agent("solver", [calculator])
    if not stream:
        return str((await agent.run(text)).output)
    async with agent.run_stream(text) as result:
        return str(await result.get_output())


async def write_and_check(runs: Runs, text: str, stream: bool) -> str:
    draft = await runs.agent("writer").run(text)
    return str((await runs.agent("checker").run(draft.output)).output)


async def delegate(runs: Runs, text: str, stream: bool) -> str:
    async def ask_math(text: str) -> str:
        """Ask the solver."""
        return await solve(runs, text, False)

    async def ask_echo(text: str) -> str:
        """Ask the echo."""
        return str((await runs.agent("echo").run(text)).output)

    return str((await runs.agent("boss", [ask_math, ask_echo]).run(text)).output)


class Own(SpanProcessor):
    """The user's own processor."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def on_end(self, span: object) -> None:
        self.seen.append(span)


class TestPydanticAI(AdapterContract):
    adapter = "otel"
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

    def solver(self, llm: LLM, dialect: str = "chat") -> Runs:
        return Runs(solve, llm, dialect)

    def pair(self, llm: LLM) -> Runs:
        return Runs(write_and_check, llm)

    def boss(self, llm: LLM) -> Runs:
        return Runs(delegate, llm)

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
        return len(lightning_otel.spans.open_spans)
