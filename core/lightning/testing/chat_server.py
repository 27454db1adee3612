"""A chat server on loopback with canned answers, for tests of agents: no model, no vLLM, no patched HTTP.

The invariant: it records every request before it answers, so what a test reads is what was really sent.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from lightning.types import CALLER_HEADER, LLM, ROLLOUT_HEADER, Caller

PIECES = re.compile(r"\s*\S+|\s+")
"""Matches the pieces into which the stream of a text is cut: words with the space before them."""


@dataclass(frozen=True)
class ChatRequest:
    """One request. Header names are in lower case."""

    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The API key of the request."""
        return self.headers.get("authorization", "").removeprefix("Bearer ")

    @property
    def rollout(self) -> str | None:
        """The rollout token that the tap put into the headers; None without one."""
        return self.headers.get(ROLLOUT_HEADER)

    @property
    def caller(self) -> Caller | None:
        """The caller that the tap put into the headers; None without one."""
        text = self.headers.get(CALLER_HEADER)
        if text is None:
            return None
        fields = json.loads(text)
        return Caller(**{**fields, "path": tuple(fields.get("path", ()))})

    @property
    def text(self) -> str:
        """The content of the last message."""
        messages = self.body.get("messages") or self.body.get("input") or [{"content": ""}]
        return messages if isinstance(messages, str) else str(messages[-1]["content"])


@dataclass
class ChatServer:
    """Answers `POST .../chat/completions`, plain or streamed, with `answer(call)`; use it in a `with` block. Requests of
    Responses and Messages get answers in their own shapes, which the gateway's code makes of a chat answer.

    An `answer` that raises `ConnectionError` drops the connection, as a dying server does.
    """

    answer: Callable[[ChatRequest], str] = lambda call: f"you said {call.text}"
    calls: list[ChatRequest] = field(default_factory=list)
    connections: int = 0

    def __enter__(self) -> Self:
        self._server = _HTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def llm(self, key: str = "test-key", model: str = "policy") -> LLM:
        """Return the `llm` for an agent that is to call this server."""
        return LLM(f"http://127.0.0.1:{self._server.server_address[1]}/v1", key, model)


class _HTTPServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a dropped connection, which is meant or the client's business. Any other error is a fault of the test."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def _handler(server: ChatServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            server.connections += 1

        def do_POST(self) -> None:
            """Record the request, then answer it."""
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            call = ChatRequest(self.path, headers, json.loads(body or b"{}"))
            server.calls.append(call)
            text = server.answer(call)
            kind = "text/event-stream" if call.body.get("stream") else "application/json"
            self._reply(kind, *_answer(call, text))

        def _reply(self, kind: str, data: bytes, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 — http.server's name
            """Do not log requests."""

    return Handler


def _answer(call: ChatRequest, text: str) -> tuple[bytes, int]:
    """Return the body of the answer, and its status."""
    from lightning.config import GatewayConfig
    from lightning.gateway.gateway import spoken
    from lightning.gateway.http import RefusalError

    streams, route = bool(call.body.get("stream")), call.path.partition("?")[0]
    chat, *others = spoken(GatewayConfig())
    dialect = next((other for other in others if route.endswith(f"/v1{other.path}")), chat)
    try:
        _, translator = dialect.translate(dict(call.body), (), f"{dialect.id_prefix}1")
    except RefusalError as refusal:
        return dialect.refusal(refusal), refusal.status
    if translator is None:
        return _stream(call, text) if streams else json.dumps(_completion(call, text)).encode(), 200
    if not streams:
        return json.dumps(translator.whole(_completion(call, text))).encode(), 200
    return b"".join([*map(translator.chunk, _chunks(call, text)), translator.end()]), 200


def _completion(call: ChatRequest, text: str) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    return {**_head("chat.completion"), "choices": [choice], "usage": _usage(call, text)}


def _stream(call: ChatRequest, text: str) -> bytes:
    """Return the events of a stream. The usage is left out unless the request asks for it."""
    chunks = _chunks(call, text)
    if not (call.body.get("stream_options") or {}).get("include_usage"):
        chunks.pop()
    return "".join([*(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks), "data: [DONE]\n\n"]).encode()


def _chunks(call: ChatRequest, text: str) -> list[dict[str, Any]]:
    """Return a chunk for each word, then the finish, and the usage."""
    deltas: list[tuple[dict[str, str], str | None]] = [({"content": piece}, None) for piece in PIECES.findall(text)]
    chunks = [
        {**_head("chat.completion.chunk"), "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
        for delta, finish in [*deltas, ({}, "stop")]
    ]
    return [*chunks, {**_head("chat.completion.chunk"), "choices": [], "usage": _usage(call, text)}]


def _head(kind: str) -> dict[str, Any]:
    return {"id": "chat-1", "object": kind, "created": 0, "model": "policy"}


def _usage(call: ChatRequest, text: str) -> dict[str, int]:
    """Count a token for each word, since there is no tokenizer."""
    prompt = sum(len(str(message.get("content") or "").split()) for message in call.body.get("messages") or ())
    completion = len(text.split())
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
