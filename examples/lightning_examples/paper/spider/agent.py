"""The graph of `sql_langchain` with room for a real model: longer replies, and two rewrites."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from langchain_openai import ChatOpenAI

from lightning_examples.sql_langchain.agent import State, build_graph
from lightning_examples.sql_langchain.execution import matches

if TYPE_CHECKING:
    from lightning import LLM, Task

MAX_REWRITES = 2
"""Three queries in all, as in Agent Lightning's own example of Spider (`max_turns=3`)."""
MAX_TOKENS = 1024
"""For a reply: a query, and what the model says about it. Published: 2,048, for prompts that ask for an analysis first."""


def agent(task: Task, llm: LLM) -> float:
    """Answer one question; the reward is Spider's execution match: 1.0 if the last query's result is right, else 0.0."""
    model = ChatOpenAI(base_url=llm.base_url, api_key=llm.api_key, model=llm.model, max_completion_tokens=MAX_TOKENS)
    state = build_graph(model, MAX_REWRITES).invoke(cast("State", task.input))
    return float(matches(state["query"], str(task.expected), state["database"]))
