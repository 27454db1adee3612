"""Agents in plain Python, with the openai and anthropic clients, under the adapters' conformance kit."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning
import openai
from lightning.testing import AdapterContract
from lightning.types import LLM

Message = dict[str, Any]
SEEN: list[list[object]] = []


@lightning.tool
def calculator(expression: str) -> str:
    if expression == "bad":
        raise ValueError("bad expression")
    left, right = expression.split("*")
    return str(int(left) * int(right))


def schema(name: str, parameter: str) -> Message:
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


@dataclass
class Agent:
    """A loop around the model, as one writes it without a framework."""

    name: str
    llm: LLM
    tools: dict[str, Callable[[str], str | Awaitable[str]]] = field(default_factory=dict)
    schemas: list[Message] = field(default_factory=list)

    async def __call__(self, text: str, *, stream: bool = False) -> str:
        with lightning.component(self.name):
            async with openai.AsyncOpenAI(base_url=self.llm.base_url, api_key=self.llm.api_key) as client:
                return await self.loop(client, text, stream)

    async def loop(self, client: openai.AsyncOpenAI, text: str, stream: bool) -> str:
        messages: list[Message] = [
            {"role": "system", "content": f"You are {self.name}."},
            {"role": "user", "content": text},
        ]
        while True:
            message = await self.ask(client, messages, stream)
            for seen in SEEN:
                seen.append(message)
            if not message.get("tool_calls"):
                return str(message["content"])
            messages.append(message)
            messages += await asyncio.gather(*(self.result(call) for call in message["tool_calls"]))

    async def ask(self, client: openai.AsyncOpenAI, messages: list[Message], stream: bool) -> Message:
        options: Any = {"model": self.llm.model, "messages": messages}
        if self.schemas:
            options["tools"] = self.schemas
        if not stream:
            reply = await client.chat.completions.create(**options)
            return reply.choices[0].message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
        async with client.chat.completions.stream(**options) as events:
            final = await events.get_final_completion()
        return final.choices[0].message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)

    async def result(self, call: Message) -> Message:
        (argument,) = json.loads(call["function"]["arguments"]).values()
        try:
            output = self.tools[call["function"]["name"]](argument)
            text = output if isinstance(output, str) else await output
        except ValueError as error:
            text = f"error: {error}"
        return {"role": "tool", "tool_call_id": call["id"], "content": text}


class Anthropic(Agent):
    """The same loop with another client."""


class TestRaw(AdapterContract):
    adapter = "raw"
    capabilities = frozenset({"tools", "stream", "pair", "nested", "threads", "own_processor"})

    def solver(self, llm: LLM, dialect: str = "chat") -> Agent:
        return Agent("solver", llm, {"calculator": calculator}, [schema("calculator", "expression")])

    def pair(self, llm: LLM) -> Callable[..., Awaitable[str]]:
        async def both(text: str, *, stream: bool = False) -> str:
            return await Agent("checker", llm)(await Agent("writer", llm)(text))

        return both

    def boss(self, llm: LLM) -> Agent:
        @lightning.tool
        async def ask_math(text: str) -> str:
            return await self.solver(llm)(text)

        @lightning.tool
        async def ask_echo(text: str) -> str:
            return await Agent("echo", llm)(text)

        tools = {"ask_math": ask_math, "ask_echo": ask_echo}
        return Agent("boss", llm, tools, [schema(name, "text") for name in tools])

    async def run(self, agent: Any, text: str, *, stream: bool = False) -> str:
        return await agent(text, stream=stream)

    @contextlib.contextmanager
    def own_processor(self) -> Iterator[list[object]]:
        seen: list[object] = []
        SEEN.append(seen)
        yield seen
        SEEN.remove(seen)
