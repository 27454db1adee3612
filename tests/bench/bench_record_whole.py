"""What recording requests and replies costs: bytes and CPU per call, with `gateway.record_requests` and without, side by side.

Two gateways (SQLite, a process of its own each) stand before one scripted vLLM and get the same calls in turns. CPU is what the
gateway's process used (user + system, its writer's thread included). Texts are paragraphs of this project's documentation
without those that look like credentials. "bytes in the store" is the size of the database's file divided by the calls; "of it
request and reply" are the packed exchanges, and "as JSON" is what the agent sent and got.

    python tests/bench/bench_record_whole.py [--conversations N] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil
from lightning.config.plugin_settings import GatewayConfig
from lightning.gateway import Gateway, Upstream
from lightning.redaction import redacted
from lightning.store.sqlite import SqliteStore
from lightning.testing.fake_vllm import FakeVLLM, Reply
from lightning.types import Rollout, Run, Task
from lightning_record import exchanges

PARAGRAPHS = [
    " ".join(part.split())
    for page in sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    for part in page.read_text().split("\n\n")
    if len(part) > 200 and not part.startswith(("|", "```", "#")) and redacted(part, "") == part
]
KINDS = {
    "1 call, 1k words": (1, 1000),
    "1 call, 8k words": (1, 8000),
    "20 turns to 2k words": (20, 2000),
    "20 turns to 8k words": (20, 8000),
}
ANSWER_WORDS = 60


def words(rng: random.Random, count: int) -> str:
    """So many words of running text."""
    found: list[str] = []
    while len(found) < count:
        found += rng.choice(PARAGRAPHS).split()
    return " ".join(found[:count])


# processes ----------------------------------------------------------------------------------------------------------
async def backend() -> None:
    rng = random.Random(0)
    async with FakeVLLM(script=lambda body: Reply(words(rng, ANSWER_WORDS))) as fake:
        print(json.dumps({"url": fake.url, "model": fake.model}), flush=True)
        await asyncio.Event().wait()


async def gateway(url: str, model: str, file: str, rollouts: int, *, record: bool) -> None:
    store = SqliteStore(Path(file))
    await store.open()
    await store.put_run(Run("run", "run"))
    names = [f"r{number}" for number in range(rollouts)]
    await store.create_rollouts([Rollout(name, "run", Task(name), name) for name in names])
    leases = await store.lease("run", "bench", limit=rollouts, ttl=3600)
    made = Gateway(store, [Upstream(url, model)], GatewayConfig(record_requests=record), secret=b"a bench's secret")
    await made.start()
    keys = {lease.rollout.id: made.llm(lease).api_key for lease in leases}
    print(json.dumps({"url": f"{made.url}/v1", "keys": keys}), flush=True)
    await asyncio.Event().wait()


@dataclass
class Served:
    """A process and what it has announced."""

    process: psutil.Process
    told: dict[str, Any]

    @property
    def cpu(self) -> float:
        """Seconds so far."""
        times = self.process.cpu_times()
        return times.user + times.system


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[Served]:
    with subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        try:
            yield Served(psutil.Process(started.pid), json.loads(started.stdout.readline()))
        finally:
            started.kill()


# measuring ------------------------------------------------------------------------------------------------------------
async def talk(http: aiohttp.ClientSession, served: Served, name: str, turns: int, size: int) -> tuple[float, int]:
    """One conversation: CPU seconds of the gateway, and bytes of JSON that were sent and got."""
    rng, url = random.Random(name), f"{served.told['url']}/chat/completions"
    headers = {"authorization": f"Bearer {served.told['keys'][name]}"}
    each = max(20, (size // turns) - (ANSWER_WORDS if turns > 1 else 0))
    messages: list[dict[str, Any]] = [{"role": "system", "content": words(rng, 100)}]
    seen, before = 0, served.cpu
    for _ in range(turns):
        messages.append({"role": "user", "content": words(rng, each)})
        body = json.dumps({"model": "policy", "messages": messages, "temperature": 1.0}).encode()
        async with http.post(url, data=body, headers=headers) as reply:
            answer = await reply.read()
            assert reply.status == 200, answer
        seen += len(body) + len(answer)
        messages.append({"role": "assistant", "content": json.loads(answer)["choices"][0]["message"]["content"]})
    return served.cpu - before, seen


async def packed_bytes(file: Path, names: list[str]) -> int:
    """Bytes of the exchanges of these rollouts, each read back."""
    store, total = SqliteStore(file), 0
    await store.open()
    for name in names:
        calls = await store.transitions(name)
        assert all(exchange is None or exchange.reply for exchange in exchanges.read(calls))
        total += sum(len(exchanges.packed_in(call) or b"") for call in calls)
    await store.close()
    return total


async def measure(kind: str, conversations: int, folder: Path, upstream: Served) -> dict[str, Any]:
    turns, size = KINDS[kind]
    count = conversations * (20 // turns)
    files = {record: folder / f"{kind}-{record}.db" for record in ("off", "on")}
    with contextlib.ExitStack() as open_:
        address = (upstream.told["url"], upstream.told["model"])
        both = {
            record: open_.enter_context(running("--role", "gateway", *address, str(files[record]), str(count), record))
            for record in files
        }
        cpu: dict[str, list[float]] = {"off": [], "on": []}
        seen = 0
        async with aiohttp.ClientSession() as http:
            for number in range(count):
                order = ("off", "on") if number % 2 else ("on", "off")
                for record in order:
                    used, seen_now = await talk(http, both[record], f"r{number}", turns, size)
                    cpu[record].append(used)
                    seen += seen_now if record == "on" else 0
    calls, names = count * turns, [f"r{number}" for number in range(count)]
    warm = count // 5
    pages = {record: await packed_bytes(file, names) for record, file in files.items()}
    # After they were opened and closed: what was in the write-ahead log is in the file.
    return {
        "kind": kind,
        "calls": calls,
        "json": seen / calls,
        "exchange": pages["on"] / calls,
        "stored": {record: file.stat().st_size / calls for record, file in files.items()},
        "cpu_ms": {record: 1000 * sum(used[warm:]) / ((count - warm) * turns) for record, used in cpu.items()},
        "cpu_change": median(on / off for on, off in zip(cpu["on"][warm:], cpu["off"][warm:], strict=True) if off),
    }


async def main(conversations: int, out: Path | None) -> None:
    with tempfile.TemporaryDirectory() as folder, running("--role", "backend") as upstream:
        found = [await measure(kind, conversations, Path(folder), upstream) for kind in KINDS]
    print("| | calls | as JSON | bytes in the store, off | on | of it request and reply | CPU ms, off | on | change |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in found:
        stored, cpu = row["stored"], row["cpu_ms"]
        change = cpu["on"] / cpu["off"] - 1
        print(
            f"| {row['kind']} | {row['calls']} | {row['json']:,.0f} | {stored['off']:,.0f} | {stored['on']:,.0f} | "
            f"{row['exchange']:,.0f} | {cpu['off']:.2f} | {cpu['on']:.2f} | {change:+.0%} |"
        )
    if out is not None:
        out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--role", nargs="+")
    asked, more = parser.parse_known_args()
    role = [*(asked.role or ()), *more]
    if role and role[0] == "backend":
        asyncio.run(backend())
    elif role:
        _, url, model, file, rollouts, record = role
        asyncio.run(gateway(url, model, file, int(rollouts), record=record == "on"))
    else:
        asyncio.run(main(asked.conversations, asked.json))
