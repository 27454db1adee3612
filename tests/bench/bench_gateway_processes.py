"""Gateways in processes of their own beside one in the trainer's process, and the CPU of a call by the length of its prompt.

Every server is a process of its own, and CPU is what the process itself used (user + system). Five parts:

- `prompts`: CPU of a call at 1,000, 8,000 and 64,000 tokens of prompt, in conversations of ten calls that grow, with logprobs
  and ids as a vLLM with our middleware sends them, and as one without it. The floor is a proxy on the same HTTP server and
  client that reads nothing, knows no keys and stores nothing. With `--against FOLDER`, a worktree of another commit, both
  commits and the floor are measured in turns.
- `replies`: the same for calls with a reply of 28 KB, 16 at a time.
- `speed`: calls a second, and the CPU of all gateways for a call, with 0 (the trainer's own), 1, 2 and 4 processes.
- `engine`: the latency of calls while the trainer's process computes: a thread makes small steps in torch without a pause, as a
  trainer does that launches kernels.
- `many`: 5,000 calls at once against a backend that takes some seconds.

    python tests/bench/bench_gateway_processes.py [--json FILE] [--against FOLDER] [PART ...]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil
from aiohttp import web
from bench_gateway import MESSAGES, RESPONSE, Server, backend, call, canned, session, spread
from lightning import asyncio_utils

Load = Callable[[aiohttp.ClientSession, Server, int], Awaitable[int]]
"""Makes the calls of a round, given its number, and returns how many they are."""
ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (1_000, 8_000, 64_000)
CONVERSATIONS, TURNS, MORE = 12, 10, 100
"""Different conversations of the backend, their calls, and the ids that each call adds behind the answer before."""
ROUNDS = 8
REPLIES = 300
"""Calls of a round in `replies`."""
COUNTS = (0, 1, 2, 4)
CALLS, AT_ONCE = 1200, 32
BESIDE = 4
"""Calls at once while the engine computes."""
MANY, MANY_ROLLOUTS = 5000, 1000


# servers, each run as `bench_gateway_processes.py --role NAME ...` --------------------------------------------------
async def conversations(announce: Callable[[object], None], length: int, packs: bool) -> None:
    """A backend whose answer to the call `seed` of a conversation has the prompt that goes on from the call before."""
    from lightning.policy_server.packed_logprobs import FIELD, HEADER, IDS_HEADER, pack, pack_ids

    rng = random.Random(0)
    bodies: dict[tuple[int, bool], bytes] = {}
    for number in range(CONVERSATIONS):
        first = length - (RESPONSE + MORE) * TURNS // 2 if length > 4 * RESPONSE * TURNS else length
        ids = [rng.randrange(150_000) for _ in range(first)]
        for turn in range(TURNS):
            answer = canned(turn, rng) | {"prompt_token_ids": ids[:]}
            choice = answer["choices"][0]
            ids += choice["token_ids"] + [rng.randrange(150_000) for _ in range(MORE)]
            place = number * TURNS + turn
            bodies[place, False] = json.dumps(answer, separators=(",", ":")).encode()
            values = array("f", [token["logprob"] for token in choice["logprobs"]["content"]])
            choice["logprobs"] = {FIELD: pack(values)}
            answer["prompt_token_ids"] = pack_ids(answer["prompt_token_ids"])
            bodies[place, True] = json.dumps(answer, separators=(",", ":"), ensure_ascii=False).encode()
    plain_ids = {place: json.loads(body)["prompt_token_ids"] for (place, packed), body in bodies.items() if not packed}
    only_logprobs = {
        place: json.dumps({**json.loads(bodies[place, True]), "prompt_token_ids": ids}, separators=(",", ":")).encode()
        for place, ids in plain_ids.items()
    }

    async def chat(request: web.Request) -> web.Response:
        place = json.loads(await request.read())["seed"] % (CONVERSATIONS * TURNS)
        if not packs or HEADER not in request.headers:
            return web.Response(body=bodies[place, False], content_type="application/json")
        body = bodies[place, True] if IDS_HEADER in request.headers else only_logprobs[place]
        return web.Response(body=body, content_type="application/json")

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/health", lambda _: asyncio.sleep(0, web.Response()))
    app.router.add_get("/v1/models", lambda _: asyncio.sleep(0, web.json_response({"data": [{"id": "tiny"}]})))
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=75)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    sizes = [len(bodies[0, False]), len(bodies[0, True])]
    announce({"url": f"http://127.0.0.1:{runner.addresses[0][1]}", "tokens": ["direct"], "bytes": sizes})
    await asyncio.Event().wait()


async def trainer(announce: Callable[[object], None], upstream: str, count: int, rollouts: int, computes: bool) -> None:
    """A trainer's process: its own gateway, `count` others beside it, and, if it `computes`, a thread that does so for ever."""
    from lightning.config import Config, with_settings
    from lightning.gateway import Gateway, Upstream
    from lightning.gateway.identity import gateway_secret
    from lightning.gateway.policy import owner_of
    from lightning.plugins import plugins
    from lightning.types import Rollout, Run, Task
    from lightning_server.gateway_processes import Processes

    config = with_settings(Config(), {"gateway.processes": count})
    server = Upstream(upstream, "tiny")
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/bench.db"
        async with plugins().opened_store(url) as store:
            await store.put_run(Run("run", "run"))
            owner = owner_of(store, "run", None)
            await owner.open((), 0)
            secret = await gateway_secret(store)
            gateway = Gateway(store, [server], config.gateway, secret=secret, run="run", shared=count > 0)
            await gateway.start()
            processes = Processes(config, url, count)
            if count:
                await processes.start(gateway)
            await owner.serve([server], 0)
            made = [Rollout(f"r{i}", "run", Task(i), f"g{i // 8}", index=i) for i in range(rollouts)]
            await store.create_rollouts(made)
            llms = [gateway.llm(lease) for lease in await store.lease("run", "bench", limit=rollouts, ttl=3600)]
            if computes:
                threading.Thread(target=compute, daemon=True).start()
            announce(
                {"url": gateway.url, "tokens": [llm.api_key for llm in llms], "bases": [llm.base_url for llm in llms]}
            )
            await asyncio.Event().wait()


async def floor(announce: Callable[[object], None], upstream: str) -> None:
    """A proxy on the gateway's HTTP server and client. It passes bodies on as they are, and asks vLLM to pack."""
    import uvicorn
    from lightning.policy_server.packed_logprobs import HEADER, IDS_HEADER, WANTED
    from starlette.types import Receive, Scope, Send

    headers = {HEADER: WANTED, IDS_HEADER: WANTED, "content-type": "application/json"}
    client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False, headers=headers)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        parts, more = [], True
        while more:
            message = await receive()
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        async with client.post(f"{upstream}{scope['path']}", data=b"".join(parts)) as answer:
            body = await answer.read()
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": answer.status, "headers": head})
        await send({"type": "http.response.body", "body": body})

    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none", timeout_keep_alive=75)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(4096)
        announce({"url": f"http://127.0.0.1:{listener.getsockname()[1]}", "tokens": ["none"]})
        await uvicorn.Server(config).serve(sockets=[listener])


def compute() -> None:
    """Steps of a small model, one after the other: many short kernels, as where a GPU does the long ones."""
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(16)))
    rows = torch.randn(8, 64)
    while True:
        model(rows).square().mean().backward()


# the load -----------------------------------------------------------------------------------------------------------
@dataclass
class Fleet:
    """A trainer's process with its gateways, and where each rollout's calls go."""

    server: Server
    bases: list[str]

    def processes(self) -> list[psutil.Process]:
        """The processes that answer calls."""
        return self.server.process.children() or [self.server.process]

    def cpu(self) -> float:
        """CPU seconds that they have used."""
        return sum(used.user + used.system for used in (each.cpu_times() for each in self.processes()))

    def memory(self) -> float:
        """The megabytes of the largest of them."""
        return max(each.memory_info().rss for each in self.processes()) / 1e6


@contextlib.contextmanager
def running(role: str, *given: str, root: Path = ROOT) -> Iterator[tuple[Server, dict[str, Any]]]:
    """Start a server process with the code of a worktree, wait until it answers, end it afterwards."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(code_of(root))}
    command = [sys.executable, __file__, "--role", role, *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            yield Server(psutil.Process(process.pid), said["url"], said["tokens"]), said
        finally:
            process.terminate()


def code_of(root: Path) -> list[str]:
    """The folders of a worktree that Python looks in."""
    parts = (folder for kind in ("adapters", "plugins") for folder in (root / kind).iterdir() if folder.is_dir())
    return [str(root / "core"), *map(str, parts), str(root / "tests" / "bench")]


async def call_at(http: aiohttp.ClientSession, fleet: Fleet, number: int, **asked: Any) -> None:
    """A call of a rollout at its gateway."""
    place = number % len(fleet.bases)
    body = {"model": "policy", "messages": MESSAGES, "max_tokens": RESPONSE, **asked}
    headers = {"Authorization": f"Bearer {fleet.server.tokens[place]}"}
    async with http.post(f"{fleet.bases[place]}/chat/completions", json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()


def prompts(against: Path | None) -> dict[str, float]:
    """Milliseconds of CPU for a call by length: the median of rounds in which all are measured in turns."""
    found: dict[str, float] = {}
    for length in LENGTHS:
        for packs in (True, False):
            kind = "packed" if packs else "json"
            measured = in_turns(("conversations", str(length), str(int(packs))), against, converse)
            for name, value in measured.items():
                found[f"cpu_ms_{length}_{kind}_{name}"] = value
                say(f"{length:>6} tokens, {kind:6} {name:6} {value:6.2f} ms of CPU a call")
    return found


def replies(against: Path | None) -> dict[str, float]:
    """Milliseconds of CPU for a call with a reply of 28 KB, measured as in `prompts`."""
    measured = in_turns(("backend",), against, answer_many)
    for name, value in measured.items():
        say(f"reply of 28 KB, {name:6} {value:6.2f} ms of CPU a call")
    return {f"cpu_ms_reply_{name}": value for name, value in measured.items()}


def in_turns(behind: Sequence[str], against: Path | None, load: Load) -> dict[str, float]:
    """Milliseconds of CPU for a call, the median of rounds, of this commit, of the one in `against`, and of the floor. `behind`
    are the backend's role and arguments."""
    with contextlib.ExitStack() as held:
        url = held.enter_context(running(*behind))[0].url
        roots = {"now": ROOT, **({"before": against} if against else {})}
        servers = {name: held.enter_context(running("ours", url, root=root))[0] for name, root in roots.items()}
        servers["floor"] = held.enter_context(running("floor", url))[0]
        found = asyncio.run(rounds(servers, load))
    return {name: median(values) for name, values in found.items()}


async def rounds(servers: dict[str, Server], load: Load) -> dict[str, list[float]]:
    """CPU of a call of each server, round by round, without the first round."""
    found: dict[str, list[float]] = {name: [] for name in servers}
    async with session() as http:
        for number in range(ROUNDS + 1):
            for name, server in list(servers.items())[:: 1 if number % 2 else -1]:
                before = server.cpu()
                calls = await load(http, server, number)
                found[name].append((server.cpu() - before) / calls * 1e3)
    return {name: values[1:] for name, values in found.items()}


async def converse(http: aiohttp.ClientSession, server: Server, number: int) -> int:
    """The conversations of a round, four at a time; returns the number of calls."""

    async def one(at: int) -> None:
        place = CONVERSATIONS * number + at
        for turn in range(TURNS):
            await call(http, server, place, seed=place * TURNS + turn)

    await spread(4, CONVERSATIONS, one)
    return CONVERSATIONS * TURNS


async def answer_many(http: aiohttp.ClientSession, server: Server, number: int) -> int:
    """Calls with plain replies, 16 at a time; returns the number of calls."""
    await spread(16, REPLIES, lambda at: call(http, server, at))
    return REPLIES


@contextlib.contextmanager
def fleet(count: int, *, rollouts: int = 128, computes: bool = False) -> Iterator[Fleet]:
    """A backend, and a trainer with so many gateway processes."""
    with (
        running("backend") as (behind, _),
        running("trainer", behind.url, str(count), str(rollouts), str(int(computes))) as (server, said),
    ):
        yield Fleet(server, said["bases"])


def speed() -> dict[str, float]:
    """Calls a second, and CPU of the gateways."""
    found: dict[str, float] = {}

    async def measure(fleet: Fleet) -> tuple[float, float]:
        async with session() as http:
            await spread(AT_ONCE, CALLS // 4, lambda number: call_at(http, fleet, number))
            before, began = fleet.cpu(), time.perf_counter()
            await spread(AT_ONCE, CALLS, lambda number: call_at(http, fleet, number))
            return CALLS / (time.perf_counter() - began), (fleet.cpu() - before) / CALLS * 1e3

    for count in COUNTS:
        with fleet(count) as made:
            rate, cpu = asyncio.run(measure(made))
            found |= {f"calls_per_second_{count}": rate, f"cpu_ms_{count}": cpu, f"rss_mb_{count}": made.memory()}
            say(f"{count} processes: {rate:5.0f} calls/s, {cpu:.2f} ms of CPU a call, {made.memory():.0f} MB each")
    return found


def engine() -> dict[str, float]:
    """Milliseconds of a call, the median and the 95th percentile, by where it is answered and what the trainer does."""
    found: dict[str, float] = {}

    async def measure(fleet: Fleet) -> list[float]:
        async with session() as http:

            async def timed(number: int) -> float:
                began = time.perf_counter()
                await call_at(http, fleet, number)
                return time.perf_counter() - began

            await spread(BESIDE, 50, timed)
            return sorted(await spread(BESIDE, 400, timed))

    for computes in (False, True):
        for count in (0, 1, 2):
            with fleet(count, computes=computes) as made:
                taken = asyncio.run(measure(made))
            p50, p95 = 1e3 * median(taken), 1e3 * taken[int(0.95 * len(taken))]
            name = f"{count}_{'computing' if computes else 'idle'}"
            found |= {f"p50_ms_{name}": p50, f"p95_ms_{name}": p95}
            say(f"{count} processes, trainer {'computes' if computes else 'idle':8}: {p50:6.1f} ms, p95 {p95:6.1f} ms")
    return found


def many() -> dict[str, float]:
    """Seconds for 5,000 calls at once."""
    found: dict[str, float] = {}

    async def measure(fleet: Fleet) -> float:
        async with session() as http:
            await spread(AT_ONCE, 200, lambda number: call_at(http, fleet, number))
            began = time.perf_counter()
            await asyncio.gather(*(call_at(http, fleet, number, user="slow") for number in range(MANY)))
            return time.perf_counter() - began

    for count in (0, 2):
        with fleet(count, rollouts=MANY_ROLLOUTS) as made:
            seconds = asyncio.run(measure(made))
            found |= {f"many_seconds_{count}": seconds, f"many_rss_mb_{count}": made.memory()}
            say(f"{count} processes: {MANY} calls at once in {seconds:.1f} s, {made.memory():.0f} MB each")
    return found


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def serve(role: str, given: list[str]) -> None:
    """Be one of the servers."""
    from bench_gateway import ours

    def announce(said: object) -> None:
        say(json.dumps(said))

    asyncio_utils.allow_many_files()
    match role:
        case "backend":
            asyncio_utils.run(backend(announce))
        case "conversations":
            asyncio_utils.run(conversations(announce, int(given[0]), bool(int(given[1]))))
        case "floor":
            asyncio_utils.run(floor(announce, given[0]))
        case "trainer":
            url, count, rollouts, computes = given
            asyncio_utils.run(trainer(announce, url, int(count), int(rollouts), bool(int(computes))))
        case _:
            asyncio_utils.run(ours(announce, given[0]))


def main(parts: list[str], against: Path | None, out: Path | None) -> None:
    """Measure the parts (none: all), and write the numbers to `out`."""
    asyncio_utils.allow_many_files()
    known: dict[str, Callable[[], dict[str, float]]] = {
        "prompts": lambda: prompts(against),
        "replies": lambda: replies(against),
        "speed": speed,
        "engine": engine,
        "many": many,
    }
    found: dict[str, float] = {}
    for name in parts or known:
        say(f"-- {name}")
        found |= known[name]()
    if out is not None:
        out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("given", nargs="*", help="parts: prompts, replies, speed, engine, many")
    arguments = parser.parse_args()
    if arguments.role:
        serve(arguments.role, arguments.given)
    else:
        main(arguments.given, arguments.against, arguments.json)
