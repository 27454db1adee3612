"""The first examples of smolagents' guided tour, with a rollout's model in the place of the tour's: every call is named."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lightning.instrument import ActiveAttempt, activate, emit, install_tap
from lightning.plugins import plugins
from lightning.testing import ChatServer
from smolagents import CodeAgent, OpenAIModel, WebSearchTool


def code(text: str) -> str:
    return f"Thoughts: I write code.\n<code>\n{text}\n</code>"


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer() as running:
        yield running


@pytest.fixture
def session(server: ChatServer) -> Iterator[ActiveAttempt]:
    undo = [install_tap(), plugins().install_adapters(emit, ["smolagents"])]
    with activate(server.llm()) as active:
        yield active
    for each in undo:
        each()


@pytest.fixture
def model(server: ChatServer) -> Iterator[OpenAIModel]:
    llm = server.llm()
    made = OpenAIModel(model_id=llm.model, api_base=llm.base_url, api_key=llm.api_key)
    with made.client:
        yield made


def paths(server: ChatServer) -> list[str]:
    return [
        "/".join(call.caller.path) for call in server.calls if call.caller and call.caller.framework == "smolagents"
    ]


def test_building_your_agent(session: ActiveAttempt, server: ChatServer, model: OpenAIModel) -> None:
    fibonacci = "a, b = 0, 1\nfor _ in range(118):\n    a, b = b, a + b\nprint(a)"
    says = iter([code(fibonacci), code("final_answer(a)")])
    server.answer = lambda call: next(says)

    agent = CodeAgent(tools=[], model=model, stream_outputs=True)

    answer = agent.run(
        "Could you give me the 118th number in the Fibonacci sequence?",
    )

    assert answer == 2046711111473984623691759
    assert paths(server) == ["CodeAgent"] * 2
    assert [(event.name, event.status) for event in session.tool_events] == [("python_interpreter", "ok")] * 2


def test_multi_agents(session: ActiveAttempt, server: ChatServer, model: OpenAIModel) -> None:
    def answer(call: object) -> str:
        last = server.calls[-1].caller
        if last is not None and last.agent == "web_search_agent":
            return code("final_answer('Clem Delangue')")
        return code("final_answer(web_search_agent('Who is the CEO of Hugging Face?'))")

    server.answer = answer

    web_agent = CodeAgent(
        tools=[WebSearchTool()],
        model=model,
        name="web_search_agent",
        description="Runs web searches for you. Give it your query as an argument.",
    )

    manager_agent = CodeAgent(tools=[], model=model, managed_agents=[web_agent])

    said = manager_agent.run("Who is the CEO of Hugging Face?")

    assert "Clem Delangue" in str(said)
    assert paths(server) == ["CodeAgent", "CodeAgent/web_search_agent"]
    assert [(event.name, event.status) for event in session.tool_events] == [
        ("python_interpreter", "ok"), ("web_search_agent", "ok"), ("python_interpreter", "ok"),
    ]  # fmt: skip
