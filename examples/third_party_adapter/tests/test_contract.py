"""Acme's agents under lightning's conformance kit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import acme_agents
import lightning_acme
from lightning.testing import AdapterContract
from lightning.types import LLM


def calculator(expression: str) -> str:
    """Multiplies two integers, as in `6 * 7`."""
    if expression == "bad":
        raise ValueError("bad expression")
    left, right = expression.split("*")
    return str(int(left) * int(right))


class Watcher(acme_agents.Listener):
    """A user's own listener."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def on_end(self, run: acme_agents.Run) -> None:
        self.seen.append(run)


class TestAcme(AdapterContract):
    adapter = "acme"
    capabilities = frozenset(
        {"tools", "tool_call_ids", "cancel", "stream", "pair", "nested", "spans", "threads", "own_processor"}
    )

    def agent(self, name: str, llm: LLM, *tools: Any) -> acme_agents.Agent:
        model = acme_agents.Model(llm.base_url, llm.api_key, llm.model)
        return acme_agents.Agent(name, model, f"You are {name}.", list(tools))

    def solver(self, llm: LLM, dialect: str = "chat") -> acme_agents.Agent:
        return self.agent("solver", llm, calculator)

    def pair(self, llm: LLM) -> list[acme_agents.Agent]:
        return [self.agent("writer", llm), self.agent("checker", llm)]

    def boss(self, llm: LLM) -> acme_agents.Agent:
        echo = self.agent("echo", llm).as_tool("ask_echo")
        return self.agent("boss", llm, self.solver(llm).as_tool("ask_math"), echo)

    async def run(self, agent: Any, text: str, *, stream: bool = False) -> str:
        for one in agent if isinstance(agent, list) else [agent]:
            text = "".join([piece async for piece in one.stream(text)]) if stream else await one.run(text)
        return text

    @contextlib.contextmanager
    def own_processor(self) -> Iterator[list[object]]:
        watcher = Watcher()
        acme_agents.add_listener(watcher)
        yield watcher.seen
        acme_agents.remove_listener(watcher)

    def leftovers(self) -> object:
        return [item for item in acme_agents._listeners if isinstance(item, lightning_acme.LightningListener)]
