"""Load: how many durable rollouts a second each store takes, alone and served; what a call costs the server; whether memory
stays flat; a thousand slow agents at once.

A rollout is leased, makes three calls of 1,000 + 256 tokens, each durable before its answer ends, and is completed. "alone" is
the store in one process with as many callers as there are agents. "served" is the whole road: agents (this process) lease and
complete over the control API and call the model through the gateway of one server process, which has the store, in front of a
process that answers as vLLM does. The databases are real ones, with their usual durability: SQLite as `?sync=normal` (outlives
every process) and `?sync=full` (outlives a power cut), PostgreSQL with fsync on, Redis with appendfsync always.

    python tests/bench/bench_load.py [--json FILE] [--stores sqlite,postgres] [--rollouts N] [--calls N] [--long]

`--long` watches memory over 200,000 calls instead of 20,000.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import aiohttp
import psutil
from aiohttp import web
from bench_store import conversations, rollouts_of
from lightning import asyncio_utils
from lightning.plugins import plugins
from lightning.store.protocol import Store
from lightning.types import Lease, Outcome, Run, Scope, Transition
from lightning_server.http_store import HttpStore
from lightning_server.tokens import put_token

CALLS, AGENTS, WARM = 3, 32, 8
CONVERSATIONS = 128
STREAMS, STREAM_TOKENS, TOKEN_SECONDS = 1000, 20, float(os.environ.get("BENCH_SECONDS", "0.5"))
ARRIVING_SECONDS = 6.0
"""Time within which the streams begin; each lasts longer, so that all of them are open then."""
STORES = ("sqlite", "sqlite-full", "postgres", "redis")


# the servers, each run as `bench_load.py --role NAME ...` ----------------------------------------------------------
def answer_of(call: Transition) -> bytes:
    """A call as vLLM answers it when ids and logprobs are asked for."""
    entries = [{"token": "word", "logprob": value, "bytes": [119], "top_logprobs": []} for value in call.logprobs]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "word " * len(call.response_ids)},
        "logprobs": {"content": entries},
        "finish_reason": "stop",
        "token_ids": call.response_ids.tolist(),
    }
    said = {"id": call.id, "object": "chat.completion", "created": 1, "model": "tiny", "choices": [choice]}
    return json.dumps({**said, "prompt_token_ids": call.prompt_ids.tolist()}, separators=(",", ":")).encode()


async def backend(announce: Callable[[object], None]) -> None:
    """Conversation `user`, turn by turn; streams of a token every half second."""
    bodies = [[answer_of(call) for call in calls] for calls in conversations(CONVERSATIONS, CALLS, 8)]
    peak = {"now": 0, "most": 0}

    async def chat(request: web.Request) -> web.StreamResponse:
        asked = json.loads(await request.read())
        if asked.get("stream"):
            return await stream(request)
        which, _, turn = asked["user"].partition("/")
        return web.Response(body=bodies[int(which) % CONVERSATIONS][int(turn)], content_type="application/json")

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        peak["now"] += 1
        peak["most"] = max(peak["most"], peak["now"])
        await response.prepare(request)
        for number in range(STREAM_TOKENS):
            entry = {"token": "word", "logprob": -0.5, "bytes": [1], "top_logprobs": []}
            last = number == STREAM_TOKENS - 1
            choice = {
                "index": 0,
                "delta": {"content": "word"},
                "logprobs": {"content": [entry]},
                "finish_reason": "stop" if last else None,
                "token_ids": [number],
            }
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "tiny", "choices": [choice]}
            first = {"prompt_token_ids": [1, 2, 3]} if number == 0 else {}
            await response.write(b"data: " + json.dumps({**chunk, **first}).encode() + b"\n\n")
            await asyncio.sleep(TOKEN_SECONDS)
        peak["now"] -= 1
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/health", lambda _: asyncio.sleep(0, web.Response()))
    app.router.add_get("/v1/models", lambda _: asyncio.sleep(0, web.json_response({"data": [{"id": "tiny"}]})))
    app.router.add_get("/peak", lambda _: asyncio.sleep(0, web.json_response(peak)))
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=75)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    announce({"url": f"http://127.0.0.1:{runner.addresses[0][1]}"})
    await asyncio.Event().wait()


async def server(announce: Callable[[object], None], upstream: str, url: str) -> None:
    """A Lightning Server over a store: control API and gateway on one port."""
    from lightning.config.sections import GatewayConfig
    from lightning.gateway import Gateway, Upstream
    from lightning_server.auth import ALL_PROJECTS, issue_token
    from lightning_server.control import Control

    store = plugins().store(url)
    await store.open()
    token, plain = issue_token(Scope.ADMIN, ALL_PROJECTS)
    await put_token(store, token)
    made = Gateway(store, [Upstream(upstream, "tiny")], GatewayConfig(), secret=secrets.token_bytes(32))
    Control(store, made)
    await made.start()
    announce({"url": made.url, "token": plain})
    await asyncio.Event().wait()


@dataclass
class Server:
    """A server process and how to reach it."""

    process: psutil.Process
    url: str
    token: str

    def cpu(self) -> float:
        """CPU seconds used so far."""
        used = self.process.cpu_times()
        return float(used.user + used.system)

    def megabytes(self) -> float:
        """Memory it holds now."""
        return float(self.process.memory_info().rss) / 1e6


@contextlib.contextmanager
def running(role: str, *args: str) -> Iterator[Server]:
    """Start a server process, wait until it answers, end it afterwards."""
    command = [sys.executable, __file__, "--role", role, *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            yield Server(psutil.Process(process.pid), said["url"], said.get("token", ""))
        finally:
            process.kill()


# the databases ----------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def database(name: str, folder: Path) -> Iterator[str]:
    """The URL of an empty store, and its server for as long as it is needed."""
    folder.mkdir()
    if name.startswith("sqlite"):
        yield f"sqlite:///{folder}/load.db?sync={'full' if name.endswith('full') else 'normal'}"
    elif name == "postgres":
        from tests.servers.postgres import PostgresServer

        with PostgresServer(settings=("max_wal_size=1GB",)) as server:
            yield server.url_of("load")
    else:
        from tests.servers.redis import RedisServer

        redis = RedisServer(folder).start()
        try:
            yield redis.url()
        finally:
            redis.kill()


@contextlib.asynccontextmanager
async def filled(store: Store, rollouts: int) -> AsyncIterator[Store]:
    """The store, opened, with so many pending rollouts."""
    await store.open()
    await store.put_run(Run("run", "load"))
    planned = rollouts_of(rollouts, 8)
    for begin in range(0, rollouts, 1000):
        await store.create_rollouts(planned[begin : begin + 1000])
    try:
        yield store
    finally:
        await store.close()


# the load ---------------------------------------------------------------------------------------------------------
Work = Callable[[Lease, str], Any]
"""What an agent does with a lease and its API key, which is empty without a server."""


async def take(store: Store, worker: str) -> tuple[Lease, str] | None:
    """Lease a rollout as a client of this store does."""
    if isinstance(store, HttpStore):
        served, _ = await store.lease_for_agents("run", worker, ttl=600)
        return (served[0][0], served[0][1].api_key) if served else None
    held = await store.lease("run", worker, ttl=600)
    return (held[0], "") if held else None


async def drive(store: Store, work: Work) -> tuple[int, float]:
    """So many agents lease, work and complete until nothing is left; rollouts done and seconds."""
    done = 0

    async def agent(name: str) -> None:
        nonlocal done
        while taken := await take(store, name):
            lease = taken[0]
            await work(*taken)
            await store.complete(lease.rollout.id, lease.attempt, Outcome(reward=1.0))
            done += 1

    began = time.perf_counter()
    await asyncio.gather(*(agent(f"agent-{number}") for number in range(AGENTS)))
    return done, time.perf_counter() - began


async def alone(url: str, rollouts: int) -> dict[str, float]:
    """The store without anything before it: one process, its own CPU per call."""
    calls = conversations(CONVERSATIONS, CALLS, 8)
    async with filled(plugins().store(url), rollouts) as store:

        async def work(lease: Lease, _: str) -> None:
            for call in calls[_number(lease) % CONVERSATIONS]:
                await store.append([_for(call, lease)])

        cpu = time.process_time()
        done, seconds = await drive(store, work)
        cpu = time.process_time() - cpu
    return {"rollouts_per_second": done / seconds, "cpu_us_per_call": cpu / (done * CALLS) * 1e6}


async def served(url: str, rollouts: int, upstream: str) -> dict[str, float]:
    """Through a server; CPU is that of its process, leases and outcomes included, for each call."""
    with running("server", upstream, url) as server:
        async with filled(HttpStore(server.url, token=server.token), rollouts) as store, session() as http:
            cpu = server.cpu()
            done, seconds = await drive(store, lambda lease, key: three_calls(http, server.url, key, lease))
            cpu = server.cpu() - cpu
    return {"rollouts_per_second": done / seconds, "cpu_us_per_call": cpu / (done * CALLS) * 1e6}


async def three_calls(http: aiohttp.ClientSession, url: str, key: str, lease: Lease) -> None:
    """What an agent does in a rollout."""
    headers = {"Authorization": f"Bearer {key}"}
    for turn in range(CALLS):
        body = {"model": "policy", "messages": MESSAGES, "user": f"{_number(lease)}/{turn}"}
        async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()


async def memory(url: str, calls: int, upstream: str) -> dict[str, float]:
    """The server's memory while it records `calls`: bytes that each further one costs, by least squares.

    The first third is left out. In a long run the caches fill meanwhile: that of parents is 128 MiB, some 60,000 calls; a
    shorter one shows at most how fast they fill.
    """
    points: list[tuple[int, float]] = []
    every = max(calls // 100 // CALLS, 1)
    with running("server", upstream, url) as server:
        async with filled(HttpStore(server.url, token=server.token), calls // CALLS) as store, session() as http:
            rollouts = 0

            async def work(lease: Lease, key: str) -> None:
                nonlocal rollouts
                await three_calls(http, server.url, key, lease)
                rollouts += 1
                if rollouts % every == 0:
                    points.append((rollouts * CALLS, server.megabytes()))

            await drive(store, work)
    kept = [point for point in points if point[0] > calls / 3]
    return {
        "calls": float(calls),
        "first_mb": points[0][1],
        "last_mb": points[-1][1],
        "bytes_per_call": slope(kept) * 1e6,
    }


def slope(points: Sequence[tuple[int, float]]) -> float:
    """Least squares."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    over = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return over / sum((x - mean_x) ** 2 for x, _ in points)


async def slow_agents(url: str, upstream: str) -> dict[str, float]:
    """A thousand streams that are open at once, first straight from the backend, then through the gateway."""
    with running("server", upstream, url) as server:
        client = HttpStore(server.url, token=server.token)
        async with filled(client, STREAMS) as store, session() as http:
            held = []
            while some := (await client.lease_for_agents("run", "slow", limit=100, ttl=600))[0]:
                held += some
            keys = [llm.api_key for _, llm in held]
            direct = await streams(http, upstream, keys)
            await streams(http, server.url, keys[:WARM])
            before, cpu = server.megabytes(), server.cpu()
            ours = await streams(http, server.url, keys)
            cpu, after = server.cpu() - cpu, server.megabytes()
            async with http.get(f"{upstream}/peak") as answer:
                most = (await answer.json())["most"]
            recorded = 0
            for lease, _ in held:
                recorded += await store.next_seq(lease.rollout.id, lease.attempt)
    found: dict[str, float] = {"streams": float(STREAMS), "at_once": float(most), "errors": float(ours.count(None))}
    for name, times in (("direct", direct), ("gateway", ours)):
        first = sorted(value for value in times if value is not None)
        for percent in (50, 95):
            found[f"{name}_first_token_p{percent}_ms"] = first[len(first) * percent // 100] * 1e3
    for percent in (50, 95):
        name = f"first_token_p{percent}_ms"
        found[f"added_{name}"] = found[f"gateway_{name}"] - found[f"direct_{name}"]
    return {
        **found,
        "not_recorded": float(STREAMS + WARM - recorded),
        "cpu_ms_per_stream": cpu / STREAMS * 1e3,
        "kb_per_stream": (after - before) / STREAMS * 1e3,
    }


async def streams(http: aiohttp.ClientSession, url: str, keys: Sequence[str]) -> list[float | None]:
    """Seconds to the first token of each; None where a stream failed or was cut off. They begin one after another."""

    async def one(number: int, key: str) -> float | None:
        await asyncio.sleep(number * ARRIVING_SECONDS / len(keys))
        body = {"model": "tiny", "messages": MESSAGES[:1], "stream": True}
        began = time.perf_counter()
        try:
            headers = {"Authorization": f"Bearer {key}"}
            async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
                if answer.status != 200:
                    return None
                await answer.content.readany()
                first = time.perf_counter() - began
                return first if (await answer.read()).rstrip().endswith(b"[DONE]") else None
        except aiohttp.ClientError:
            return None

    return await asyncio.gather(*(one(number, key) for number, key in enumerate(keys)))


MESSAGES = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "word " * 700}]


def session() -> aiohttp.ClientSession:
    """A client without limits."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600))


def _number(lease: Lease) -> int:
    return int(lease.rollout.id.removeprefix("rollout-"), 16)


def _for(call: Transition, lease: Lease) -> Transition:
    return replace(call, rollout=lease.rollout.id, attempt=lease.attempt)


def main(out: Path | None, stores: Sequence[str], rollouts: int, calls: int) -> dict[str, Any]:
    """Measure, print, write JSON to `out`."""
    found: dict[str, Any] = {"rollouts": rollouts, "calls_per_rollout": CALLS, "agents": AGENTS}
    with tempfile.TemporaryDirectory() as folder, running("backend") as behind:
        root = Path(folder)
        for name in stores:
            found[name] = {}
            for part, measure in (("alone", alone), ("served", served)):
                given = (rollouts, behind.url) if measure is served else (rollouts,)
                with database(name, root / f"{name}-{part}") as url:
                    found[name][part] = asyncio.run(measure(url, *given))
                say(f"{name}, {part}", found[name][part])
        with database("sqlite", root / "slow") as url:
            found["slow_agents"] = asyncio.run(slow_agents(url, behind.url))
        say(f"{STREAMS} streams of {STREAM_TOKENS * TOKEN_SECONDS:g} s", found["slow_agents"])
        with database("sqlite", root / "memory") as url:
            found["memory"] = asyncio.run(memory(url, calls, behind.url))
        say(f"memory over {calls} calls", found["memory"])
    if out is not None:
        out.write_text(json.dumps(found, indent=2))
    return found


def say(title: str, numbers: dict[str, float]) -> None:
    """A few lines of the table."""
    sys.stdout.write(f"{title}\n" + "".join(f"    {name:<32}{value:>12,.1f}\n" for name, value in numbers.items()))
    sys.stdout.flush()


def serve(role: str, args: Sequence[str]) -> None:
    """Be one of the servers."""

    def announce(said: object) -> None:
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()

    asyncio_utils.run(backend(announce) if role == "backend" else server(announce, *args))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--stores", default=",".join(STORES), help="which, of " + ", ".join(STORES))
    parser.add_argument("--rollouts", type=int, default=600, help="rollouts of each measurement of a store")
    parser.add_argument("--calls", type=int, default=20_000, help="calls over which memory is watched")
    parser.add_argument("--long", action="store_true", help="watch memory over 200,000 calls")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role:
        serve(given.role, given.rest)
    else:
        main(
            given.json,
            [name for name in given.stores.split(",") if name],
            given.rollouts,
            200_000 if given.long else given.calls,
        )
