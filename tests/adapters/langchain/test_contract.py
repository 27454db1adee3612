"""The conformance kit, for LangChain and LangGraph agents as their documentation writes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import ToolRetryMiddleware
from langchain_anthropic import ChatAnthropic
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import SystemMessage
from langchain_core.tools import StructuredTool, tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from lightning.testing import AdapterContract
from lightning.types import LLM
from lightning_langchain import callback


@tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    if expression == "bad":
        raise ValueError("bad expression")
    return str(eval(expression, {}))


def model(llm: LLM, dialect: str = "chat") -> BaseChatModel:
    if dialect == "messages":
        url = llm.base_url.removesuffix("/v1")
        return ChatAnthropic(model_name=llm.model, base_url=url, api_key=llm.api_key, max_tokens_to_sample=64)
    responses = dialect == "responses"
    return ChatOpenAI(model=llm.model, base_url=llm.base_url, api_key=llm.api_key, use_responses_api=responses)


def agent(name: str, llm: LLM, *tools: Any, dialect: str = "chat") -> Any:
    retry = [ToolRetryMiddleware(max_retries=0, on_failure="continue")]
    return create_agent(
        model(llm, dialect), list(tools), system_prompt=f"You are {name}.", name=name, middleware=retry if tools else []
    )


def text_of(result: Any) -> str:
    return str(result["messages"][-1].text)


def as_tool(name: str, inner: Any) -> StructuredTool:
    def ask(text: str) -> str:
        return text_of(inner.invoke({"messages": [("user", text)]}))

    async def ask_async(text: str) -> str:
        return text_of(await inner.ainvoke({"messages": [("user", text)]}))

    return StructuredTool.from_function(ask, ask_async, name=name, description=f"{name}.")


class Listener(BaseCallbackHandler):
    """The user's own."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def on_chat_model_start(self, *_: Any, **__: Any) -> None:
        self.seen.append("model")

    def on_tool_end(self, output: Any, **_: Any) -> None:
        self.seen.append(output)


class TestLangChain(AdapterContract):
    adapter = "langchain"
    of_the_user: tuple[BaseCallbackHandler, ...] = ()
    capabilities = frozenset(
        {
            "tools",
            "tool_call_ids",
            "cancel",
            "stream",
            "pair",
            "nested",
            "spans",
            "threads",
            "responses",
            "messages",
            "own_processor",
        }
    )

    def solver(self, llm: LLM, dialect: str = "chat") -> Any:
        return agent("solver", llm, calculator, dialect=dialect)

    def pair(self, llm: LLM) -> Any:
        chat, graph = model(llm), StateGraph(MessagesState)

        def node(name: str) -> Any:
            def step(state: MessagesState) -> MessagesState:
                return {"messages": [chat.invoke([SystemMessage(f"You are {name}."), *state["messages"]])]}

            return step

        for name in ("writer", "checker"):
            graph.add_node(name, node(name))
        graph.add_edge(START, "writer")
        graph.add_edge("writer", "checker")
        return graph.compile()

    def boss(self, llm: LLM) -> Any:
        tools = as_tool("ask_math", self.solver(llm)), as_tool("ask_echo", agent("echo", llm))
        return agent("boss", llm, *tools)

    async def run(self, agent: Any, text: str, *, stream: bool = False) -> str:
        asked, config = {"messages": [("user", text)]}, {"callbacks": list(self.of_the_user)}
        if not stream:
            return text_of(await agent.ainvoke(asked, config))
        *_, (_, last) = [part async for part in agent.astream(asked, config, stream_mode=["messages", "values"])]
        return text_of(last)

    def run_sync(self, agent: Any, text: str) -> str:
        return text_of(agent.invoke({"messages": [("user", text)]}))

    @contextlib.contextmanager
    def own_processor(self) -> Iterator[list[object]]:
        listener = Listener()
        self.of_the_user = (listener,)
        try:
            yield listener.seen
        finally:
            self.of_the_user = ()

    def leftovers(self) -> object:
        return callback._runs
