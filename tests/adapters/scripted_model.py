"""A model of a script behind httpx's clients, for a framework's own client of OpenAI: it notes who is calling when a request is
sent."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx
from lightning.instrument import current_caller
from lightning.types import Caller

URL = "http://127.0.0.1:1/v1"
Say = str | Mapping[str, Mapping[str, Any]] | httpx.Response
"""What the model says: a text, tools to call with their arguments (their ids are `call-NAME`), or a whole response."""


class Scripted:
    """A model. `answer` is a list of what it says, in order, or says it for each request; callers of other frameworks than the
    named one are nobody."""

    def __init__(self, framework: str, answer: list[Say] | Callable[[Mapping[str, Any]], Say]) -> None:
        self.framework = framework
        rest = list(answer) if isinstance(answer, list) else []
        self.answer = answer if callable(answer) else lambda _: rest.pop(0)
        self.callers: list[Caller | None] = []
        self.bodies: list[Mapping[str, Any]] = []
        self.client = httpx.Client(transport=httpx.MockTransport(self._reply))
        self.async_client = httpx.AsyncClient(transport=httpx.MockTransport(self._reply_later))
        self.pause: Callable[[], Awaitable[object]] = _at_once
        """What it waits for before it answers who awaits it."""

    def ask(self) -> None:
        """A request that the framework knows nothing of."""
        self.client.post(f"{URL}/chat/completions", json={"messages": []})

    def paths(self) -> list[str | None]:
        """Who called, in order."""
        return [caller and "/".join(caller.path) for caller in self.callers]

    async def _reply_later(self, request: httpx.Request) -> httpx.Response:
        reply = self._reply(request)
        await self.pause()
        return reply

    def _reply(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        caller = current_caller()
        self.callers.append(caller if caller and caller.framework == self.framework else None)
        self.bodies.append(body)
        said = self.answer(body)
        if isinstance(said, httpx.Response):
            return said
        calls = [
            {"id": f"call-{name}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for name, arguments in ({} if isinstance(said, str) else said).items()
        ]
        text = said if isinstance(said, str) else None
        if not body.get("stream"):
            message = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
            return httpx.Response(200, json=_about("chat.completion", {"index": 0, "message": message}))
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": text}]
        deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(calls)]
        chunks = [json.dumps(_about("chat.completion.chunk", {"index": 0, "delta": delta})) for delta in deltas]
        events = "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"])
        return httpx.Response(200, content=events, headers={"content-type": "text/event-stream"})


async def _at_once() -> None:
    """Nothing."""


def _about(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    choice["finish_reason"] = None if "delta" in choice else "stop"
    return {"id": "chat-1", "created": 0, "model": "policy", "object": kind, "choices": [choice]}
