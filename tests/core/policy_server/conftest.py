"""Shared by the policy server's tests: a tiny model folder, and a stand-in that answers vLLM's control routes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from lightning.testing.tiny_models import make_tiny_model

SERVER_INFO = """{
  "vllm_config": {
    "model_config": {"logprobs_mode": "processed_logprobs", "generation_config": "vllm", "override_generation_config": {},
      "dtype": "torch.float32"},
    "parallel_config": {"distributed_executor_backend": "uni",
      "worker_extension_cls": "lightning.policy_server.worker.WorkerExtension"},
    "scheduler_config": {"async_scheduling": false},
    "device_config": {"device": "cpu"}
  },
  "vllm_env": {"VLLM_SERVER_DEV_MODE": true},
  "system_env": {}
}"""


@dataclass
class FakeVLLM:
    """Records what it is asked; `fail[route or method]` says how often it shall answer with an error."""

    url: str = ""
    calls: list[str] = field(default_factory=list)
    fail: dict[str, int] = field(default_factory=dict)
    version: int | None = 0
    weights: tuple[str, ...] = ()
    claim: str = ""
    paused: bool = False
    health: int = 200
    counts: dict[str, int] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    routes: bool = True
    engines: int = 1
    """Data parallel, of two workers each."""
    tool_parser: bool = True
    info: dict[str, Any] = field(default_factory=lambda: json.loads(SERVER_INFO))
    """What /server_info?config_format=json says: the parts of vLLM 0.31's answer that are read."""
    answers: dict[str, Callable[[web.Request], Awaitable[web.Response]]] = field(default_factory=dict)
    """Routes that a test answers itself."""

    def fails(self, name: str) -> bool:
        left = self.fail.get(name, 0)
        self.fail[name] = left - 1
        return left > 0

    async def handle(self, request: web.Request) -> web.Response:
        path = request.path
        if path == "/health":
            return web.Response(status=self.health)
        if path == "/v1/chat/completions":
            refusal = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
            return web.json_response({"error": {"message": refusal}}, status=200 if self.tool_parser else 400)
        if path == "/v1/models":
            return web.json_response({"data": [{"id": "someone's"}]})
        if path == "/v1/completions" and path not in self.answers:
            body = await request.json()
            self.calls.append("probe")
            rows = [
                {str(token): {"logprob": value}} for token, value in zip(body["prompt"], self.logprobs, strict=True)
            ]
            return web.json_response({"choices": [{"prompt_logprobs": [None, *rows[1:]]}]})
        if not self.routes:
            return web.Response(status=404)
        if path == "/server_info" and path not in self.answers:
            assert request.query["config_format"] == "json"
            return web.json_response(self.info)
        if path == "/is_paused":
            return web.json_response({"is_paused": self.paused})
        if path == "/collective_rpc":
            body = await request.json()
            self.calls.append(body["method"].removeprefix("lightning_"))
            return web.json_response({"results": [self.rpc(body["method"], body["args"])]})
        self.calls.append(path.strip("/"))
        if self.fails(path):
            return web.Response(status=500, text="it broke")
        if path in self.answers:
            return await self.answers[path](request)
        if path == "/get_world_size":
            return web.json_response({"world_size": 2 * (self.engines if request.query["include_dp"] == "true" else 1)})
        self.paused = {"/pause": True, "/resume": False}.get(path, self.paused)
        if path == "/pause":
            assert request.query["mode"] == "keep"
        return web.json_response({"success": True})

    def rpc(self, method: str, args: list[str]) -> dict[str, object]:
        if method in ("lightning_load", "lightning_set_version"):
            claim, *args = args
            if claim != self.claim:
                return {"owner": self.claim}
        if method == "lightning_load":
            assert self.paused
            self.version = None
        if self.fails(method):
            return {"error": f"{method} broke"}
        if method == "lightning_load":
            self.weights = tuple(args)
        if method == "lightning_set_version":
            self.version = int(args[0])
        if method == "lightning_in_flight":
            assert self.paused
            return {"counts": self.counts, "randomized": True}
        if method == "lightning_claim":
            before, (claim, *over) = self.claim, args
            if over and before not in ("", *over):
                return {"owner": before}
            self.claim = claim
            return {"version": self.version, "before": before}
        return {"version": self.version, "claim": self.claim}


@pytest.fixture
async def fake() -> AsyncIterator[FakeVLLM]:
    server = FakeVLLM()
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny untied model folder; never write to it."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny folder with tied word embeddings; never write to it."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture
def alter(tmp_path: Path) -> Callable[[Path, Callable[[dict[str, object]], None]], Path]:
    """Write a changed copy of a folder's weights: `alter(folder, change)` with `change(tensors)` in place."""
    from safetensors.torch import load_file, save_file

    def write(folder: Path, change: Callable[[dict[str, object]], None]) -> Path:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "altered.safetensors")
        return tmp_path / "altered.safetensors"

    return write
