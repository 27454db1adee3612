"""Strands agents, read by their spans, under the adapters' conformance kit."""

from __future__ import annotations

import contextlib
import os
from typing import Any

os.environ["OTEL_SEMCONV_STABILITY_OPT_IN"] = "gen_ai_latest_experimental"  # read with the first agent

import lightning_otel.spans
from lightning.types import LLM
from lightning_otel.attributes import OPERATION
from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel

from tests.adapters.pages.span_contract import SpanContract, calculator


class WithoutTools(OpenAIModel):
    """Leaves out the empty list of tools, which vLLM refuses."""

    def format_request(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {key: value for key, value in super().format_request(*args, **kwargs).items() if value != []}


def build(llm: LLM, name: str, *tools: Any, dialect: str = "chat") -> Agent:
    client = {"api_key": llm.api_key, "base_url": llm.base_url}
    kind = OpenAIResponsesModel if dialect == "responses" else WithoutTools
    return Agent(
        name=name,
        model=kind(client_args=client, model_id=llm.model),
        system_prompt=f"You are {name}.",
        tools=list(tools),
        callback_handler=None,
    )


class TestStrands(SpanContract):
    capabilities = frozenset(
        {
            "tools", "tool_call_ids", "stream", "pair", "nested", "spans", "threads", "cancel", "responses",
            "own_processor",
        }
    )  # fmt: skip

    def solver(self, llm: LLM, dialect: str = "chat") -> Agent:
        return build(llm, "solver", tool(calculator), dialect=dialect)

    def pair(self, llm: LLM) -> list[Agent]:
        return [build(llm, "writer"), build(llm, "checker")]

    def boss(self, llm: LLM) -> Agent:
        @tool
        async def ask_math(text: str) -> str:
            """Ask the solver."""
            return str(await self.solver(llm).invoke_async(text))

        @tool
        async def ask_echo(text: str) -> str:
            """Ask the echo."""
            return str(await build(llm, "echo").invoke_async(text))

        return build(llm, "boss", ask_math, ask_echo)

    async def run(self, agent: Any, text: str, *, stream: bool = False) -> str:
        for each in agent if isinstance(agent, list) else [agent]:
            if stream:
                async with contextlib.aclosing(each.stream_async(text)) as events:
                    async for event in events:
                        text = str(event["result"]) if "result" in event else text
            else:
                text = str(await each.invoke_async(text))
        return text

    def run_sync(self, agent: Any, text: str) -> str:
        return str(agent(text))

    def leftovers(self) -> object:
        # Strands does not end the span of a model call that is cancelled: it is known for as long as asyncio keeps a timer of
        # it, and names nobody, since its agent's span has ended.
        spans = lightning_otel.spans.open_spans._open.values()
        return [span for span in spans if (span.attributes or {}).get(OPERATION) != "chat"]
