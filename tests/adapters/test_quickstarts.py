"""The frameworks' own first examples, as their documentation has them, against a real vLLM: every call gets its name.

Each agent function holds the example's code; what it needs to know of the model it finds in the environment, where the
process runner puts it. The model is not trained, so what it says is noise: only who said it is looked at.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from lightning.config import GatewayConfig, RunnerConfig
from lightning.gateway import Gateway, Upstream
from lightning.policy_server.vllm_server import OwnedVLLM
from lightning.runner.lease_loop import work
from lightning.runner.process import ProcessRunner
from lightning.store.memory import MemoryStore
from lightning.types import LLM, Rollout, Run, Status, Task, Transition

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RUN = "quickstarts"


# LangChain ---------------------------------------------------------------------------------------------------------------
def langchain_agent(task: Task, llm: LLM) -> float:
    from langchain.agents import create_agent

    def get_weather(city: str) -> str:
        """Get weather for a given city."""
        return f"It's always sunny in {city}!"

    agent = create_agent(
        model="openai:policy",
        tools=[get_weather],
        system_prompt="You are a helpful assistant",
    )

    # Run the agent
    agent.invoke({"messages": [{"role": "user", "content": "what is the weather in sf"}]})
    return 1.0


def langgraph_agent(task: Task, llm: LLM) -> float:
    import operator
    from typing import Annotated, Literal, TypedDict

    from langchain.chat_models import init_chat_model
    from langchain.messages import AnyMessage, HumanMessage, SystemMessage, ToolMessage
    from langchain.tools import tool
    from langgraph.graph import END, START, StateGraph

    model = init_chat_model("openai:policy", temperature=0)

    @tool
    def multiply(a: int, b: int) -> int:
        """Multiply `a` and `b`."""
        return a * b

    tools_by_name = {multiply.name: multiply}
    model_with_tools = model.bind_tools([multiply])

    class MessagesState(TypedDict):
        messages: Annotated[list[AnyMessage], operator.add]
        llm_calls: int

    def llm_call(state: dict):  # type: ignore[type-arg, no-untyped-def]
        """LLM decides whether to call a tool or not"""
        system = "You are a helpful assistant tasked with performing arithmetic on a set of inputs."
        messages = [SystemMessage(content=system)] + state["messages"]
        return {"messages": [model_with_tools.invoke(messages)], "llm_calls": state.get("llm_calls", 0) + 1}

    def tool_node(state: dict):  # type: ignore[type-arg, no-untyped-def]
        """Performs the tool call"""
        result = []
        for tool_call in state["messages"][-1].tool_calls:
            observation = tools_by_name[tool_call["name"]].invoke(tool_call["args"])
            result.append(ToolMessage(content=observation, tool_call_id=tool_call["id"]))
        return {"messages": result}

    def should_continue(state: MessagesState) -> Literal["tool_node", "__end__"]:
        return "tool_node" if state["messages"][-1].tool_calls else END

    agent_builder = StateGraph(MessagesState)
    agent_builder.add_node("llm_call", llm_call)
    agent_builder.add_node("tool_node", tool_node)
    agent_builder.add_edge(START, "llm_call")
    agent_builder.add_conditional_edges("llm_call", should_continue, ["tool_node", END])
    agent_builder.add_edge("tool_node", "llm_call")
    agent = agent_builder.compile()

    agent.invoke({"messages": [HumanMessage(content="Add 3 and 4.")]})
    return 1.0


# OpenAI Agents SDK -------------------------------------------------------------------------------------------------------
def openai_agents_hello(task: Task, llm: LLM) -> float:
    from agents import Agent, Runner

    agent = Agent(name="Assistant", instructions="You are a helpful assistant")

    result = Runner.run_sync(agent, "Write a haiku about recursion in programming.")
    return float(result.final_output is not None)


def openai_agents_tutors(task: Task, llm: LLM) -> float:
    from agents import Agent, Runner, function_tool

    @function_tool
    def history_fun_fact() -> str:
        """Return a short history fact."""
        return "Sharks are older than trees."

    history_tutor_agent = Agent(
        name="History Tutor",
        handoff_description="Specialist agent for historical questions",
        instructions="You answer historical questions clearly and concisely.",
        tools=[history_fun_fact],
    )
    math_tutor_agent = Agent(
        name="Math Tutor",
        handoff_description="Specialist agent for math questions",
        instructions="You explain math step by step and include worked examples.",
    )
    triage_agent = Agent(
        name="Triage Agent",
        instructions="Route each homework question to the right specialist.",
        handoffs=[history_tutor_agent, math_tutor_agent],
    )

    Runner.run_sync(triage_agent, "Who was the first president of the United States?")
    return 1.0


# AutoGen -----------------------------------------------------------------------------------------------------------------
async def autogen_weather(task: Task, llm: LLM) -> float:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.ui import Console
    from autogen_core.models import ModelFamily, ModelInfo
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    # A model that AutoGen does not know by its name needs to be described.
    model_client = OpenAIChatCompletionClient(
        model="policy",
        base_url=llm.base_url,
        api_key=llm.api_key,
        model_info=ModelInfo(
            vision=False, function_calling=True, json_output=True, structured_output=True, family=ModelFamily.UNKNOWN
        ),
    )

    async def get_weather(city: str) -> str:
        """Get the weather for a given city."""
        return f"The weather in {city} is 73 degrees and Sunny."

    agent = AssistantAgent(
        name="weather_agent",
        model_client=model_client,
        tools=[get_weather],
        system_message="You are a helpful assistant.",
        reflect_on_tool_use=True,
        model_client_stream=True,  # Enable streaming tokens from the model client.
    )

    await Console(agent.run_stream(task="What is the weather in New York?"))
    await model_client.close()
    return 1.0


# PydanticAI --------------------------------------------------------------------------------------------------------------
def pydantic_ai_hello(task: Task, llm: LLM) -> float:
    from pydantic_ai import Agent

    Agent.instrument_all()

    agent = Agent(
        "openai:policy",
        instructions="Be concise, reply with one sentence.",
    )

    result = agent.run_sync('Where does "hello world" come from?')
    return float(bool(result.output))


QUICKSTARTS: Mapping[str, Callable[[Task, LLM], float]] = {
    "langchain": langchain_agent,
    "langgraph": langgraph_agent,
    "openai-agents": openai_agents_hello,
    "openai-agents with handoffs": openai_agents_tutors,
    "autogen": autogen_weather,
    "pydantic-ai": pydantic_ai_hello,
}


def any_quickstart(task: Task, llm: LLM) -> float:
    """The one that the task names. The Agents SDK refuses what ends at the token limit, as this model's answers do."""
    try:
        return QUICKSTARTS[str(task.input)](task, llm)
    except Exception as error:
        if type(error).__name__ != "ModelBehaviorError" or "max_output_tokens" not in str(error):
            raise
        return 0.0


@pytest.fixture(scope="module")
def calls(real_vllm: Any) -> Mapping[str, list[Transition] | str]:
    """Each quickstart's calls, or why it failed: one rollout each in a worker process, with every adapter that is found."""
    return asyncio.run(_run_all(real_vllm.vllm))


async def _run_all(vllm: OwnedVLLM) -> Mapping[str, list[Transition] | str]:
    store = MemoryStore()
    await store.open()
    await store.put_run(Run(RUN, RUN))
    await store.create_rollouts([Rollout(name, RUN, Task(name), name, max_attempts=1) for name in QUICKSTARTS])
    config = RunnerConfig(concurrency=1, timeout=300)
    runner = ProcessRunner(any_quickstart, config)
    settings = GatewayConfig(override_sampling={"max_tokens": 16})
    gateway = Gateway(store, [Upstream(vllm.url, vllm.model)], settings, secret=b"s" * 32, version=vllm.version)
    await gateway.start()
    await runner.start()
    try:
        await work(store, runner, RUN, gateway.llm, worker="w", config=config, line=gateway.parts.line)
    finally:
        await runner.close()
        await gateway.close()
    rollouts = (await store.list_rollouts(RUN)).items
    return {
        rollout.id: await store.transitions(rollout.id, 1) if rollout.status is Status.SUCCEEDED else rollout.error
        for rollout in rollouts
    }


def callers(calls: list[Transition] | str) -> list[tuple[str, str]]:
    """Framework and path of every call, each of which has its tokens."""
    assert not isinstance(calls, str), calls
    for call in calls:
        assert call.prompt_ids
        assert len(call.response_ids) == len(call.logprobs) > 0
    return [(call.caller.framework, "/".join(call.caller.path)) for call in calls]


def test_langchain(calls: Mapping[str, list[Transition] | str]) -> None:
    assert set(callers(calls["langchain"])) == {("langchain", "agent")}


def test_langgraph(calls: Mapping[str, list[Transition] | str]) -> None:
    assert set(callers(calls["langgraph"])) == {("langchain", "llm_call")}


def test_openai_agents(calls: Mapping[str, list[Transition] | str]) -> None:
    """Both by the SDK's own default, the Responses API."""
    assert set(callers(calls["openai-agents"])) == {("openai-agents", "Assistant")}
    assert callers(calls["openai-agents with handoffs"])[0] == ("openai-agents", "Triage Agent")


def test_autogen(calls: Mapping[str, list[Transition] | str]) -> None:
    """Streamed, by AutoGen's own adapter."""
    assert set(callers(calls["autogen"])) == {("autogen", "weather_agent")}


def test_pydantic_ai(calls: Mapping[str, list[Transition] | str]) -> None:
    """By the adapter for what emits OpenTelemetry's spans; PydanticAI takes the name from the variable."""
    assert set(callers(calls["pydantic-ai"])) == {("otel", "agent")}
