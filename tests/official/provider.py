"""A provider of what is not the policy's: OpenAI's embeddings, made from the letters of a text.

The invariant: nothing of a rollout may reach it, so it keeps the keys that it was asked with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

KEY = "sk-of-the-provider"


@contextmanager
def provider() -> Iterator[tuple[str, list[str]]]:
    """Its base URL, and the keys of the requests so far."""
    keys: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            keys.append(self.headers.get("authorization", "").removeprefix("Bearer "))
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self._answer(*(_embeddings(body) if self.path.endswith("/embeddings") else _unknown(self.path)))

        def _answer(self, status: int, answer: dict[str, Any]) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", keys
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _embeddings(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": [float(text.lower().count(chr(97 + at))) for at in range(26)],
        }
        for index, text in enumerate(texts)
    ]
    usage = {"prompt_tokens": 1, "total_tokens": 1}
    return 200, {"object": "list", "data": data, "model": body["model"], "usage": usage}


def _unknown(path: str) -> tuple[int, dict[str, Any]]:
    return 404, {"error": {"message": f"no {path} here", "type": "invalid_request_error"}}
