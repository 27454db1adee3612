"""The conformance kit, for LlamaIndex's function agents."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from lightning.testing import AdapterContract
from lightning.types import LLM
from lightning_llama_index.spans import steps
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.workflow import Event, StartEvent, StopEvent, Workflow, step
from llama_index.llms.openai import OpenAIResponses
from llama_index.llms.openai_like import OpenAILike
from llama_index_instrumentation.span_handlers import NullSpanHandler

# LlamaIndex looks at all attributes of its own agents, also at those that pydantic has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")


def calculator(expression: str) -> str:
    """Evaluate a product."""
    if expression == "bad":
        raise ValueError("bad expression")
    left, right = expression.split("*")
    return str(int(left) * int(right))


def model(llm: LLM, dialect: str) -> FunctionCallingLLM:
    if dialect == "responses":
        return OpenAIResponses("gpt-5-mini", api_base=llm.base_url, api_key=llm.api_key)
    return OpenAILike(
        llm.model, api_base=llm.base_url, api_key=llm.api_key, is_chat_model=True, is_function_calling_model=True
    )


class Agents:
    """One that is run, and all whose clients are closed after it."""

    def __init__(self, llm: LLM, dialect: str = "chat") -> None:
        self.llm, self.dialect = llm, dialect
        self.all: list[FunctionAgent] = []
        self.first: Workflow

    def agent(self, name: str, *tools: Any) -> FunctionAgent:
        made = FunctionAgent(
            name=name, tools=list(tools), llm=model(self.llm, self.dialect), system_prompt=f"You are {name}."
        )
        self.all.append(made)
        return made

    async def run(self, text: str, stream: bool) -> str:
        for agent in self.all:
            agent.streaming = stream
        handler = self.first.run(user_msg=text)
        running = asyncio.ensure_future(handler)
        try:
            await asyncio.wait({running})
            return str(running.result())
        except asyncio.CancelledError:  # LlamaIndex leaves the steps of a run alone whose awaiting task is cancelled
            await handler.cancel_run()
            await asyncio.wait({running})
            running.exception()
            raise
        finally:
            for agent in self.all:
                if agent.llm._aclient:
                    await agent.llm._aclient.close()


class Drafted(Event):
    draft: str


class Pair(Workflow):
    """A workflow of two agents."""

    def __init__(self, writer: FunctionAgent, checker: FunctionAgent) -> None:
        super().__init__()
        self.writer, self.checker = writer, checker

    @step
    async def write(self, event: StartEvent) -> Drafted:
        return Drafted(draft=str(await self.writer.run(event.user_msg)))

    @step
    async def check(self, event: Drafted) -> StopEvent:
        return StopEvent(result=str(await self.checker.run(event.draft)))


class Listener(NullSpanHandler):
    """The user's own."""

    def span_enter(self, *_: Any, **__: Any) -> None:
        seen.append("began")

    def span_exit(self, *_: Any, **__: Any) -> None:
        seen.append("ended")


seen: list[object] = []


class TestLlamaIndex(AdapterContract):
    adapter = "llama-index"
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
    results_as_tools_end = True

    def solver(self, llm: LLM, dialect: str = "chat") -> Agents:
        agents = Agents(llm, dialect)
        agents.first = agents.agent("solver", calculator)
        return agents

    def pair(self, llm: LLM) -> Agents:
        agents = Agents(llm)
        agents.first = Pair(agents.agent("writer"), agents.agent("checker"))
        return agents

    def boss(self, llm: LLM) -> Agents:
        agents = Agents(llm)
        solver, echo = agents.agent("solver", calculator), agents.agent("echo")

        async def ask_math(text: str) -> str:
            """Ask the solver."""
            return str(await solver.run(text))

        async def ask_echo(text: str) -> str:
            """Ask the echo."""
            return str(await echo.run(text))

        agents.first = agents.agent("boss", ask_math, ask_echo)
        return agents

    async def run(self, agent: Any, text: str, *, stream: bool = False) -> str:
        return await agent.run(text, stream)

    @contextlib.contextmanager
    def own_processor(self) -> Iterator[list[object]]:
        seen.clear()
        listener = Listener()
        get_dispatcher().add_span_handler(listener)
        try:
            yield seen
        finally:
            get_dispatcher().span_handlers.remove(listener)

    def leftovers(self) -> object:
        return dict(steps.open)
