"""One framework's agents inside another's: whoever is about to call the model is named, whichever was imported first."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from lightning.instrument import activate, emit, install_tap
from lightning.plugins import plugins
from lightning.testing import ChatServer

pytestmark = pytest.mark.slow  # three frameworks are imported


def test_agents_of_others_in_a_node_of_langgraph() -> None:
    import agents
    from langgraph.graph import START, MessagesState, StateGraph
    from openai import AsyncOpenAI
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    Agent.instrument_all()
    with ChatServer(answer=lambda call: "42") as server, activate(server.llm()):
        llm = server.llm()
        undo = [install_tap(), plugins().install_adapters(emit, ["langchain", "openai-agents", "otel"])]

        async def node(state: Any) -> Any:
            async with AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
                model = OpenAIChatModel(llm.model, provider=OpenAIProvider(openai_client=client))
                await Agent(model, name="writer").run("hi")
                checker = agents.Agent("checker", model=agents.OpenAIChatCompletionsModel(llm.model, client))
                await agents.Runner.run(checker, "hi")
                await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": "hi"}])
            return {}

        graph = StateGraph(MessagesState)
        graph.add_node("node", node)
        graph.add_edge(START, "node")
        asyncio.run(graph.compile().ainvoke({"messages": [("user", "hi")]}))
        for each in undo:
            each()
    found = [(call.caller.agent, call.caller.framework) for call in server.calls]
    assert found == [("writer", "otel"), ("checker", "openai-agents"), ("node", "langchain")]
