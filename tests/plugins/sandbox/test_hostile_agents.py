"""What agents do to the machine and to one another, two at once: each attack succeeds without the sandbox, and fails in it.

docs/security.md has the table; a test holds it to what happens here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import psutil
import pytest
from lightning.config.plugin_settings import RunnerConfig
from lightning.errors import ConfigError, RunnerError
from lightning.runner.process import ProcessRunner
from lightning.runner.protocol import Agent
from lightning.testing.chat_server import ChatServer
from lightning.types import LLM, Fault, Lease, Outcome, Rollout, Task
from lightning_sandbox import network, sandbox
from lightning_sandbox.network import targets, url_inside

ROOT = Path(__file__).parents[3]
ATTACKS = {
    "arguments": "reads the password in the runner's own command line (`--store postgresql://...`)",
    "environment": "reads `PGPASSWORD` and the provider's key in the runner's environment",
    "credentials": "reads `.env` in the project",
    "home": "reads the home of the user",
    "write": "writes into the project",
    "memory": "reads another agent's task in its memory",
    "kill": "kills the other agent",
    "server": "calls another server of this machine, such as vLLM's own port",
    "abstract": "connects to another program's socket in the abstract name space",
    "daemon": "leaves a process behind",
}


def why_not() -> str:
    """Why no sandbox can be made here."""
    try:
        sandbox.check()
    except RunnerError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def make_agent() -> Agent:
    """By value, so that the fork server need not import this module."""

    def agent(task: Task, llm: LLM) -> dict[str, float]:
        import signal
        import socket
        import subprocess
        import sys
        import time
        from pathlib import Path

        plan = task.input
        assert isinstance(plan, dict)
        if "victim" in plan:
            kept = plan["victim"]  # noqa: F841 — what the other one looks for
            time.sleep(plan["seconds"])
            return {"reward": 1.0}

        def others() -> list[int]:
            return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]

        def told(pid: int, file: str) -> bytes:
            """What the kernel says of a process; nothing of one that ended since it was listed, as others' do."""
            try:
                return Path(f"/proc/{pid}/{file}").read_bytes()
            except OSError:
                return b""

        def siblings() -> list[int]:
            found = []
            for pid in others():
                parent = told(pid, "stat").rpartition(b")")[2].split()[1:2]
                if pid != os.getpid() and parent == [str(os.getppid()).encode()]:
                    found.append(pid)
            return found

        def arguments() -> bool:
            return "hunter2" in str(sys.argv) or any(b"hunter2" in told(pid, "cmdline") for pid in others())

        def environment() -> bool:
            secret = {"swordfish", "sk-of-the-user"}
            mine = secret & set(os.environ.values())
            return bool(mine) or any(b"swordfish" in told(pid, "environ") for pid in others())

        def waited_for() -> list[int]:
            """The agents beside this one, of which a busy machine may start the first late."""
            until = time.monotonic() + 3.0
            while not (found := siblings()) and time.monotonic() < until:
                time.sleep(0.1)
            return found

        def memory() -> bool:
            wanted = "".join(plan["halves"]).encode()
            for pid in waited_for():
                with Path(f"/proc/{pid}/mem").open("rb") as mem:
                    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                        span, access, *_ = line.split()
                        begin, _, end = span.partition("-")
                        if access.startswith("rw"):
                            mem.seek(int(begin, 16))
                            if wanted in mem.read(int(end, 16) - int(begin, 16)):
                                return True
            return False

        def kill() -> bool:
            pids = waited_for()
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            return bool(pids)

        def server() -> bool:
            socket.create_connection(("127.0.0.1", plan["port"]), timeout=5).close()
            return True

        def name() -> bool:
            socket.create_connection(("example.invalid", 443), timeout=5).close()  # opened, though nobody answers there
            return True

        def abstract() -> bool:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect("\0" + plan["abstract"])
            return True

        def daemon() -> bool:
            subprocess.Popen(["sleep", plan["sleep"]], start_new_session=True)
            return True

        def write() -> bool:
            return bool(Path("planted.txt").write_text("x"))

        tricks = {
            "arguments": arguments,
            "environment": environment,
            "credentials": lambda: "hunter3" in Path(".env").read_text(),
            "home": lambda: "hunter4" in Path(plan["home"], "secret.txt").read_text(),
            "write": write,
            "name": name,
            "memory": memory,
            "kill": kill,
            "server": server,
            "abstract": abstract,
            "daemon": daemon,
        }
        try:
            worked = tricks[plan["attack"]]()
        except OSError:
            worked = False
        return {"reward": float(worked)}

    return agent


@dataclass
class World:
    """A machine with secrets, as a runner on it finds them."""

    home: Path
    port: int
    abstract: str


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: ChatServer) -> Iterator[World]:
    home, project = tmp_path / "alice", tmp_path / "project"
    for folder in (home, project):
        folder.mkdir()
    (home / "secret.txt").write_text("hunter4")
    (project / ".env").write_text("KEY=hunter3")
    monkeypatch.chdir(project)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PGPASSWORD", "swordfish")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-user")
    monkeypatch.setattr(sys, "argv", ["lightning", "train", "--store", "postgresql://me:hunter2@db/lightning"])
    name = f"lightning-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("\0" + name)
        listening.listen()
        yield World(home, urlsplit(server.llm().base_url).port or 0, name)


@contextlib.asynccontextmanager
async def runner(kept_in: Literal["none", "bwrap"], **settings: object) -> AsyncIterator[ProcessRunner]:
    config = RunnerConfig(concurrency=2, timeout=60, sandbox=kept_in, **settings)  # type: ignore[arg-type]
    made = ProcessRunner(make_agent(), config)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


def lease(plan: object) -> Lease:
    rollout = Rollout(uuid.uuid4().hex, "run", Task(plan), "group", attempt=1)  # type: ignore[arg-type]
    return Lease(rollout, 1, 0.0)


async def side_by_side(made: ProcessRunner, attack: str, world: World, gateway: LLM) -> tuple[Outcome, Outcome]:
    """How the attacker fared, and the agent beside it, which lives for as long if it is the one attacked."""
    marker, attacked = uuid.uuid4().hex, attack in ("memory", "kill")
    beside = asyncio.create_task(made.run(lease({"victim": marker, "seconds": 6.0 if attacked else 0.0}), gateway))
    await asyncio.sleep(1.0 if attacked else 0.0)
    plan = {
        "attack": attack,
        "halves": [marker[:16], marker[16:]],
        "home": str(world.home),
        "port": world.port,
        "abstract": world.abstract,
        "sleep": f"30{marker[:4].translate(str.maketrans('abcdef', '123456'))}",
    }
    outcome = await made.run(lease(plan), gateway)
    return outcome, await beside


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("kept_in", ["none", "bwrap"])
async def test_an_attack(attack: str, kept_in: Literal["none", "bwrap"], world: World) -> None:
    before = set(psutil.pids())
    async with runner(kept_in) as made:
        outcome, beside = await side_by_side(made, attack, world, LLM("http://127.0.0.1:9/v1", "key", "policy"))
    assert outcome.fault is None, outcome.error
    if attack == "daemon":
        left = _daemons(before)
        # bwrap's own process may end a moment before the kernel has killed what was in its name space.
        left = psutil.wait_procs(left, timeout=10.0 if kept_in == "bwrap" else 0.5)[1]
        assert bool(left) == (kept_in == "none")
        for process in left:
            process.kill()
    else:
        assert outcome.reward == float(kept_in == "none")
    assert beside.fault is (Fault.INFRASTRUCTURE if (attack, kept_in) == ("kill", "none") else None)


def _daemons(before: set[int]) -> list[psutil.Process]:
    """The processes that the attack left, and no other program's `sleep`."""
    found = []
    for pid in set(psutil.pids()) - before:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            command = process.cmdline()
            if command[:1] == ["sleep"] and len(command) == 2 and re.fullmatch(r"30\d{4}", command[1]):
                found.append(process)
    return found


def test_the_table_is_in_the_promises() -> None:
    said = (ROOT / "docs" / "security.md").read_text().partition("it fails in all of them:\n\n")[2].partition("\n\n")[0]
    assert [line.removeprefix("- ") for line in said.splitlines()] == list(ATTACKS.values())


@pytest.mark.slow
@pytest.mark.parametrize("opened", [False, True])
async def test_hosts_are_opened_by_name(opened: bool, world: World) -> None:
    async with runner("bwrap", sandbox_network=(f"127.0.0.1:{world.port}",) if opened else ()) as made:
        outcome, _ = await side_by_side(made, "server", world, LLM("http://127.0.0.1:9/v1", "key", "policy"))
    assert outcome.reward == float(opened), outcome.error


@pytest.mark.slow
@pytest.mark.parametrize("opened", [False, True])
async def test_a_name_and_a_low_port_are_known_inside(opened: bool, world: World) -> None:
    async with runner("bwrap", sandbox_network=("example.invalid:443",) if opened else ()) as made:
        outcome, _ = await side_by_side(made, "name", world, LLM("http://127.0.0.1:9/v1", "key", "policy"))
    assert outcome.reward == float(opened), outcome.error


@pytest.mark.slow
async def test_variables_are_passed_by_name(world: World) -> None:
    async with runner("bwrap", sandbox_environment=("PGPASS*",)) as made:
        outcome, _ = await side_by_side(made, "environment", world, LLM("http://127.0.0.1:9/v1", "key", "policy"))
    assert outcome.reward == 1.0, outcome.error


def make_bomber() -> Agent:
    """An agent that finds its runner's socket and reports instead of its own process; or opens many connections."""

    def agent(task: Task, llm: LLM) -> float:
        import os
        import socket
        import stat
        import struct
        import time

        if task.input == "connections":
            port = int(llm.base_url.rpartition(":")[2].partition("/")[0])
            kept = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(400)]
            time.sleep(1)
            ended = 0
            for each in kept:
                each.setblocking(False)
                try:
                    ended += each.recv(1) == b""
                except BlockingIOError:
                    continue
                except OSError:
                    ended += 1
            return float(ended)
        bomb = (1).to_bytes(8, "big") + b'{"reward": [' + b"[]," * int(str(task.input)) + b"[]]}"
        for descriptor in range(3, 64):
            try:
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    with socket.socket(fileno=os.dup(descriptor)) as found:
                        found.sendall(struct.pack("!I", len(bomb)) + bomb)
            except OSError:
                continue
        return 1.0

    return agent


@pytest.mark.slow
@pytest.mark.parametrize(("values", "why"), [(1_000_000, "JSON values"), (15_000_000, "bytes was announced")])
async def test_a_report_that_would_fill_the_runners_memory_is_not_parsed(values: int, why: str) -> None:
    made = ProcessRunner(make_bomber(), RunnerConfig(concurrency=2, timeout=60, sandbox="bwrap"))
    await made.start()
    try:
        bad, good = await asyncio.gather(
            *(made.run(lease(n), LLM("http://127.0.0.1:9/v1", "k", "m")) for n in (values, 5))
        )
    finally:
        await made.close()
    assert (bad.fault, why in bad.error) == (Fault.AGENT, True), bad.error
    assert good.fault is Fault.AGENT
    assert "not an outcome" in good.error or "reward" in good.error, "a short one is parsed, and found to be nothing"


@pytest.mark.slow
async def test_one_sandbox_has_a_number_of_connections(server: ChatServer) -> None:
    made = ProcessRunner(make_bomber(), RunnerConfig(concurrency=2, timeout=60, sandbox="bwrap"))
    await made.start()
    try:
        outcome = await made.run(lease("connections"), server.llm())
    finally:
        await made.close()
    assert outcome.reward == 400 - network.MOST_CONNECTIONS - network.MOST_WAITING, outcome.error


def test_hosts_that_cannot_be_opened_are_refused() -> None:
    for entry in ("example.com", "example.com:", ":80", "example.com:99999", "10.0.0.7:80"):
        with pytest.raises(ConfigError, match=re.escape(repr(entry))):
            targets("http://127.0.0.1:8000/v1", [entry])


def test_a_gateway_keeps_its_url_unless_it_is_an_address() -> None:
    for url, inside, address in (
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1", "127.0.0.1"),
        ("https://rl.example.org/v1", "https://rl.example.org/v1", "127.0.1.1"),
        ("http://10.0.0.7:8000/v1", "http://127.0.1.1:8000/v1", "127.0.1.1"),
        ("http://[fd00::7]:8000/v1", "http://127.0.1.1:8000/v1", "127.0.1.1"),
    ):
        hosts = targets(url, ())
        assert url_inside(url, hosts) == inside
        assert hosts[0].inside == address
