"""Sampling with a real model: the requests of `lightning demo calculator`, sent again to plain vLLM and through our stack.

First 64 rollouts of the demonstration's agent are recorded. Then each is sent again call by call, with the recorded prompt's
ids and as many new tokens as were sampled then, 32 rollouts at once, from an empty prefix cache: by a bare client to plain vLLM
with each block size x dtype x threads (no logprobs, no gateway, nothing recorded); and through the gateway, with logprobs,
recorded durably, to the vLLM that lightning starts. The ratios are of the best plain to ours: of wall seconds, and of CPU
seconds, which other programs change less.

    python tests/bench/bench_real_sampling.py [--json FILE] [--plain NAME ...]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from lightning.config import Config
from lightning.config.sections import PolicyServerConfig
from lightning.plugins import plugins
from lightning.policy_server.auto_settings import choose, this_machine
from lightning.policy_server.control import VLLMControl
from lightning.policy_server.model_folder import read_facts
from lightning.policy_server.vllm_arguments import server_env
from lightning.policy_server.vllm_server import OwnedVLLM, ServerProcess, reserved_port
from lightning.store.protocol import Store
from lightning.trainer.stack import open_gateway
from lightning.types import Rollout, Run, Task
from lightning_examples.calculator_autogen.agent import agent
from lightning_examples.calculator_autogen.tasks import tasks
from lightning_examples.smollm2 import model_folder

TASKS, GROUP, AT_ONCE, PASSES = 8, 8, 32, 2


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded request: the ids of its prompt, and how many tokens were sampled."""

    prompt: list[int]
    tokens: int

    def body(self, model: str) -> dict[str, Any]:
        """The same work again: so many tokens, whatever they are."""
        same = {"max_tokens": self.tokens, "min_tokens": self.tokens, "ignore_eos": True, "temperature": 1.0}
        return {"model": model, "prompt": self.prompt, **same}


@dataclass(frozen=True, slots=True)
class Plain:
    """A vLLM without anything of ours, but for the environment in which it starts fast and its threads sleep."""

    block: int
    dtype: str
    threads: int

    @property
    def name(self) -> str:
        return f"block{self.block} {self.dtype} x{self.threads}"

    def args(self, model: Path, port: int, kv_bytes: int) -> list[str]:
        """For `vllm serve`; the KV cache is as large as ours."""
        args = ["serve", str(model), "--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port)]
        args += ["--block-size", str(self.block), "--dtype", self.dtype, "--kv-cache-memory-bytes", str(kv_bytes)]
        return [*args, "--enforce-eager", "--disable-uvicorn-access-log"]

    def env(self) -> dict[str, str]:
        return server_env(os.environ, device="cpu", threads=self.threads)


@asynccontextmanager
async def plain_vllm(plain: Plain, model: Path, kv_bytes: int, log: Path) -> AsyncIterator[str]:
    """Its URL, while it runs."""
    with reserved_port("127.0.0.1", 0) as port:
        process = ServerProcess(plain.args(model, port, kv_bytes), plain.env(), log)
        control = VLLMControl(f"http://127.0.0.1:{port}")
        try:
            while await control.health() != "ok":
                if process.returncode is not None:
                    raise RuntimeError(process.explain())
                await asyncio.sleep(0.2)
            yield control.url
        finally:
            await process.stop()


def cpu_seconds() -> float:
    """Of this process and all that it started, vLLM among them. Other programs that load the machine are not in it."""
    found: dict[int, tuple[int, float]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            said = file.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        found[int(file.parent.name)] = int(said[1]), (int(said[11]) + int(said[12])) / os.sysconf("SC_CLK_TCK")
    mine, before = {os.getpid()}, 0
    while len(mine) != before:
        before = len(mine)
        mine |= {process for process, (parent, _) in found.items() if parent in mine}
    return sum(seconds for process, (_, seconds) in found.items() if process in mine)


async def send_again(rollouts: list[list[Call]], send: Any, control: VLLMControl) -> tuple[float, float]:
    """Wall and CPU seconds, each of the best of some passes: each rollout's calls one after another, so many at once."""
    best, cpu = float("inf"), float("inf")
    for _ in range(PASSES):
        await control.drop_prefix_cache()
        room = asyncio.Semaphore(AT_ONCE)

        async def one(index: int, calls: list[Call], room: asyncio.Semaphore = room) -> None:
            async with room:
                for call in calls:
                    await send(index, call)

        began, used = time.perf_counter(), cpu_seconds()
        await asyncio.gather(*(one(index, calls) for index, calls in enumerate(rollouts)))
        best, cpu = min(best, time.perf_counter() - began), min(cpu, cpu_seconds() - used)
    return best, cpu


async def post(http: aiohttp.ClientSession, url: str, body: Mapping[str, Any], key: str = "") -> None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with http.post(f"{url}/v1/completions", json=body, headers=headers) as reply:
        answer = await reply.json()
        assert reply.status == 200, answer
        assert answer["usage"]["completion_tokens"] == body["max_tokens"]


async def leases(store: Store, gateway: Any, run: str, count: int) -> list[Any]:
    """LLMs of new rollouts."""
    given = tasks(TASKS, 1)
    made = [Rollout(f"{run}/{n}", run, Task(given[n % TASKS].input), f"g{n % TASKS}") for n in range(count)]
    await store.put_run(Run(run, run))
    await store.create_rollouts(made)
    return [gateway.llm(lease) for lease in await store.lease(run, "bench", limit=count, ttl=3600)]


async def ours(model: Path, folder: Path, running: OwnedVLLM | None = None) -> tuple[list[list[Call]], dict[str, Any]]:
    """Record the requests, and send them again through the gateway; to a vLLM of our own where none is `running`."""
    async with AsyncExitStack() as resources:
        store = plugins().store(f"sqlite:///{folder / 'lightning.db'}")
        await store.open()
        resources.push_async_callback(store.close)
        server = running or OwnedVLLM(model, PolicyServerConfig(device="cpu"), log=folder / "ours.log")
        if running is None:
            os.environ.pop("OMP_NUM_THREADS", None)  # `make bench` sets it, and it would win
            resources.push_async_callback(server.close)
            await server.start()
        gateway = await open_gateway(resources, store, [server], Config(), "")
        given, room = tasks(TASKS, 1), asyncio.Semaphore(AT_ONCE)

        async def record(number: int, llm: Any) -> None:
            async with room:
                await agent(given[number % TASKS], llm)

        count = TASKS * GROUP
        await asyncio.gather(*(record(*each) for each in enumerate(await leases(store, gateway, "record", count))))
        calls = await store.transitions_of([(f"record/{n}", 1) for n in range(count)])
        answered = [[call for call in own if call.status.answered] for own in calls]
        rollouts = [[Call([*c.prompt_ids], max(1, len(c.response_ids))) for c in own] for own in answered if own]
        http = await resources.enter_async_context(client())
        llms = await leases(store, gateway, "again", len(rollouts))
        before = await server.usage()

        async def send(index: int, call: Call) -> None:
            await post(http, gateway.url, call.body(llms[index].model), llms[index].api_key)

        wall, cpu = await send_again(rollouts, send, server._running())  # which has the secret of its control routes
        after = await server.usage()
        assert before is not None
        assert after is not None
        used = [now - then for now, then in zip(after, before, strict=True)]
        if not rollouts or not used[1]:
            raise RuntimeError("nothing was measured: no request reached vLLM")
        return rollouts, {"wall": wall, "cpu": cpu, "prefix_hit_share": used[2] / used[1], "preemptions": used[3]}


def client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=600),
        connector=aiohttp.TCPConnector(limit=2 * AT_ONCE, keepalive_timeout=2.0),
    )


async def main(out: Path | None, wanted: list[str]) -> None:
    model = model_folder()
    chosen = choose(PolicyServerConfig(), read_facts(model), "cpu", this_machine(), env={})
    cores = sorted({1, this_machine().cores})
    cells = [Plain(block, dtype, n) for dtype in ("bfloat16", "float32") for block in (32, 128) for n in cores]
    cells = [cell for cell in cells if not wanted or cell.name in wanted]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rollouts, mine = await ours(model, folder)
        prompts = sum(len(call.prompt) for calls in rollouts for call in calls)
        new = sum(call.tokens for calls in rollouts for call in calls)
        count = sum(map(len, rollouts))
        say(
            f"{count} requests of {len(rollouts)} rollouts: {prompts} prompt tokens, {new} new; {'; '.join(chosen.reasons)}"
        )
        say(
            f"{'ours':24} {mine['wall']:6.2f} s, {mine['cpu']:6.2f} CPU-seconds, {mine['prefix_hit_share']:.0%} of the prompts "
            "from the prefix cache"
        )
        for cell in cells:
            async with (
                plain_vllm(cell, model, chosen.kv_cache_bytes or 0, folder / "plain.log") as url,
                client() as http,
            ):

                async def send(_: int, call: Call, url: str = url, http: aiohttp.ClientSession = http) -> None:
                    await post(http, url, call.body("policy"))

                results[cell.name] = await send_again(rollouts, send, VLLMControl(url))
            say(f"{'plain ' + cell.name:24} {results[cell.name][0]:6.2f} s, {results[cell.name][1]:6.2f} CPU-seconds")
    ratios = {
        what: min(each[place] for each in results.values()) / mine[what] for place, what in enumerate(("wall", "cpu"))
    }
    say(
        f"ratio of the best plain to ours: {ratios['wall']:.2f} by the clock (0.8 wanted), {ratios['cpu']:.2f} of CPU time"
    )
    if out is not None:
        found = {"requests": count, "prompt_tokens": prompts, "new_tokens": new, "ours": mine, "plain": results}
        out.write_text(json.dumps(found | {"ratio": ratios["wall"], "cpu_ratio": ratios["cpu"]}, indent=1))


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plain", nargs="*", default=[], help="names of the plain servers to start; all by default")
    given = parser.parse_args()
    asyncio.run(main(given.json, given.plain))
