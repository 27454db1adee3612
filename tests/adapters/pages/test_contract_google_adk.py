"""Google ADK's agents, read by their spans, under the adapters' conformance kit."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
from google.adk.agents import LlmAgent, RunConfig
from google.adk.agents.run_config import StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.adk.telemetry.context import ContentCapturingMode, TelemetryConfig
from google.genai import types
from lightning.types import LLM

from tests.adapters.pages.span_contract import SpanContract, calculator

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # LiteLLM asks GitHub for prices as it is first used

pytestmark = [
    pytest.mark.filterwarnings("ignore:Item .* on TypedDict class:UserWarning"),  # LiteLLM's, of its own types
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

TELEMETRY = TelemetryConfig(capture_message_content=ContentCapturingMode.SPAN_ONLY)


def say(tool: object, args: object, tool_context: object, error: Exception) -> dict[str, str]:
    """Tell the model what a tool raised, in ADK's way."""
    return {"error": str(error)}


def build(llm: LLM, name: str, *tools: Any) -> LlmAgent:
    model = LiteLlm(f"openai/{llm.model}", api_base=llm.base_url, api_key=llm.api_key)
    return LlmAgent(
        name=name, model=model, instruction=f"You are {name}.", tools=list(tools), on_tool_error_callback=say
    )


async def answer(agent: LlmAgent, text: str, stream: bool = False) -> str:
    runner = InMemoryRunner(agent, app_name="kit")
    session = await runner.session_service.create_session(app_name="kit", user_id="user")
    message = types.Content(role="user", parts=[types.Part(text=text)])
    config = RunConfig(streaming_mode=StreamingMode.SSE if stream else StreamingMode.NONE, telemetry=TELEMETRY)
    events = runner.run_async(user_id="user", session_id=session.id, new_message=message, run_config=config)
    said = ""
    async with contextlib.aclosing(events):
        async for event in events:
            if event.is_final_response() and event.content and event.content.parts:
                said = event.content.parts[0].text or ""
    return said


class TestGoogleADK(SpanContract):
    capabilities = frozenset(
        {"tools", "tool_call_ids", "stream", "pair", "nested", "spans", "threads", "cancel", "own_processor"}
    )

    def solver(self, llm: LLM, dialect: str = "chat") -> LlmAgent:
        return build(llm, "solver", calculator)

    def pair(self, llm: LLM) -> list[LlmAgent]:
        return [build(llm, "writer"), build(llm, "checker")]

    def boss(self, llm: LLM) -> LlmAgent:
        async def ask_math(text: str) -> str:
            """Ask the solver."""
            return await answer(self.solver(llm), text)

        async def ask_echo(text: str) -> str:
            """Ask the echo."""
            return await answer(build(llm, "echo"), text)

        return build(llm, "boss", ask_math, ask_echo)

    async def run(self, agent: Any, text: str, *, stream: bool = False) -> str:
        for each in agent if isinstance(agent, list) else [agent]:
            text = await answer(each, text, stream)
        return text
