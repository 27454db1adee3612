"""Agents of the frameworks branch at a call in their middle: eight valid branches that begin bit for bit as their parent did,
and none where a clock is in the prompts before."""

from __future__ import annotations

import datetime as dt
import itertools
import operator
from collections.abc import Callable
from typing import Annotated, Any, TypedDict

import httpx
import pytest
from lightning.testing import Reply, ToolCall
from lightning.types import LLM, Task
from lightning_branching.recorded import is_void

from tests.plugins.branching.branching import brancher

pytestmark = pytest.mark.framework

BRANCHES = 8
SECONDS = itertools.count(0, 7)
START = dt.datetime(2026, 11, 26, 14, 2, 11, tzinfo=dt.UTC)
Agent = Callable[[Task, LLM], Any]


def clock() -> str:
    """Another time each time it is asked."""
    return (START + dt.timedelta(seconds=next(SECONDS))).strftime("It is %H:%M:%S. ")


def nothing() -> str:
    return ""


def plain(now: Callable[[], str]) -> Agent:
    """Four calls, each with all that was said."""

    def agent(task: Task, llm: LLM) -> float:
        said = f"{now()}{task.input}"
        for _ in range(4):
            body = {"model": llm.model, "messages": [{"role": "user", "content": said}]}
            headers = {"authorization": f"Bearer {llm.api_key}"}
            reply = httpx.post(f"{llm.base_url}/chat/completions", json=body, headers=headers, timeout=60)
            if reply.is_error:
                raise RuntimeError(reply.json()["error"]["message"])
            said += f" | {reply.json()['choices'][0]['message']['content']}"
        return float(len(said))

    return agent


class State(TypedDict):
    done: Annotated[list[str], operator.add]


def langgraph(now: Callable[[], str]) -> Agent:
    """Three writers at once, then a joiner and a critic."""
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, StateGraph
    from langgraph.types import Send

    def agent(task: Task, llm: LLM) -> float:
        with httpx.Client() as http:
            model = ChatOpenAI(model=llm.model, base_url=llm.base_url, api_key=llm.api_key, http_client=http)  # type: ignore[arg-type]

            def ask(text: str) -> dict[str, list[str]]:
                return {"done": [str(model.invoke(text).content)]}

            builder: Any = StateGraph(State)
            builder.add_node("writer", lambda state: ask(f"{now()}Write {state['part']} of {task.input}"))
            builder.add_node("joiner", lambda state: ask("Join " + " | ".join(sorted(state["done"]))))
            builder.add_node("critic", lambda state: ask(f"Criticise {state['done'][-1]}"))
            parts = [Send("writer", {"part": f"part {number}"}) for number in range(3)]
            builder.add_conditional_edges(START, lambda state: parts, ["writer"])
            builder.add_edge("writer", "joiner")
            builder.add_edge("joiner", "critic")
            builder.add_edge("critic", END)
            return float(len(builder.compile().invoke({"done": []})["done"]))

    return agent


def openai_agents(now: Callable[[], str]) -> Agent:
    """A tool, then a handoff, in a stream."""
    import agents
    from agents import OpenAIChatCompletionsModel, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    @agents.function_tool
    def tide(port: str) -> str:
        """When the tide is high."""
        return f"{port}: at noon"

    async def agent(task: Task, llm: LLM) -> float:
        async with AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
            model = OpenAIChatCompletionsModel(model=llm.model, openai_client=client)
            expert = agents.Agent(name="expert", instructions="answer", model=model)
            triage = agents.Agent(
                name="triage", instructions=f"{now()}hand off", model=model, handoffs=[expert], tools=[tide]
            )
            running = agents.Runner.run_streamed(triage, str(task.input))
            async for _ in running.stream_events():
                pass
            return float(len(str(running.final_output)))

    return agent


def autogen(now: Callable[[], str]) -> Agent:
    """A team of two, two turns each."""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.conditions import MaxMessageTermination
    from autogen_agentchat.teams import RoundRobinGroupChat
    from autogen_core.models import ModelInfo
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info = ModelInfo(vision=False, function_calling=True, json_output=False, family="unknown", structured_output=False)

    async def agent(task: Task, llm: LLM) -> float:
        client = OpenAIChatCompletionClient(
            model=llm.model, base_url=llm.base_url, api_key=llm.api_key, model_info=info
        )
        writer = AssistantAgent("writer", model_client=client, system_message=f"{now()}Write.")
        critic = AssistantAgent("critic", model_client=client, system_message="Criticise.")
        team = RoundRobinGroupChat([writer, critic], termination_condition=MaxMessageTermination(5))
        try:
            messages = (await team.run(task=str(task.input))).messages
        finally:
            await client.close()
        return float(sum(len(message.to_text()) for message in messages))  # type: ignore[union-attr]

    return agent


def reply_to(body: Any) -> Reply:
    """The Agents SDK's agents are told by their instructions: first the tool, then the expert."""
    messages = body["messages"]
    system = str(messages[0]["content"]) if messages[0]["role"] == "system" else ""
    if "hand off" not in system:
        return Reply(f"said {next(ANSWERS)}", delay=0.2 if "Write part" in str(messages[-1]["content"]) else 0.0)
    if messages[-1]["role"] == "tool":
        return Reply(tool_calls=[ToolCall("transfer_to_expert", "{}", f"call_{next(ANSWERS)}")])
    return Reply(tool_calls=[ToolCall("tide", '{"port": "Brest"}', f"call_{next(ANSWERS)}")])


ANSWERS = itertools.count()


@pytest.mark.filterwarnings("ignore:Resolved model mismatch")
@pytest.mark.parametrize(
    ("make", "count", "at"), [(plain, 4, 3), (langgraph, 5, 4), (openai_agents, 3, 2), (autogen, 4, 3)]
)
def test_eight_branches_at_a_call_in_the_middle(make: Callable[..., Agent], count: int, at: int) -> None:
    with brancher(reply_to, adapters=None) as made:
        agent = make(nothing)
        parent = made.run(agent)
        assert parent.rollout.error == ""
        assert len(parent.calls) == count
        for _ in range(BRANCHES):
            before = made.sampled
            found = made.run(agent, parent=parent.key(at))
            assert found.rollout.error == ""
            assert found.rollout.reward is not None
            assert len(found.calls) == made.sampled - before == count - at + 1
            assert list(found.calls[0].prompt_ids) == list(parent.calls[at - 1].prompt_ids)
            assert found.calls[0].caller.name == parent.calls[at - 1].caller.name


@pytest.mark.filterwarnings("ignore:Resolved model mismatch")
@pytest.mark.parametrize(("make", "at"), [(plain, 3), (langgraph, 4), (openai_agents, 2), (autogen, 3)])
def test_a_clock_before_the_call_makes_them_void_by_name(make: Callable[..., Agent], at: int) -> None:
    with brancher(reply_to, adapters=None) as made:
        agent = make(clock)
        parent = made.run(agent)
        assert parent.rollout.error == ""
        before = made.sampled
        found = made.run(agent, parent=parent.key(at))
        assert is_void(found.rollout)
        assert "Suspect: the clock" in found.rollout.error
        assert found.rollout.reward is None
        assert made.sampled == before
