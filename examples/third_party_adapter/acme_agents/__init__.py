"""Acme Agents, a framework that does not exist: agents with tools over the openai client, and listeners that watch them.

It knows nothing of lightning. Agents run their tools in parallel, an agent can be another agent's tool, and `stream`
gives the text as it comes. A listener hears of every run (of an agent, a model call, a tool) when it starts and ends.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Self

import openai

__version__ = "1.2.0"

Message = dict[str, Any]
_current: ContextVar[Run | None] = ContextVar("acme_run", default=None)
_listeners: list[Listener] = []
_numbers = itertools.count(1)


@dataclass(eq=False)
class Run:
    """One run of an agent, of a model call or of a tool; `kind` says which. `call_id` is the model's id for a tool run."""

    kind: str
    name: str
    parent: Run | None
    input: Any = None
    call_id: str = ""
    output: Any = None
    error: BaseException | None = None
    id: str = field(default_factory=lambda: f"run-{next(_numbers)}")

    def __enter__(self) -> Self:
        _current.set(self)
        for listener in tuple(_listeners):
            listener.on_start(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.error = self.error or error
        _current.set(self.parent)
        for listener in tuple(_listeners):
            listener.on_end(self)


class Listener:
    """Watches runs, in the very task in which they happen."""

    def on_start(self, run: Run) -> None:
        """A run begins."""

    def on_end(self, run: Run) -> None:
        """A run has ended: `output`, or `error`, is set."""


def add_listener(listener: Listener) -> None:
    """Attach a listener to all agents."""
    _listeners.append(listener)


def remove_listener(listener: Listener) -> None:
    """Take a listener away."""
    _listeners.remove(listener)


@dataclass
class Model:
    """Which model to call, and where."""

    base_url: str
    api_key: str
    name: str


@dataclass
class Agent:
    """A model with instructions and tools: functions of one text, whose exceptions the model gets as text."""

    name: str
    model: Model
    instructions: str
    tools: list[Callable[[str], Any]] = field(default_factory=list)

    def as_tool(self, name: str) -> Callable[[str], Any]:
        """This agent as a tool of another one."""

        async def ask(text: str) -> str:
            return await self.run(text)

        ask.__name__ = name
        return ask

    async def run(self, text: str) -> str:
        """The agent's final text."""
        return "".join([piece async for piece in self._loop(text, stream=False)])

    async def stream(self, text: str) -> AsyncIterator[str]:
        """The same in pieces."""
        async for piece in self._loop(text, stream=True):
            yield piece

    async def _loop(self, text: str, *, stream: bool) -> AsyncIterator[str]:
        messages: list[Message] = [
            {"role": "system", "content": self.instructions},
            {"role": "user", "content": text},
        ]
        client = openai.AsyncOpenAI(base_url=self.model.base_url, api_key=self.model.api_key)
        async with client:
            with Run("agent", self.name, _current.get(), text) as run:
                while True:
                    with Run("model", self.model.name, run) as call:
                        async for piece in self._ask(client, messages, call, stream=stream):
                            yield piece
                    message = call.output
                    if not message.get("tool_calls"):
                        run.output = message["content"]
                        return
                    messages.append(message)
                    messages += await asyncio.gather(*(self._tool(run, item) for item in message["tool_calls"]))

    async def _ask(
        self, client: openai.AsyncOpenAI, messages: list[Message], call: Run, *, stream: bool
    ) -> AsyncIterator[str]:
        if stream:
            async with client.chat.completions.stream(**self._options(messages)) as events:
                async for event in events:
                    if event.type == "content.delta":
                        yield event.delta
                reply = await events.get_final_completion()
        else:
            reply = await client.chat.completions.create(**self._options(messages))
            yield reply.choices[0].message.content or ""
        said = reply.choices[0].message
        call.output = {"role": "assistant", "content": said.content}
        if said.tool_calls:
            call.output["tool_calls"] = [
                {
                    "id": item.id,
                    "type": "function",
                    "function": {"name": item.function.name, "arguments": item.function.arguments},
                }
                for item in said.tool_calls
            ]

    def _options(self, messages: list[Message]) -> dict[str, Any]:
        options: dict[str, Any] = {"model": self.model.name, "messages": messages}
        return {**options, "tools": [_schema(tool) for tool in self.tools]} if self.tools else options

    async def _tool(self, run: Run, call: Message) -> Message:
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        with Run("tool", name, run, arguments, call["id"]) as used:
            try:
                (tool,) = (tool for tool in self.tools if tool.__name__ == name)
                output = tool(*arguments.values())
                used.output = await output if inspect.isawaitable(output) else output
            except Exception as error:  # noqa: BLE001 — the model is told, and may do better
                used.error = error
        text = str(used.output) if used.error is None else f"error: {used.error}"
        return {"role": "tool", "tool_call_id": call["id"], "content": text}


def _schema(tool: Callable[[str], Any]) -> Message:
    (parameter,) = inspect.signature(tool).parameters
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    function = {"name": tool.__name__, "description": tool.__doc__ or tool.__name__, "parameters": parameters}
    return {"type": "function", "function": function}
