"""Agents that attack the server beside agents that work: each attack with its defence off, then on.

Every server, every honest agent and every attacker is a process of its own; attackers have a lower priority (nice 10). Two
honest agents call the model (a fake vLLM that takes 50 ms) before an attack and during it. CPU is the server process's own, and
an attacking request's is what is left when the honest ones have been taken off at what they cost before. Memory is the server
process's peak. `--vllm` also tries the control routes of a real vLLM.

`--recording` sends large bodies of one key at once to a server that may have 1 GB, with recording off and on: what the record
of a body costs in memory, and for how long `/health` waits meanwhile.

    python tests/bench/bench_hostile.py [--json FILE] [--only NAME ...] [--vllm]
    python tests/bench/bench_hostile.py --recording [--only NAME ...]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

SECONDS = float(os.environ.get("BENCH_SECONDS", "5"))
ATTACKERS = 2
MODEL_SECONDS = 0.05
HUGE = 1 << 60
MIB = 1 << 20
ONE_GB = 1 << 30
CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
ATTACKS = {
    "values": "32 MB of `[[],[],...]` in a call",
    "many values": "0.7 MB of it, just what is allowed",
    "text": "32 MB of text in a call",
    "hoard": "16 bodies of 30 MB that never end, for each key",
    "connections": "400 connections that ask nothing, at a server that may open 300 files",
    "frame": "45 MB in a report to the runner, of `[],` (the runner's peak)",
}


def sized(path: str, before: str, item: str, after: str = "") -> tuple[str, bytes, int]:
    """A body of 0.98 MB of equal items, or of as many as there is room for; three of it are sent at once."""
    count = min((980_000 - len(before)) // (len(item) + 1), 100_000)
    return path, f"{before}{','.join([item] * count)}{after}".encode(), 3


def bodies() -> dict[str, tuple[str, bytes, int]]:
    """Bodies that are allowed: path, text, and how many are sent at once. The first are an honest agent's."""
    ids = json.dumps({"model": "policy", "prompt": [n * 4 % 150_000 for n in range(32_000)], "max_tokens": 4})
    chat, said = "/v1/chat/completions", '{"model":"policy","messages":['
    user = '{"role":"user","content":"hi"}'
    text = json.dumps(CHAT)[:-1]
    nested = f'{text}, "metadata": {"[" * 240}{",".join(["[]"] * 80_000)}{"]" * 240}}}'
    return {
        "16 prompts of 32,000 ids": ("/v1/completions", ids.encode(), 16),
        "messages that are lists": sized(chat, said, "[]", "]}"),
        "many small messages": sized(chat, said, user, "]}"),
        "many tools": sized(chat, f'{said}{user}],"tools":[', '{"type":"function"}', "]}"),
        "many fields": (chat, (text + "".join(f',"k{n}":[]' for n in range(75_000)) + "}").encode(), 3),
        "nested deep": (chat, nested.encode(), 3),
        "escapes": (chat, (said + '{"role":"user","content":"' + "\\ud83d" * 160_000 + '"}]}').encode(), 3),
        "almost credentials": (chat, (said + '{"role":"user","content":"' + "token=x, " * 108_000 + '"}]}').encode(), 3),
        "list of credentials": sized(chat, f'{said}{user}],"metadata":[', '"password=x"', "]}"),
        "small items (Responses)": sized("/v1/responses", '{"model":"policy","input":[', user, "]}"),
        "small messages (Messages)": sized("/v1/messages", '{"model":"policy","max_tokens":9,"messages":[', user, "]}"),
        "texts": (chat, (said + '{"role":"user","content":"' + "a" * (30 * MIB) + '"}]}').encode(), 3),
    }  # fmt: skip


# what runs in processes of its own ---------------------------------------------------------------------------------


async def serve(defended: bool, attack: str, records: bool = True) -> None:
    """A gateway over a store in memory; prints its URL, its keys and its pid."""
    import resource

    from lightning.config.plugin_settings import GatewayConfig
    from lightning.gateway import Gateway, Upstream
    from lightning.store.memory import MemoryStore
    from lightning.types import Rollout, Run, Task
    from lightning_server.config import PortLimits

    limits: dict[str, Any] = {"body_memory": 256 * MIB, "connections": 100 if attack == "connections" else 8192}
    if attack == "recording":
        limits["body_memory"] = ONE_GB // 8
        resource.setrlimit(resource.RLIMIT_DATA, (ONE_GB, ONE_GB))
    elif not defended:
        switch_off()
        limits = {"body_memory": HUGE, "json_values": 0, "connections": 0}
    if attack == "connections":
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
    fake = await asyncio.create_subprocess_exec(sys.executable, __file__, "--role", "vllm", stdout=subprocess.PIPE)
    assert fake.stdout is not None
    upstream = Upstream((await fake.stdout.readline()).decode().strip(), "tiny")
    store = MemoryStore()
    await store.open()
    await store.put_run(Run("run", "run"))
    await store.create_rollouts([Rollout(f"run/{n}", "run", Task("x"), "g") for n in range(4)])
    config = GatewayConfig(limits=PortLimits(**limits), record_requests=records)
    gateway = Gateway(store, [upstream], config, secret=b"s" * 32, run="run")
    await gateway.start()
    leases = await store.lease("run", "w", limit=4, ttl=3600.0)
    say({"url": gateway.url, "keys": [gateway.llm(lease).api_key for lease in leases]})
    await asyncio.to_thread(sys.stdin.read)
    await gateway.close()
    fake.kill()


def switch_off() -> None:
    """The defences that are not settings: parsing where the calls are answered, whole texts looked through."""
    from lightning import redaction
    from lightning.gateway import http
    from lightning_record import conversations

    http.LONG = HUGE
    redaction.LONG = redaction.LONGEST_NAME = conversations.LONGEST_STORED = HUGE


async def vllm() -> None:
    """A fake vLLM, which keeps nothing."""
    from lightning.testing.fake_vllm import FakeVLLM
    from lightning.testing.vllm_replies import Reply

    async with FakeVLLM(default=Reply(delay=MODEL_SECONDS)) as fake:
        say(fake.url)
        while os.getppid() != 1:
            await asyncio.sleep(0.5)
            fake.requests.clear()


async def honest(url: str, key: str) -> None:
    """Calls the model until the time is over; prints the seconds of each call, and how many failed."""
    took, failed = [], 0
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}) as session:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            began = time.monotonic()
            try:
                timeout = aiohttp.ClientTimeout(total=30)
                async with session.post(f"{url}/v1/chat/completions", json=CHAT, timeout=timeout) as reply:
                    await reply.read()
                    failed += reply.status != 200
            except (aiohttp.ClientError, TimeoutError):
                failed += 1
            took.append(time.monotonic() - began)
            await asyncio.sleep(0.01)
    say({"took": took, "failed": failed})


async def attack_server(attack: str, url: str, key: str) -> None:
    """Attacks until the time is over; prints the number of requests and the statuses that they got."""
    os.nice(10)
    statuses: list[int] = []
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=60)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
        until = time.monotonic() + SECONDS

        async def repeat(path: str, body: bytes) -> None:
            while time.monotonic() < until:
                number = len(statuses)
                statuses.append(-1)  # no answer yet
                try:
                    async with session.post(url + path, data=body) as reply:
                        await reply.read()
                        statuses[number] = reply.status
                except aiohttp.ClientError:
                    statuses[number] = 0  # the connection was lost

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SECONDS + 15):
                await one(attack, url, repeat, session, statuses)
    say({"requests": len(statuses), "statuses": {str(each): statuses.count(each) for each in sorted(set(statuses))}})


async def one(attack: str, url: str, repeat: Any, session: aiohttp.ClientSession, statuses: list[int]) -> None:
    """The attack itself."""
    chat, size = "/v1/chat/completions", 32 * MIB
    if attack in ("values", "many values"):
        count = (size - 200) // 3 if attack == "values" else 240_000
        body = json.dumps(CHAT)[:-1].encode() + b', "metadata": [' + b"[]," * (count - 10) + b"[]]}"
        await asyncio.gather(*(repeat(chat, body) for _ in range(2)))
    elif attack == "text":
        body = json.dumps({**CHAT, "messages": [{"role": "user", "content": "a" * (size - 200)}]}).encode()
        await asyncio.gather(*(repeat(chat, body) for _ in range(2)))
    elif attack == "hoard":

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(30):
                yield b"a" * MIB
            await asyncio.sleep(SECONDS)

        async def hoard() -> None:
            try:
                async with session.post(url + chat, data=endless()) as reply:
                    statuses.append(reply.status)
            except aiohttp.ClientError:
                statuses.append(0)

        hoarding = [asyncio.create_task(hoard()) for _ in range(16)]
        await asyncio.sleep(SECONDS)
        for task in hoarding:
            task.cancel()
        statuses += [-1] * (16 - len(statuses))
    elif attack == "connections":
        host, port = url.removeprefix("http://").split(":")
        until, held = time.monotonic() + SECONDS, []
        while time.monotonic() < until:
            if len(held) < 400:
                with contextlib.suppress(OSError, TimeoutError):
                    held.append(await asyncio.wait_for(asyncio.open_connection(host, int(port)), 1))
                    statuses.append(-1)
            else:
                await asyncio.sleep(0.1)


async def runner(defended: bool) -> None:
    """A runner with two agents, one of which sends a report of 45 MB; prints what it took it for, and the peak."""
    from lightning.config import RunnerConfig
    from lightning.runner import outcomes, socket_framing
    from lightning.runner.process import ProcessRunner
    from lightning.types import LLM, Lease, Rollout, Task

    if not defended:
        socket_framing.LONGEST_REPLY = outcomes.LONGEST_REPLY = socket_framing.MAX_FRAME
        socket_framing.MOST_VALUES = HUGE
        socket_framing.VALUE_BYTES = 0

    def agent(task: Any, llm: Any) -> float:
        import os
        import socket
        import stat
        import struct

        if task.input == "honest":
            return 1.0
        bomb = b'{"reward": [' + b"[]," * 15_000_000 + b"[]]}"
        for descriptor in range(3, 64):
            try:
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    with socket.socket(fileno=os.dup(descriptor)) as found:
                        found.sendall(struct.pack("!I", len(bomb)) + bomb)
            except OSError:
                continue
        return 1.0

    made = ProcessRunner(agent, RunnerConfig(concurrency=2, timeout=120))
    await made.start()
    leases = [
        Lease(Rollout(f"r{n}", "run", Task(what), "g", attempt=1), "w", 0.0)
        for n, what in enumerate(("bomb", "honest"))
    ]
    before = peak()
    found = await asyncio.gather(*(made.run(lease, LLM("http://127.0.0.1:9/v1", "k", "m")) for lease in leases))
    await made.close()
    say({"peak": peak() - before, "honest": found[1].reward, "bomb": found[0].error[-120:], "cpu": time.process_time()})


def peak() -> int:
    """Bytes of this process's peak."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def say(what: object) -> None:
    """Tell the parent."""
    sys.stdout.write(json.dumps(what) + "\n" if not isinstance(what, str) else what + "\n")
    sys.stdout.flush()


# the parent ---------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """What came of one attack with its defence off or on. Seconds of CPU per request, p90 in seconds, memory in MB."""

    attack: str
    defended: bool
    alive: bool
    failed: int = 0
    p90_before: float = 0.0
    p90: float = 0.0
    cpu_honest: float = 0.0
    cpu_attack: float = 0.0
    requests: int = 0
    statuses: str = ""
    peak_mb: float = 0.0


def begin(*role: str) -> subprocess.Popen[str]:
    """A process of this file."""
    return subprocess.Popen(
        [sys.executable, __file__, "--role", *role], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def told(process: subprocess.Popen[str]) -> Any:
    """The next line of what it says; None when it has ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    return json.loads(line) if line else None


@contextlib.contextmanager
def server(defended: bool, attack: str) -> Iterator[tuple[psutil.Process, dict[str, Any]]]:
    """The server under attack."""
    process = begin("serve", str(int(defended)), attack)
    try:
        yield psutil.Process(process.pid), told(process)
    finally:
        for child in psutil.Process(process.pid).children() if psutil.pid_exists(process.pid) else []:
            child.kill()
        process.kill()
        process.wait()


def work(process: psutil.Process, url: str, keys: list[str]) -> tuple[float, float, int, int]:
    """p90, CPU seconds of the server, calls and failed calls of two honest agents."""
    before = cpu(process)
    agents = [begin("honest", url, key) for key in keys]
    found = [told(agent) for agent in agents]
    took = sorted(seconds for each in found for seconds in each["took"])
    return took[int(0.9 * len(took))], cpu(process) - before, len(took), sum(each["failed"] for each in found)


def cpu(process: psutil.Process) -> float:
    """CPU seconds that a process has used, 0 when it is gone."""
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def high_water(pid: int) -> float:
    """MB of a process's peak."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
    return 0.0


def measure(attack: str, defended: bool) -> Row:
    """One row."""
    if attack == "frame":
        found = told(begin("runner", str(int(defended))))
        return Row(attack, defended, found["honest"] == 1.0, cpu_attack=found["cpu"], requests=1, statuses=found["bomb"],
                   peak_mb=found["peak"] / 1e6)  # fmt: skip
    with server(defended, attack) as (process, place):
        url, keys = place["url"], place["keys"]
        p90_before, used, calls, _ = work(process, url, keys[:2])
        each = used / calls
        attackers = [begin("attack", attack, url, key) for key in keys[2 : 2 + ATTACKERS]]
        time.sleep(1.0)
        start = cpu(process)
        p90, _, calls, failed = work(process, url, keys[:2])
        done = [told(attacker) or {"requests": 0, "statuses": {}} for attacker in attackers]
        requests = sum(one["requests"] for one in done)
        alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        left = cpu(process) - start - calls * each
        statuses = json.dumps([one["statuses"] for one in done])
        spent = max(0.0, left) / max(1, requests)
        return Row(
            attack, defended, alive, failed, p90_before, p90, each, spent, requests, statuses, high_water(process.pid)
        )


@dataclass
class Record:
    """What bodies of one kind cost where requests are recorded or not: MB of the peak over the server at rest, the longest
    answer of `/health` in seconds, and what became of the calls."""

    body: str
    records: bool
    peak_mb: float
    health: float
    seconds: float
    statuses: str


async def record(name: str, records: bool) -> Record:
    """One row."""
    path, body, count = bodies()[name]
    process = begin("serve", "recording", str(int(records)))
    place = await asyncio.to_thread(told, process)
    took = [0.0]

    async def look(session: aiohttp.ClientSession) -> None:
        while True:
            began = time.monotonic()
            async with session.get(place["url"] + "/health") as reply:
                await reply.read()
            took.append(time.monotonic() - began)
            await asyncio.sleep(0.005)

    async def call(session: aiohttp.ClientSession, body: bytes) -> int:
        headers = {"authorization": f"Bearer {place['keys'][0]}", "content-type": "application/json"}
        try:
            async with session.post(place["url"] + path, data=body, headers=headers) as reply:
                await reply.read()
                return reply.status
        except aiohttp.ClientError:
            return 0

    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            await call(session, json.dumps(CHAT).encode())
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # what the imports took is no peak of a call
            rest = high_water(process.pid)
            looking = asyncio.create_task(look(session))
            began = time.monotonic()
            statuses = await asyncio.gather(*(call(session, body) for _ in range(count)))
            seconds = time.monotonic() - began
            looking.cancel()
            with contextlib.suppress(aiohttp.ClientError, asyncio.CancelledError):
                await looking
        alive = "" if process.poll() is None else ", the server is dead"
        said = ", ".join(f"{statuses.count(each)} x {each}" for each in sorted(set(statuses))) + alive
        return Record(name, records, high_water(process.pid) - rest, max(took), seconds, said)
    finally:
        children = psutil.Process(process.pid).children() if psutil.pid_exists(process.pid) else []
        for child in children:
            child.kill()
        process.kill()
        process.wait()


def recording(names: list[str]) -> None:
    """The table of what the record costs."""
    sys.stdout.write("| body | recorded | peak over rest, MB | longest /health, s | all answered in, s | statuses |\n")
    sys.stdout.write("|---|---|---|---|---|---|\n")
    for name in names:
        off, on = (asyncio.run(record(name, records)) for records in (False, True))
        for row in (off, on):
            ratio = f" ({on.peak_mb / off.peak_mb:.2f} x)" if row.records and off.peak_mb else ""
            sys.stdout.write(
                f"| {name} | {'yes' if row.records else 'no'} | {row.peak_mb:.0f}{ratio} | {row.health:.3f} | "
                f"{row.seconds:.1f} | {row.statuses} |\n"
            )
        sys.stdout.flush()


async def control_routes() -> None:
    """A real vLLM, without our middleware and with it: a stranger pauses it."""
    from lightning.config.sections import PolicyServerConfig
    from lightning.policy_server import vllm_arguments
    from lightning.policy_server.vllm_server import OwnedVLLM
    from lightning.testing.tiny_models import make_tiny_model

    folder = Path(tempfile.mkdtemp())
    model, ours = make_tiny_model(folder / "model", seed=0), vllm_arguments.GUARDED
    for guard in (vllm_arguments.PACKED, ours):
        vllm_arguments.GUARDED = guard  # the other middleware twice is as good as none
        owned = OwnedVLLM(model, PolicyServerConfig(device="cpu"), log=folder / "vllm.log")
        await owned.start()
        try:
            async with aiohttp.ClientSession(owned.url) as session:
                for route in ("/pause?mode=keep", "/collective_rpc"):
                    body = {"method": "lightning_claim", "args": ["thief"]} if "rpc" in route else None
                    async with session.post(route, json=body) as reply:
                        words = "with" if guard == ours else "without"
                        sys.stdout.write(f"real vLLM {words} the secret: POST {route}: {reply.status}\n")
            stopped, stolen = await owned._running().is_paused(), await owned._running().claimed()
            sys.stdout.write(f"    paused: {stopped}, its weights belong to {stolen or 'its owner'}\n")
        finally:
            await owned.close()


def shown(rows: list[Row]) -> str:
    """The table."""
    lines = [
        (
            "| attack | defence | alive | p90 before -> during, ms | CPU of a call: honest, attack, ms | requests: statuses "
            "| peak, MB |"
        )
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in rows:
        p90 = f"{row.p90_before * 1e3:.0f} -> {row.p90 * 1e3:.0f}{f', {row.failed} failed' if row.failed else ''}"
        lines.append(
            f"| {ATTACKS[row.attack]} | {'on' if row.defended else 'off'} | {'yes' if row.alive else 'no'} | {p90} | "
            f"{row.cpu_honest * 1e3:.1f}, {row.cpu_attack * 1e3:.1f} | {row.requests}: {row.statuses} | {row.peak_mb:.0f} |"
        )
    return "\n".join(lines)


def main(given: argparse.Namespace) -> None:
    """All attacks, or those that are named."""
    rows = []
    for attack in given.only or ATTACKS:
        for defended in (False, True):
            rows.append(measure(attack, defended))
            sys.stdout.write(shown(rows[-1:]).splitlines()[-1] + "\n")
            sys.stdout.flush()
    sys.stdout.write("\n" + shown(rows) + "\n")
    if given.vllm:
        asyncio.run(control_routes())
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """What is asked for; `--only` names rows of the table that is made."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--recording", action="store_true")
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--role", nargs="*", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    table = bodies() if options.recording else ATTACKS
    if unknown := [name for name in options.only if name not in table]:
        parser.error(f"--only has {unknown[0]!r}, and there are: {', '.join(table)}")
    return options


if __name__ == "__main__":
    options = arguments()
    match options.role:
        case ["serve", "recording", records]:
            logging.disable()
            asyncio.run(serve(True, "recording", records == "1"))
        case ["serve", defended, attack]:
            logging.disable()
            asyncio.run(serve(defended == "1", attack))
        case ["vllm"]:
            asyncio.run(vllm())
        case ["honest", url, key]:
            asyncio.run(honest(url, key))
        case ["attack", attack, url, key]:
            asyncio.run(attack_server(attack, url, key))
        case ["runner", defended]:
            asyncio.run(runner(defended == "1"))
        case _ if options.recording:
            recording(options.only or list(bodies()))
        case _:
            main(options)
