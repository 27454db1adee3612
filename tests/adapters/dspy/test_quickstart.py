"""The first examples of DSPy's home page, with the model of a rollout in the place of the page's: every call is named."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator

import dspy
import pytest
from lightning.instrument import ActiveAttempt, activate, emit, install_tap
from lightning.plugins import plugins
from lightning.testing import ChatServer
from lightning.testing.chat_server import ChatRequest

ANSWERS = {
    "answer": "0.5",
    "next_thought": "I know it.",
    "next_tool_name": "evaluate_math",
    "next_tool_args": '{"expression": "1 / 2"}',
    "section_subheadings": json.dumps({"Hosts": ["Korea", "Japan"], "Final": ["Goals"]}),
    "sections": '["Hosts", "Final"]',
}
FIELD = re.compile(r"`\[\[ ## (\w+) ## \]\]`")


def answer(call: ChatRequest) -> str:
    """Fills in every field that is asked for; a `ReAct` is finished after its first tool."""
    fields = [name for name in FIELD.findall(call.text) if name != "completed"]
    said = {name: ANSWERS.get(name, "words") for name in fields}
    if "[[ ## observation_0 ## ]]" in call.text and "next_tool_name" in said:
        said |= {"next_tool_name": "finish", "next_tool_args": "{}"}
    return "".join(f"[[ ## {name} ## ]]\n{text}\n\n" for name, text in said.items()) + "[[ ## completed ## ]]"


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer(answer) as running:
        yield running


@pytest.fixture
def session(server: ChatServer) -> Iterator[ActiveAttempt]:
    undo = [install_tap(), plugins().install_adapters(emit, ["dspy"])]
    llm = server.llm()
    lm = dspy.LM(f"openai/{llm.model}", api_base=llm.base_url, api_key=llm.api_key, cache=False)
    with activate(llm) as active, contextlib.closing(lm), dspy.context(lm=lm):
        yield active
    for each in undo:
        each()


def paths(server: ChatServer) -> list[str]:
    return ["/".join(call.caller.path) for call in server.calls if call.caller and call.caller.framework == "dspy"]


def test_math(session: ActiveAttempt, server: ChatServer) -> None:
    math = dspy.ChainOfThought("question -> answer: float")
    said = math(question="Two dice are tossed. What is the probability that the sum equals two?")

    assert said.answer == 0.5
    assert paths(server) == ["ChainOfThought"]


def test_agents(session: ActiveAttempt, server: ChatServer) -> None:
    def evaluate_math(expression: str) -> float:
        left, right = expression.split("/")
        return float(left) / float(right)

    def search_wikipedia(query: str) -> list[str]:
        return [f"A page about {query}."]

    react = dspy.ReAct("question -> answer: float", tools=[evaluate_math, search_wikipedia])

    pred = react(question="What is 9362158 divided by the year of birth of David Gregory of Kinnairdy castle?")

    assert pred.answer == 0.5
    assert paths(server) == ["ReAct"] * 3
    assert [(event.name, event.status, event.output) for event in session.tool_events] == [
        ("evaluate_math", "ok", "0.5")
    ]


class Outline(dspy.Signature):
    """Outline a thorough overview of a topic."""

    topic: str = dspy.InputField()
    title: str = dspy.OutputField()
    sections: list[str] = dspy.OutputField()
    section_subheadings: dict[str, list[str]] = dspy.OutputField(desc="mapping from section headings to subheadings")


class DraftSection(dspy.Signature):
    """Draft a top-level section of an article."""

    topic: str = dspy.InputField()
    section_heading: str = dspy.InputField()
    section_subheadings: list[str] = dspy.InputField()
    content: str = dspy.OutputField(desc="markdown-formatted section")


class DraftArticle(dspy.Module):
    def __init__(self) -> None:
        self.build_outline = dspy.ChainOfThought(Outline)
        self.draft_section = dspy.ChainOfThought(DraftSection)

    def forward(self, topic: str) -> dspy.Prediction:
        outline = self.build_outline(topic=topic)
        sections = []
        for heading, subheadings in outline.section_subheadings.items():
            section, subheadings = f"## {heading}", [f"### {subheading}" for subheading in subheadings]
            section = self.draft_section(topic=outline.title, section_heading=section, section_subheadings=subheadings)
            sections.append(section.content)
        return dspy.Prediction(title=outline.title, sections=sections)


def test_multi_stage_pipelines(session: ActiveAttempt, server: ChatServer) -> None:
    draft_article = DraftArticle()
    article = draft_article(topic="World Cup 2002")

    assert article.sections == ["words", "words"]
    assert paths(server) == ["build_outline", "draft_section", "draft_section"]
