"""Agents in plain Python, with the openai and anthropic clients, under the adapters' conformance kit."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import anthropic
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


class ResponsesAgent(Agent):
    """The same loop over the Responses API."""

    async def loop(self, client: openai.AsyncOpenAI, text: str, stream: bool) -> str:
        options: Any = {"model": self.llm.model, "instructions": f"You are {self.name}."}
        options["tools"] = [{"type": "function", **item["function"], "strict": False} for item in self.schemas]
        items: list[Any] = [{"role": "user", "content": text}]
        while True:
            if stream:
                async with client.responses.stream(**options, input=items) as events:
                    response = await events.get_final_response()
            else:
                response = await client.responses.create(**options, input=items)
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return str(response.output_text)
            items += [
                {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments}
                for call in calls
            ]
            for call in calls:
                asked = {"id": call.call_id, "function": {"name": call.name, "arguments": call.arguments}}
                output = (await self.result(asked))["content"]
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})


class MessagesAgent(Agent):
    """The same loop over the Messages API, with Anthropic's client."""

    async def __call__(self, text: str, *, stream: bool = False) -> str:
        url = self.llm.base_url.removesuffix("/v1")
        with lightning.component(self.name):
            async with anthropic.AsyncAnthropic(base_url=url, api_key=self.llm.api_key) as client:
                return await self.converse(client, text, stream)

    async def converse(self, client: anthropic.AsyncAnthropic, text: str, stream: bool) -> str:
        options: Any = {"model": self.llm.model, "max_tokens": 100, "system": f"You are {self.name}."}
        options["tools"] = [
            {"name": item["function"]["name"], "input_schema": item["function"]["parameters"]} for item in self.schemas
        ]
        messages: list[Any] = [{"role": "user", "content": text}]
        while True:
            if stream:
                async with client.messages.stream(**options, messages=messages) as events:
                    reply: Any = await events.get_final_message()
            else:
                reply = await client.messages.create(**options, messages=messages)
            calls = [block for block in reply.content if block.type == "tool_use"]
            if not calls:
                return "".join(block.text for block in reply.content if block.type == "text")
            uses = [{"type": "tool_use", "id": call.id, "name": call.name, "input": call.input} for call in calls]
            results = []
            for call in calls:
                asked = {"id": call.id, "function": {"name": call.name, "arguments": json.dumps(call.input)}}
                output = (await self.result(asked))["content"]
                results.append({"type": "tool_result", "tool_use_id": call.id, "content": output})
            messages += [{"role": "assistant", "content": uses}, {"role": "user", "content": results}]


LOOPS = {"chat": Agent, "responses": ResponsesAgent, "messages": MessagesAgent}


class TestRaw(AdapterContract):
    adapter = "raw"
    capabilities = frozenset(
        {"tools", "cancel", "stream", "pair", "nested", "threads", "responses", "messages", "own_processor"}
    )

    def solver(self, llm: LLM, dialect: str = "chat") -> Agent:
        return LOOPS[dialect]("solver", llm, {"calculator": calculator}, [schema("calculator", "expression")])

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
