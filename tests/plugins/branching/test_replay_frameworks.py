"""Agents of the frameworks run again as they were recorded: parallel nodes, handoffs in a stream, a team."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Annotated, Any, TypedDict

import agents
import httpx
import pytest
from lightning.testing import Reply, ToolCall, rollout
from lightning.types import LLM, Task
from lightning_branching.recorded import recorded_rollout
from lightning_branching.replay import ReplayResult, replay_agent

pytestmark = pytest.mark.framework

outputs: list[Any] = []


def recorded_and_replayed(agent: Callable[..., Any], script: Any) -> ReplayResult:
    outputs.clear()
    found = rollout(agent, Task("tides"), script)
    assert found.rollout.error == ""
    result = replay_agent(recorded_rollout(found.rollout, found.transitions, found.tool_events), agent)
    assert result.same, result
    before, now = outputs
    assert before == now
    return result


class State(TypedDict):
    topic: str
    done: Annotated[list[str], operator.add]


def test_langgraph_with_parallel_nodes() -> None:
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, StateGraph
    from langgraph.types import Send

    def graph(task: Task, llm: LLM) -> float:
        http = httpx.Client()
        model = ChatOpenAI(model=llm.model, base_url=llm.base_url, api_key=llm.api_key, http_client=http)  # type: ignore[arg-type]

        def write(state: dict[str, str]) -> dict[str, list[str]]:
            return {"done": [str(model.invoke(f"Write about {state['part']}").content)]}

        builder: Any = StateGraph(State)
        builder.add_node("writer", write)
        builder.add_node("joiner", lambda state: {"done": [model.invoke(" | ".join(state["done"])).content]})
        builder.add_conditional_edges(
            START, lambda state: [Send("writer", {"part": f"part {n}"}) for n in range(4)], ["writer"]
        )
        builder.add_edge("writer", "joiner")
        builder.add_edge("joiner", END)
        outputs.append(builder.compile().invoke({"topic": str(task.input), "done": []}))
        http.close()
        return 1.0

    result = recorded_and_replayed(graph, lambda body: Reply(f"<{body['messages'][-1]['content']}>"))
    assert result.answered == 5


def test_the_agents_sdk_with_a_handoff_in_a_stream() -> None:
    from agents import OpenAIChatCompletionsModel, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    async def streamed(task: Task, llm: LLM) -> float:
        async with AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
            model = OpenAIChatCompletionsModel(model=llm.model, openai_client=client)
            expert = agents.Agent(name="expert", instructions="answer", model=model)
            triage = agents.Agent(name="triage", instructions="hand off", model=model, handoffs=[expert])
            running = agents.Runner.run_streamed(triage, str(task.input))
            kinds = [event.type async for event in running.stream_events() if event.type != "raw_response_event"]
            outputs.append((running.final_output, running.last_agent.name, kinds))
        return 1.0

    script = [Reply(tool_calls=[ToolCall("transfer_to_expert", "{}")]), Reply("twice a day")]
    result = recorded_and_replayed(streamed, script)
    assert result.answered == 2
    assert outputs[0][:2] == ("twice a day", "expert")


@pytest.mark.filterwarnings("ignore:Resolved model mismatch")
def test_an_autogen_team() -> None:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.conditions import MaxMessageTermination
    from autogen_agentchat.teams import RoundRobinGroupChat
    from autogen_core.models import ModelInfo
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    async def team(task: Task, llm: LLM) -> float:
        info = ModelInfo(
            vision=False, function_calling=True, json_output=False, family="unknown", structured_output=False
        )
        client = OpenAIChatCompletionClient(
            model=llm.model, base_url=llm.base_url, api_key=llm.api_key, model_info=info
        )
        writer = AssistantAgent("writer", model_client=client, system_message="Write.")
        critic = AssistantAgent("critic", model_client=client, system_message="Criticise.")
        both = RoundRobinGroupChat([writer, critic], termination_condition=MaxMessageTermination(4))
        outputs.append([message.to_text() for message in (await both.run(task=str(task.input))).messages])  # type: ignore[union-attr]
        await client.close()
        return 1.0

    assert recorded_and_replayed(team, ["a poem", "too short", "a longer poem"]).answered == 3
