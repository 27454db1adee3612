"""A text-to-SQL agent as LangGraph's documentation would write it: write, execute, check, and rewrite while it is wrong.

Nothing in this file knows that it is being trained: `llm` only says where the model is.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, TypedDict, cast

from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from lightning_examples.sql_langchain.execution import execute, matches, show

if TYPE_CHECKING:
    from lightning import LLM, Task

WRITE = "Write one SQLite query that answers the question."
CHECK = "Does the query answer the question? Say CORRECT or WRONG."
REWRITE = "The query is wrong. Write another one."
MAX_REWRITES = 1
MAX_TOKENS = 160


class State(TypedDict):
    """What the nodes share."""

    question: str
    schema: str
    database: str
    query: str
    result: str
    verdict: str
    rewrites: int


def build_graph(model: ChatOpenAI, max_rewrites: int = MAX_REWRITES) -> CompiledStateGraph[State]:
    """The agent: `write` -> `execute` -> `check` -> (`rewrite` -> `execute` -> `check`)*."""

    def write(state: State) -> dict[str, object]:
        reply = model.invoke([("system", WRITE), ("user", first_prompt(state))])
        return {"query": query_in(str(reply.content)), "rewrites": 0}

    def execute_query(state: State) -> dict[str, object]:
        return {"result": show(execute(state["database"], state["query"]))}

    def check(state: State) -> dict[str, object]:
        reply = model.invoke([("system", CHECK), ("user", review_prompt(state))])
        return {"verdict": str(reply.content)}

    def rewrite(state: State) -> dict[str, object]:
        reply = model.invoke([("system", REWRITE), ("user", review_prompt(state))])
        return {"query": query_in(str(reply.content)), "rewrites": state["rewrites"] + 1}

    def decide(state: State) -> Literal["rewrite", "__end__"]:
        correct = re.search(r"\bCORRECT\b", state["verdict"])
        return "__end__" if correct or state["rewrites"] == max_rewrites else "rewrite"

    graph = StateGraph(State)
    graph.add_node("write", write)
    graph.add_node("execute", execute_query)
    graph.add_node("check", check)
    graph.add_node("rewrite", rewrite)
    graph.add_edge(START, "write")
    graph.add_edge("write", "execute")
    graph.add_edge("execute", "check")
    graph.add_conditional_edges("check", decide)
    graph.add_edge("rewrite", "execute")
    return graph.compile()


def agent(task: Task, llm: LLM) -> float:
    """Answer one question; the reward is 1.0 if the last query's result is the reference query's, else 0.0."""
    model = ChatOpenAI(base_url=llm.base_url, api_key=llm.api_key, model=llm.model, max_completion_tokens=MAX_TOKENS)
    state = build_graph(model).invoke(cast("State", task.input))
    return float(matches(state["query"], str(task.expected), state["database"]))


def first_prompt(state: State) -> str:
    """What `write` is asked."""
    return f"{state['schema']}\nQuestion: {state['question']}"


def review_prompt(state: State) -> str:
    """What `check` and `rewrite` are asked."""
    return f"{first_prompt(state)}\nQuery: {state['query']}\nResult: {state['result']}"


def query_in(reply: str) -> str:
    """The query of a reply: what stands in its code block, else all of it."""
    block = re.search(r"```(?:sqlite|sql)?\s*(.*?)\s*```", reply, re.S | re.I)
    return (block[1] if block else reply).strip()
