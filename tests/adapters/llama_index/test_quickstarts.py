"""LlamaIndex's own first examples, as its documentation has them, as rollouts in worker processes: every call gets its name.

Each agent function holds an example's code. It calls OpenAI's API by its address, so `runner.reroute` brings it to the policy.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from lightning.config import RunnerConfig
from lightning.testing import Reply, ToolCall
from lightning.types import LLM, Task

from tests.adapters.worker_rollouts import Left, run_in_worker


def starter(task: Task, llm: LLM) -> float:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai import OpenAI

    # Define a simple calculator tool
    def multiply(a: float, b: float) -> float:
        """Useful for multiplying two numbers."""
        return a * b

    # Create an agent workflow with our calculator tool
    agent = FunctionAgent(
        tools=[multiply],
        llm=OpenAI(model="gpt-4o-mini"),
        system_prompt="You are a helpful assistant that can multiply two numbers.",
    )

    async def main() -> str:
        # Run the agent
        response = await agent.run("What is 1234 * 4567?")
        return str(response)

    # Run the agent
    return float("5635678" in asyncio.run(main()))


def starter_with_rag(task: Task, llm: LLM) -> float:
    from llama_index.core import Document, Settings, VectorStoreIndex
    from llama_index.core.agent.workflow import AgentWorkflow
    from llama_index.core.embeddings import MockEmbedding
    from llama_index.llms.openai import OpenAI

    Settings.embed_model = MockEmbedding(embed_dim=4)  # the example has OpenAI's, and a folder of documents
    Settings.llm = OpenAI(model="gpt-4o-mini")

    # Create a RAG tool using LlamaIndex
    documents = [Document(text="He attended a painting class.")]
    index = VectorStoreIndex.from_documents(documents)
    query_engine = index.as_query_engine()

    def multiply(a: float, b: float) -> float:
        """Useful for multiplying two numbers."""
        return a * b

    async def search_documents(query: str) -> str:
        """Useful for answering natural language questions about an personal essay written by Paul Graham."""
        response = await query_engine.aquery(query)
        return str(response)

    # Create an enhanced workflow with both tools
    agent = AgentWorkflow.from_tools_or_functions(
        [multiply, search_documents],
        llm=OpenAI(model="gpt-4o-mini"),
        system_prompt="You can perform calculations and search through documents to answer questions.",
    )

    # Now we can ask questions about the documents or do calculations
    async def main() -> str:
        response = await agent.run("What did the author do in college? Also, what's 7 * 8?")
        return str(response)

    return float("painting" in asyncio.run(main()))


def report(task: Task, llm: LLM) -> float:
    from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent
    from llama_index.llms.openai import OpenAI

    model = OpenAI(model="gpt-4o")

    async def search_web(query: str) -> str:
        """Useful for using the web to answer questions."""
        return "It began in 1989."

    async def write_report(report_content: str) -> str:
        """Useful for writing a report on a given topic."""
        return "Report written."

    research_agent = FunctionAgent(
        name="ResearchAgent",
        description="Useful for searching the web for information on a given topic.",
        system_prompt="You are the ResearchAgent that can search the web. Hand off to the WriteAgent to write a report.",
        llm=model,
        tools=[search_web],
        can_handoff_to=["WriteAgent"],
    )
    write_agent = FunctionAgent(
        name="WriteAgent",
        description="Useful for writing a report on a given topic.",
        system_prompt="You are the WriteAgent that can write a report on a given topic.",
        llm=model,
        tools=[write_report],
        can_handoff_to=["ResearchAgent"],
    )

    agent_workflow = AgentWorkflow(agents=[research_agent, write_agent], root_agent=research_agent.name)

    async def main() -> str:
        return str(await agent_workflow.run(user_msg="Write me a report on the history of the internet."))

    return float(bool(asyncio.run(main())))


def joke_flow(task: Task, llm: LLM) -> float:
    from llama_index.core.workflow import Event, StartEvent, StopEvent, Workflow, step
    from llama_index.llms.openai import OpenAI

    class JokeEvent(Event):
        joke: str

    class JokeFlow(Workflow):
        llm = OpenAI(model="gpt-4.1")

        @step
        async def generate_joke(self, ev: StartEvent) -> JokeEvent:
            topic = ev.topic

            prompt = f"Write your best joke about {topic}."
            response = await self.llm.acomplete(prompt)
            return JokeEvent(joke=str(response))

        @step
        async def critique_joke(self, ev: JokeEvent) -> StopEvent:
            joke = ev.joke

            prompt = f"Give a thorough analysis and critique of the following joke: {joke}"
            response = await self.llm.acomplete(prompt)
            return StopEvent(result=str(response))

    async def main() -> str:
        w = JokeFlow(timeout=60, verbose=False)
        result = await w.run(topic="pirates")
        return str(result)

    return float(bool(asyncio.run(main())))


QUICKSTARTS: Mapping[str, Callable[[Task, LLM], float]] = {
    "starter": starter,
    "rag": starter_with_rag,
    "report": report,
    "joke": joke_flow,
}
TOOLS: Mapping[str, dict[str, str]] = {
    "multiply two numbers": {"multiply": '{"a": 1234, "b": 4567}'},
    "search through documents": {"search_documents": '{"query": "college"}'},
    "ResearchAgent that": {
        "search_web": '{"query": "internet"}',
        "handoff": '{"to_agent": "WriteAgent", "reason": "It is found."}',
    },
    "WriteAgent that": {"write_report": '{"report_content": "It began."}'},
}
"""What the model calls, by its instructions."""


def script(body: Mapping[str, Any]) -> Reply:
    """Call the next tool that has not been called; then answer with what the last one said."""
    said = str(body["messages"][0].get("content"))
    calls = [call["function"]["name"] for item in body["messages"] for call in item.get("tool_calls") or ()]
    tools = next((tools for words, tools in TOOLS.items() if words in said), {})
    left = [ToolCall(name, arguments, f"call-{name}") for name, arguments in tools.items() if name not in calls]
    return Reply(tool_calls=left[:1]) if left else Reply(f"It is this: {body['messages'][-1].get('content')}")


def any_quickstart(task: Task, llm: LLM) -> float:
    """The one that the task names."""
    return QUICKSTARTS[str(task.input)](task, llm)


@pytest.fixture(scope="module")
def left() -> dict[str, Left]:
    preload = ("llama_index.core.agent.workflow", "llama_index.llms.openai")
    config = RunnerConfig(concurrency=1, timeout=120, reroute=("api.openai.com",), preload=preload)
    return asyncio.run(run_in_worker(any_quickstart, list(QUICKSTARTS), script, config))


@pytest.mark.parametrize(
    ("name", "paths", "tools"),
    [
        ("starter", ["Agent", "Agent"], ["multiply"]),
        (
            "rag",
            ["Agent", "Agent/search_documents/RetrieverQueryEngine/CompactAndRefine", "Agent"],
            ["search_documents"],
        ),
        (
            "report",
            ["ResearchAgent", "ResearchAgent", "WriteAgent", "WriteAgent"],
            ["search_web", "handoff", "write_report"],
        ),
        ("joke", ["JokeFlow/generate_joke", "JokeFlow/critique_joke"], []),
    ],
)
def test_quickstart(name: str, paths: list[str], tools: list[str], left: dict[str, Left]) -> None:
    assert left[name].paths("llama-index") == paths
    assert [(event.name, event.status, event.call_id) for event in left[name].events] == [
        (tool, "ok", f"call-{tool}") for tool in tools
    ]
