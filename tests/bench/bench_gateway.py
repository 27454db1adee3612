"""The gateway beside a direct connection and beside the naive way: FastAPI + httpx, which authenticates and records nothing.

Every server is a process of its own; CPU is what the process itself used (user + system), so the load generator, the backend
and a busy machine do not count. The backend answers with about 28 KB (1,000 prompt ids, 212 response ids, logprobs), as vLLM
does when asked for ids; "ours" includes checking the token, stripping what the agent did not ask for, and a durable commit to
SQLite before the answer. Then: time to the first byte of a stream, and a thousand calls at once against a backend that takes
a second.

    python tests/bench/bench_gateway.py [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
from aiohttp import web
from lightning import asyncio_utils

if TYPE_CHECKING:
    from lightning.gateway import Gateway
    from lightning.store.protocol import Store
    from lightning.types import Rollout

PROMPT, RESPONSE, BODIES = int(os.environ.get("BENCH_PROMPT", "1000")), 212, 64
"""Ids of a prompt and of an answer, and different answers of the backend."""
ROLLOUTS = 512
CALLS, CONCURRENCIES = 1000, (16, 64)
STREAMS, TOKENS = 300, 32
MANY, BACKEND_SECONDS = 1000, float(os.environ.get("BENCH_SECONDS", "1"))
WARM, ALONE = 100, 30
"""Calls that warm a server up, and streams that are measured one at a time."""
TURNS, BRANCHES = 8, 96
"""Calls of a parent, and its branches at the last of them."""
MESSAGES = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "word " * 700}]


# servers, each run as `bench_gateway.py --role NAME ...` ----------------------------------------------------------
def canned(number: int, rng: random.Random) -> dict[str, Any]:
    """One answer as vLLM gives it when ids and logprobs are asked for."""
    entries = [
        {"token": "word", "logprob": -rng.expovariate(1.0), "bytes": [119, 111, 114, 100], "top_logprobs": []}
        for _ in range(RESPONSE)
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "word" * RESPONSE, "refusal": None, "reasoning": None},
        "logprobs": {"content": entries},
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": [rng.randrange(150_000) for _ in range(RESPONSE)],
    }
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 1,
        "model": "tiny",
        "choices": [choice],
        "usage": {"prompt_tokens": PROMPT, "completion_tokens": RESPONSE, "total_tokens": PROMPT + RESPONSE},
        "prompt_token_ids": [rng.randrange(150_000) for _ in range(PROMPT)],
    }


async def backend(announce: Callable[[object], None]) -> None:
    """Canned answers, streams of 32 tokens, and a path that takes a second."""
    rng = random.Random(0)
    bodies = [json.dumps(canned(number, rng), separators=(",", ":")).encode() for number in range(BODIES)]
    counter = {"served": 0, "in_flight": 0, "peak": 0, "slow": 0}

    async def chat(request: web.Request) -> web.StreamResponse:
        asked = json.loads(await request.read())
        counter["served"] += 1
        if asked.get("stream"):
            return await stream(request)
        if asked.get("user") == "slow":
            counter["in_flight"] += 1
            counter["peak"] = max(counter["peak"], counter["in_flight"])
            await asyncio.sleep(BACKEND_SECONDS)
            counter["in_flight"] -= 1
        said = len(asked["messages"])  # a conversation that comes again has the same prompt again
        number = said if said > len(MESSAGES) else counter["served"]
        return web.Response(body=bodies[number % BODIES], content_type="application/json")

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        frame = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
        for number in range(TOKENS):
            choice = {
                "index": 0,
                "delta": {"content": "word"},
                "logprobs": {"content": [{"token": "word", "logprob": -0.5, "bytes": [1, 2], "top_logprobs": []}]},
                "finish_reason": "stop" if number == TOKENS - 1 else None,
                "token_ids": [number],
            }
            chunk = {**frame, "choices": [choice], **({"prompt_token_ids": [1, 2, 3]} if number == 0 else {})}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await asyncio.sleep(0.005)
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/health", lambda _: asyncio.sleep(0, web.Response()))
    app.router.add_get("/v1/models", lambda _: asyncio.sleep(0, web.json_response({"data": [{"id": "tiny"}]})))
    app.router.add_get("/peak", lambda _: asyncio.sleep(0, web.json_response(counter)))
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=75)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    announce({"url": f"http://127.0.0.1:{runner.addresses[0][1]}", "tokens": ["direct"], "body_bytes": len(bodies[0])})
    await asyncio.Event().wait()


async def ours(announce: Callable[[object], None], upstream: str, policies: Sequence[str] = ()) -> None:
    """The gateway over a SQLite file; with `policies`, of a run in which the first of them answers all agents but one."""
    from lightning.types import Rollout, Task

    rollouts = [Rollout(id=f"r{i}", run="run", task=Task(input=i), group=f"g{i // 8}") for i in range(ROLLOUTS)]
    async with gateway_over_sqlite(upstream, policies) as (gateway, store):
        announce({"url": gateway.url, "tokens": await keys(gateway, store, rollouts)})
        await asyncio.Event().wait()


async def branches(announce: Callable[[object], None], upstream: str) -> None:
    """The same with branches of one rollout at its last call."""
    from lightning.types import Outcome, Rollout, Task

    async with gateway_over_sqlite(upstream) as (gateway, store):
        (key,) = await keys(gateway, store, [Rollout(id="parent", run="run", task=Task(input=0), group="g")])
        server = Server(psutil.Process(), gateway.url, [key])
        async with session() as http:
            await conversation(http, server, 0)
        calls = await store.transitions("parent")
        await store.complete("parent", 1, Outcome(reward=1.0))
        made = [
            Rollout(id=f"b{i}", run="run", task=Task(input=0), group="g", parent=calls[-1].key) for i in range(BRANCHES)
        ]
        announce({"url": gateway.url, "tokens": await keys(gateway, store, made)})
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def gateway_over_sqlite(upstream: str, policies: Sequence[str] = ()) -> AsyncIterator[tuple[Gateway, Store]]:
    """A gateway that is served, and its store with a run of these policies; none named means one for all agents."""
    from lightning.config.sections import GatewayConfig
    from lightning.gateway import Gateway, Upstream
    from lightning.store.sqlite import SqliteStore
    from lightning.types import Run

    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder) / "bench.db")
        await store.open()
        agents = {name: {"agents": [name, *(["*", "!other"] * (name == policies[0]))]} for name in policies}
        await store.put_run(Run("run", "run", config={"config": {"policies": agents}} if policies else {}))
        models = tuple((name, "tiny") for name in policies)
        gateway = Gateway(store, [Upstream(upstream, "tiny", models=models)], GatewayConfig(), secret=b"s" * 32)
        await gateway.start()
        yield gateway, store


async def keys(gateway: Gateway, store: Store, rollouts: list[Rollout]) -> list[str]:
    """Create rollouts, lease them, and return the API keys of their agents."""
    await store.create_rollouts(rollouts)
    leases = await store.lease("run", "bench", limit=len(rollouts), ttl=3600)
    return [gateway.llm(lease).api_key for lease in leases]


async def naive(announce: Callable[[object], None], upstream: str) -> None:
    """What one writes first: FastAPI takes the body, one httpx client as it comes sends it on. No key, no record."""
    import socket

    import fastapi
    import httpx
    import uvicorn
    from fastapi.responses import JSONResponse, StreamingResponse

    app = fastapi.FastAPI()
    client = httpx.AsyncClient(timeout=600)

    @app.post("/v1/chat/completions")
    async def chat(body: dict) -> Any:  # type: ignore[type-arg]
        body = {**body, "model": "tiny", "return_token_ids": True, "logprobs": True}
        url = f"{upstream}/v1/chat/completions"
        if not body.get("stream"):
            answer = await client.post(url, json=body)
            return JSONResponse(answer.json(), answer.status_code)

        async def pieces() -> Any:
            async with client.stream("POST", url, json=body) as answer:
                async for line in answer.aiter_lines():
                    yield line + "\n"

        return StreamingResponse(pieces(), media_type="text/event-stream")

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(4096)
    announce({"url": f"http://127.0.0.1:{listener.getsockname()[1]}", "tokens": ["none"]})
    config = uvicorn.Config(app, log_config=None, access_log=False, backlog=4096)
    await uvicorn.Server(config).serve(sockets=[listener])


# the load ---------------------------------------------------------------------------------------------------------
@dataclass
class Server:
    """A server process and how to reach it."""

    process: psutil.Process
    url: str
    tokens: list[str]

    def cpu(self) -> float:
        """CPU seconds used so far."""
        used = self.process.cpu_times()
        return used.user + used.system


@contextlib.contextmanager
def running(role: str, *args: str) -> Iterator[tuple[Server, dict[str, Any]]]:
    """Start a server process, wait until it answers, end it afterwards."""
    command = [sys.executable, __file__, "--role", role, *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            yield Server(psutil.Process(process.pid), said["url"], said["tokens"]), said
        finally:
            process.kill()


def session() -> aiohttp.ClientSession:
    """A client without limits."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3), timeout=aiohttp.ClientTimeout(total=300)
    )


async def call(http: aiohttp.ClientSession, server: Server, number: int, **asked: Any) -> bytes:
    """One plain call of one of the rollouts."""
    token = server.tokens[number % len(server.tokens)]
    body = {"model": "policy", "messages": MESSAGES, "max_tokens": RESPONSE, **asked}
    headers = {"Authorization": f"Bearer {token}"}
    async with http.post(f"{server.url}/v1/chat/completions", json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.read()


async def conversation(http: aiohttp.ClientSession, server: Server, number: int) -> None:
    """The calls of one rollout, each of which goes on with the answer before it."""
    said = [*MESSAGES]
    for _ in range(TURNS):
        answer = json.loads(await call(http, server, number, messages=said))
        said = [*said, {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}, MESSAGES[1]]


async def first_byte(http: aiohttp.ClientSession, server: Server, number: int) -> float:
    """Seconds until a stream's first byte; the rest is read too."""
    token = server.tokens[number % len(server.tokens)]
    body = {"model": "policy", "messages": MESSAGES, "stream": True}
    started = time.perf_counter()
    headers = {"Authorization": f"Bearer {token}"}
    async with http.post(f"{server.url}/v1/chat/completions", json=body, headers=headers) as answer:
        await answer.content.readany()
        waited = time.perf_counter() - started
        await answer.read()
    return waited


async def spread(concurrency: int, count: int, one: Callable[[int], Any]) -> list[Any]:
    """`count` calls, `concurrency` at a time."""
    numbers = iter(range(count))

    async def worker() -> list[Any]:
        return [await one(number) for number in numbers]

    return [item for items in await asyncio.gather(*(worker() for _ in range(concurrency))) for item in items]


async def cpu_of_a_call(
    http: aiohttp.ClientSession, server: Server, concurrency: int, calls: int, **asked: Any
) -> float:
    """Milliseconds of the server's CPU."""
    before = server.cpu()
    await spread(concurrency, calls, lambda number: call(http, server, number, **asked))
    return (server.cpu() - before) / calls * 1e3


async def cpu_of_a_branch_call(http: aiohttp.ClientSession, server: Server) -> float:
    """Milliseconds of the server's CPU, of which all calls but each branch's last are answered from the record."""
    before = server.cpu()
    await spread(16, BRANCHES, lambda number: conversation(http, server, number))
    return (server.cpu() - before) / (BRANCHES * TURNS) * 1e3


async def measure(server: Server, calls: int) -> dict[str, float]:
    """CPU and latency of plain calls, first bytes of streams, and many calls at once."""
    async with session() as http:
        measured: dict[str, float] = {}
        for concurrency in CONCURRENCIES:
            await spread(concurrency, WARM, lambda number: call(http, server, number))
            started = time.perf_counter()
            measured[f"cpu_ms_{concurrency}"] = await cpu_of_a_call(http, server, concurrency, calls)
            measured[f"calls_per_second_{concurrency}"] = calls / (time.perf_counter() - started)
        alone = await spread(1, ALONE, lambda number: first_byte(http, server, number))
        before = server.cpu()
        crowd = await spread(64, STREAMS, lambda number: first_byte(http, server, number))
        stream_cpu = server.cpu() - before
        started = time.perf_counter()
        await asyncio.gather(*(call(http, server, number, user="slow") for number in range(MANY)))
        many = time.perf_counter() - started
    return {
        **measured,
        "first_byte_ms_1": median(alone) * 1e3,
        "first_byte_ms_64": median(crowd) * 1e3,
        "cpu_ms_per_stream": stream_cpu / STREAMS * 1e3,
        "many_seconds": many,
        "rss_mb": server.process.memory_info().rss / 1e6,
    }


async def peak(server: Server) -> int:
    """The most slow calls the backend ever had at once."""
    async with session() as http, http.get(f"{server.url}/peak") as answer:
        return int((await answer.json())["peak"])


def main(out: Path | None) -> dict[str, Any]:
    """Measure, print a table, and write the numbers to `out`."""
    results: dict[str, Any] = {}
    with running("backend") as (direct, said):
        results["reply_bytes"] = said["body_bytes"]
        results["direct"] = asyncio.run(measure(direct, CALLS))
        for role, calls in (("ours", CALLS), ("naive", CALLS // 4)):
            with running("backend") as (behind, _), running(role, behind.url) as (server, _):
                results[role] = asyncio.run(measure(server, calls))
                results[role]["peak_in_flight"] = asyncio.run(peak(behind))
    added = results["ours"]["first_byte_ms_1"] - results["direct"]["first_byte_ms_1"]
    results["first_byte_added_ms"] = added
    for concurrency in CONCURRENCIES:
        key = f"cpu_ms_{concurrency}"
        results[f"naive_over_ours_{concurrency}"] = results["naive"][key] / results["ours"][key]
    report(results)
    if out is not None:
        out.write_text(json.dumps(results, indent=2))
    return results


def report(results: dict[str, Any]) -> None:
    """The table."""
    rows = [
        *((f"server CPU per call, {n} at a time, ms", f"cpu_ms_{n}", "{:.2f}") for n in CONCURRENCIES),
        *((f"calls/s, {n} at a time (whole machine)", f"calls_per_second_{n}", "{:.0f}") for n in CONCURRENCIES),
        ("stream first byte, 1 at a time, ms", "first_byte_ms_1", "{:.1f}"),
        ("stream first byte, 64 at a time, ms", "first_byte_ms_64", "{:.1f}"),
        (f"server CPU per stream of {TOKENS}, ms", "cpu_ms_per_stream", "{:.2f}"),
        (f"{MANY} calls at once, backend {BACKEND_SECONDS:g} s, s", "many_seconds", "{:.2f}"),
        ("most in flight at the backend", "peak_in_flight", "{}"),
        ("server memory, MB", "rss_mb", "{:.0f}"),
    ]
    lines = [f"{'reply of ' + str(results['reply_bytes']) + ' bytes':<42}{'direct':>10}{'ours':>10}{'naive':>10}"]
    for title, key, shape in rows:
        cells = [shape.format(results[who][key]) if key in results[who] else "" for who in ("direct", "ours", "naive")]
        lines.append(f"{title:<42}" + "".join(f"{cell:>10}" for cell in cells))
    lines.append(f"first byte added by the gateway: {results['first_byte_added_ms']:.2f} ms")
    ratios = " and ".join(f"{results[f'naive_over_ours_{n}']:.1f}x with {n} at a time" for n in CONCURRENCIES)
    lines.append(f"naive / ours, CPU per call: {ratios}")
    sys.stdout.write("\n".join(lines) + "\n")


def serve(role: str, upstream: str) -> None:
    """Be one of the servers."""

    def announce(said: object) -> None:
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()

    roles = {
        "backend": lambda: backend(announce),
        "ours": lambda: ours(announce, upstream),
        "policies": lambda: ours(announce, upstream, ("one", "other")),
        "branches": lambda: branches(announce, upstream),
    }
    asyncio_utils.run(roles[role]() if role in roles else naive(announce, upstream))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("upstream", nargs="?", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        serve(arguments.role, arguments.upstream)
    else:
        main(arguments.json)
