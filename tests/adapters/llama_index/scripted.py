"""LlamaIndex's own client of OpenAI-like servers in front of a script, which notes who is calling when a request is sent."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx
from lightning.instrument import current_caller
from lightning.types import Caller
from llama_index.llms.openai_like import OpenAILike

Say = str | Mapping[str, Mapping[str, Any]]
"""What the model says: a text, or tools to call with their arguments; their ids are `call-NAME`."""


class Scripted:
    """A model. `answer` is a list of what it says, in order, or says it for each request."""

    def __init__(self, answer: list[Say] | Callable[[Mapping[str, Any]], Say]) -> None:
        rest = list(answer) if isinstance(answer, list) else []
        self.answer = answer if callable(answer) else lambda _: rest.pop(0)
        self.callers: list[Caller | None] = []
        self.bodies: list[Mapping[str, Any]] = []
        self._sync = httpx.Client(transport=httpx.MockTransport(self._reply))
        self._async = httpx.AsyncClient(transport=httpx.MockTransport(self._reply))

    def llm(self, **options: Any) -> OpenAILike:
        """The client, for agents and query engines."""
        options = {"is_chat_model": True, "is_function_calling_model": True, **options}
        clients = {"http_client": self._sync, "async_http_client": self._async}
        return OpenAILike("policy", api_base="http://127.0.0.1:1/v1", api_key="key", **clients, **options)

    def ask(self) -> None:
        """A request that LlamaIndex knows nothing of."""
        self._sync.post("http://127.0.0.1:1/v1/chat/completions", json={"messages": []})

    def paths(self) -> list[str | None]:
        """Who called, in order."""
        return [caller and "/".join(caller.path) for caller in self.callers]

    def _reply(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        caller = current_caller()
        self.callers.append(caller if caller and caller.framework == "llama-index" else None)
        self.bodies.append(body)
        said = self.answer(body)
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


def _about(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    choice["finish_reason"] = None if "delta" in choice else "stop"
    return {"id": "chat-1", "created": 0, "model": "policy", "object": kind, "choices": [choice]}
