"""Agents in worker processes: whatever they do is an outcome, and costs only themselves."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import decimal
import importlib
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import lightning
import openai
import psutil
import pytest
from lightning.config import RunnerConfig
from lightning.errors import RunnerError
from lightning.instrument import component_path, current_attempt, emit
from lightning.instrument.providers import LOGINS
from lightning.runner.forkserver import ForkServer
from lightning.runner.process import ProcessRunner
from lightning.runner.protocol import Agent
from lightning.runner.worker import without_proxy
from lightning.testing.chat_server import ChatRequest, ChatServer
from lightning.types import LLM, Fault, Lease, Outcome, StepReward, Task, ToolEvent

pytestmark = pytest.mark.slow  # processes start, hang and die here, each in its own time

NOWHERE = LLM("http://127.0.0.1:1/v1", "key", "policy")
Leases = Callable[..., Lease]


@asynccontextmanager
async def runner_of(agent: Agent, **settings: object) -> AsyncIterator[ProcessRunner]:
    runner = ProcessRunner(agent, RunnerConfig(**{"concurrency": 2, "timeout": 60, **settings}))  # type: ignore[arg-type]
    await runner.start()
    try:
        yield runner
    finally:
        await runner.close()


def make_misbehave() -> Agent:
    """Local functions travel by value, so the fork server need not import this module, pytest and all."""

    class Odd:
        """A number whose every word raises."""

        def __float__(self) -> float:
            raise KeyError("no float")

        def __repr__(self) -> str:
            raise RuntimeError("no repr")

    def misbehave(task: Task, llm: LLM) -> object:
        """An agent that does what its task says."""
        match task.input:
            case "raise":
                raise LookupError("the agent's own error")
            case "hang":
                time.sleep(600)
            case "spin":
                while True:
                    pass
            case "os._exit":
                os._exit(3)
            case "sys.exit":
                sys.exit(4)
            case "interrupt":
                raise KeyboardInterrupt
            case "segfault":
                ctypes.string_at(0)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "nan":
                return math.nan
            case "string":
                return "1.0"
            case "none":
                return None
            case "pid":
                return float(os.getpid())
            case "odd":
                return Odd()
            case "large":
                lightning.reward(1e39)
            case "smuggle":
                session = current_attempt()
                assert session is not None
                session._step_rewards.append(StepReward(math.inf))
            case "context":
                seen = decimal.getcontext().prec
                decimal.setcontext(decimal.Context(prec=seen + 1))  # a context variable
                lightning.component("left open").__enter__()
                return {"reward": seen, "depth": len(component_path())}
            case "shout":
                for _ in range(30):
                    emit(ToolEvent("shout", "ok", output="x" * 10_000_000))
        return 1.0

    return misbehave


misbehave = make_misbehave()

MISDEEDS = [
    ("raise", Fault.AGENT, "LookupError: the agent's own error"),
    ("sys.exit", Fault.AGENT, "SystemExit: 4"),
    ("interrupt", Fault.AGENT, "KeyboardInterrupt"),
    ("nan", Fault.AGENT, "return the reward as a finite number"),
    ("string", Fault.AGENT, "return the reward as a finite number"),
    ("none", Fault.AGENT, "the agent's reward is None"),
    ("odd", Fault.AGENT, "return the reward as a finite number"),
    ("large", Fault.AGENT, "give a finite number, between -1e+12 and 1e+12"),
    ("smuggle", Fault.AGENT, "what the agent reported cannot be used: a step reward is inf"),
    ("os._exit", Fault.INFRASTRUCTURE, "exited with code 3"),
    ("segfault", Fault.INFRASTRUCTURE, "was killed by SIGSEGV"),
    ("kill", Fault.INFRASTRUCTURE, "was killed by SIGKILL"),
]


async def test_whatever_an_agent_does_is_an_outcome_and_the_next_one_runs(lease: Leases) -> None:
    async with runner_of(misbehave, concurrency=1) as runner:
        for what, fault, says in MISDEEDS:
            outcome = await runner.run(lease(what), NOWHERE)
            assert (outcome.reward, outcome.fault) == (None, fault), what
            assert says in outcome.error
            assert (await runner.run(lease("fine"), NOWHERE)).reward == 1.0, f"after {what}"


async def test_the_context_of_a_sync_agent_ends_with_its_rollout(lease: Leases) -> None:
    async with runner_of(misbehave, concurrency=1) as runner:
        found = [(await runner.run(lease("context"), NOWHERE)).rewards for _ in range(3)]
    assert found == [{"reward": float(decimal.getcontext().prec), "depth": 1.0}] * 3


async def test_large_reports_are_clipped_and_cost_no_reward(lease: Leases) -> None:
    async with runner_of(misbehave, concurrency=1) as runner:
        outcome = await runner.run(lease("shout"), NOWHERE)
    assert outcome.reward == 1.0, outcome.error
    assert [len(event.output) for event in outcome.tool_events] == [4096] * 30


class DiesInWorkers:
    """Loads in the fork server, whose parent is this process, and ends every worker that loads it."""

    def __call__(self, task: Task, llm: LLM) -> float:
        raise NotImplementedError

    def __reduce__(self) -> tuple[Callable[[int], Agent], tuple[int]]:
        def load(trainer: int) -> Agent:
            if os.getppid() != trainer:
                os._exit(3)
            return lambda task, llm: 1.0

        return load, (os.getpid(),)


async def test_workers_that_die_right_after_their_fork_are_outcomes(lease: Leases) -> None:
    async with runner_of(DiesInWorkers(), concurrency=2) as runner:
        found = await asyncio.gather(*(runner.run(lease(), NOWHERE) for _ in range(6)))
    assert [outcome.fault for outcome in found] == [Fault.INFRASTRUCTURE] * 6
    assert all("exited with code 3" in outcome.error for outcome in found)


async def test_the_news_of_a_fork_and_of_its_end_may_come_together() -> None:
    server = ForkServer(b"")
    server._control, other = socket.socketpair()
    server._listener = asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type]
    with other:
        forking = asyncio.create_task(server.fork())
        await asyncio.sleep(0)
        server._heed({"forked": 0, "pid": 123})
        server._heed({"exited": 123, "status": -9})
        worker = await forking
        assert (worker.pid, await worker.exited) == (123, -9)
        worker.hang_up()
        await server.close()


async def test_an_agent_that_hangs_is_killed_and_costs_only_itself(lease: Leases) -> None:
    async with runner_of(misbehave, concurrency=3, timeout=1.0) as runner:
        found = await asyncio.gather(*(runner.run(lease(what), NOWHERE) for what in ("hang", "spin", "fine")))
    assert [outcome.fault for outcome in found] == [Fault.TIMEOUT, Fault.TIMEOUT, None]
    assert "more than 1 s" in found[0].error
    assert found[0].seconds >= 1.0


async def test_a_timeout_kills_what_the_agent_started(
    lease: Leases, tmp_path: Path, gone: Callable[[int], bool]
) -> None:
    def agent(task: Task, llm: LLM) -> float:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(str(task.input)).write_text(str(child.pid))
        time.sleep(600)
        return 1.0

    async with runner_of(agent, timeout=2.0) as runner:
        assert (await runner.run(lease(str(tmp_path / "pid")), NOWHERE)).fault is Fault.TIMEOUT
        assert gone(int((tmp_path / "pid").read_text()))


async def test_cancelling_ends_the_agent(lease: Leases, tmp_path: Path, gone: Callable[[int], bool]) -> None:
    def agent(task: Task, llm: LLM) -> float:
        Path(str(task.input)).write_text(str(os.getpid()))
        time.sleep(600)
        return 1.0

    pid = tmp_path / "pid"
    async with runner_of(agent) as runner:
        running = asyncio.create_task(runner.run(lease(str(pid)), NOWHERE))
        while not pid.exists() or not pid.read_text():
            await asyncio.sleep(0.02)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert gone(int(pid.read_text()))


async def test_sigterm_to_all_processes_ends_no_agent(lease: Leases, tmp_path: Path) -> None:
    def agent(task: Task, llm: LLM) -> float:
        scratch = Path(str(task.input))
        scratch.with_suffix(".new").write_text(f"{os.getpid()} {os.getppid()}")
        scratch.with_suffix(".new").rename(scratch)
        while not scratch.with_suffix(".go").exists():
            time.sleep(0.02)
        return 1.0

    async with runner_of(agent) as runner:
        running = asyncio.create_task(runner.run(lease(str(tmp_path / "pids")), NOWHERE))
        while not (tmp_path / "pids").exists():
            await asyncio.sleep(0.02)
        worker, fork_server = map(int, (tmp_path / "pids").read_text().split())
        for pid in (worker, fork_server):
            os.kill(pid, signal.SIGTERM)
        (tmp_path / "pids.go").touch()
        assert (await running).reward == 1.0


async def test_an_agent_that_blocks_sigterm_itself_has_it_blocked_after_a_fork(lease: Leases) -> None:
    def agent(task: Task, llm: LLM) -> dict[str, float]:
        blocked = []
        for how in (signal.SIG_BLOCK, signal.SIG_UNBLOCK):
            signal.pthread_sigmask(how, {signal.SIGTERM})
            forked = os.fork()
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            if not forked:
                os._exit(signal.SIGTERM in mask)
            blocked += [signal.SIGTERM in mask, os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])]
        return dict(zip(("parent", "child", "parent after", "child after"), map(float, blocked), strict=True))

    async with runner_of(agent) as runner:
        outcome = await runner.run(lease("go"), NOWHERE)
    assert (outcome.error, list(outcome.rewards.values())) == ("", [1, 1, 0, 0])


async def test_what_an_agent_starts_still_ends_by_sigterm(lease: Leases) -> None:
    def agent(task: Task, llm: LLM) -> dict[str, float]:
        program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        program.terminate()
        forked = os.fork()
        if not forked:
            time.sleep(600)
        os.kill(forked, signal.SIGTERM)  # at once: it has hardly begun
        return {"program": program.wait(60), "forked": os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])}

    async with runner_of(agent) as runner:
        outcome = await runner.run(lease("go"), NOWHERE)
    assert (outcome.error, outcome.rewards) == ("", {"program": -signal.SIGTERM, "forked": -signal.SIGTERM})


async def test_a_worker_is_kept_and_then_replaced(lease: Leases) -> None:
    async with runner_of(misbehave, concurrency=1, rollouts_per_process=2) as runner:
        pids = [(await runner.run(lease("pid"), NOWHERE)).reward for _ in range(4)]
    assert pids[0] == pids[1] != pids[2] == pids[3]


async def test_a_worker_killed_while_idle_is_not_used(lease: Leases, gone: Callable[[int], bool]) -> None:
    async with runner_of(misbehave, concurrency=1) as runner:
        first = (await runner.run(lease("pid"), NOWHERE)).reward
        assert first is not None
        os.kill(int(first), signal.SIGKILL)
        assert gone(int(first))
        second = await runner.run(lease("pid"), NOWHERE)
        third = second if second.reward is not None else await runner.run(lease("pid"), NOWHERE)
        assert third.reward not in (None, first)


async def test_a_killed_fork_server_takes_its_workers_along_and_is_replaced(
    lease: Leases, gone: Callable[[int], bool]
) -> None:
    async with runner_of(misbehave, rollouts_per_process=9) as runner:
        worker = (await runner.run(lease("pid"), NOWHERE)).reward
        assert worker is not None
        hanging = asyncio.create_task(runner.run(lease("hang"), NOWHERE))
        await asyncio.sleep(0.2)
        os.kill(psutil.Process(int(worker)).ppid(), signal.SIGKILL)
        lost = await hanging
        assert lost.fault is Fault.INFRASTRUCTURE
        assert "disappeared together with its fork server" in lost.error
        assert gone(int(worker))
        assert (await runner.run(lease("fine"), NOWHERE)).reward == 1.0


async def test_a_killed_fork_server_leaves_nothing_that_an_agent_started(
    lease: Leases, tmp_path: Path, gone: Callable[[int], bool]
) -> None:
    def agent(task: Task, llm: LLM) -> float:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        scratch = Path(str(task.input))
        scratch.with_suffix(".new").write_text(f"{child.pid} {os.getppid()}")
        scratch.with_suffix(".new").rename(scratch)
        time.sleep(600)
        return 1.0

    async with runner_of(agent) as runner:
        running = asyncio.create_task(runner.run(lease(str(tmp_path / "pids")), NOWHERE))
        while not (tmp_path / "pids").exists():
            await asyncio.sleep(0.02)
        child, fork_server = map(int, (tmp_path / "pids").read_text().split())
        try:
            os.kill(fork_server, signal.SIGKILL)
            assert (await running).fault is Fault.INFRASTRUCTURE
            assert gone(child)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


async def test_eight_rollouts_at_once_are_told_apart(lease: Leases, server: ChatServer) -> None:
    async def agent(task: Task, llm: LLM) -> float:
        client = openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key)

        @lightning.tool
        def note(text: str) -> str:
            return text.upper()

        with lightning.component(f"agent-{task.input}"):
            for turn in range(3):
                messages = [{"role": "user", "content": f"{task.input} {turn}"}]
                await client.chat.completions.create(model=llm.model, messages=messages)  # type: ignore[call-overload]
                note(f"{task.input}")
                lightning.reward(float(turn))
        return float(str(task.input))

    async with runner_of(agent, concurrency=8, preload=("openai.resources.chat",)) as runner:
        found = await asyncio.gather(*(runner.run(lease(number), server.llm(f"key-{number}")) for number in range(8)))
    assert [outcome.reward for outcome in found] == list(range(8)), found
    for number, outcome in enumerate(found):
        assert [event.output for event in outcome.tool_events] == [str(number)] * 3
        assert all(event.caller and event.caller.agent == f"agent-{number}" for event in outcome.tool_events)
        assert [step.value for step in outcome.step_rewards] == [0.0, 1.0, 2.0]
    assert len(server.calls) == 24
    for call in server.calls:
        number = call.text.split()[0]
        assert (call.key, call.rollout) == (f"key-{number}", f"key-{number}")
        assert call.caller == lightning.Caller(f"agent-{number}", (f"agent-{number}",), framework="raw")


async def test_an_agent_that_only_reads_the_environment_works(
    lease: Leases, server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no login of the user's is in it, which a client would send beside the rollout's key, or before it."""
    for name in LOGINS:
        monkeypatch.setenv(name, "the-users-own")

    def agent(task: Task, llm: LLM) -> float:
        assert "the-users-own" not in os.environ.values()
        with openai.OpenAI() as client:
            messages = [{"role": "user", "content": "hi"}]
            client.chat.completions.create(model="policy", messages=messages)  # type: ignore[call-overload]
        return 1.0

    before = os.environ.get("OPENAI_API_KEY")
    async with runner_of(agent) as runner:
        assert (await runner.run(lease(), server.llm("key-1"))).reward == 1.0
    assert [call.key for call in server.calls] == ["key-1"]
    assert os.environ.get("OPENAI_API_KEY") == before
    assert {os.environ[name] for name in LOGINS} == {"the-users-own"}


async def test_agents_call_the_gateway_past_the_users_proxy(
    lease: Leases, server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.delenv("no_proxy", raising=False)

    def agent(task: Task, llm: LLM) -> dict[str, float]:
        import httpx

        theirs = [os.environ[name].startswith("example.org,") for name in ("NO_PROXY", "no_proxy")]
        body = {"messages": [{"role": "user", "content": "hi"}]}
        reply = httpx.post(f"{llm.base_url}/chat/completions", json=body, headers={"authorization": "Bearer key"})
        return {"reward": reply.status_code, "kept": all(theirs)}

    async with runner_of(agent) as runner:
        outcome = await runner.run(lease(), server.llm())
    assert outcome.rewards == {"reward": 200.0, "kept": 1.0}, outcome.error
    assert os.environ["NO_PROXY"] == "example.org"


@pytest.mark.parametrize(
    ("theirs", "both"),
    [
        ({}, "10.0.0.7"),
        ({"NO_PROXY": "a.org, b.org"}, "a.org,b.org,10.0.0.7"),
        ({"no_proxy": "a.org,10.0.0.7"}, "a.org,10.0.0.7"),
        ({"no_proxy": "", "NO_PROXY": "a.org"}, "a.org,10.0.0.7"),
        ({"NO_PROXY": "*"}, "*"),
    ],
)
def test_no_proxy_keeps_what_the_user_has(theirs: dict[str, str], both: str) -> None:
    proxied = {**theirs, "https_proxy": "http://127.0.0.1:1"}
    assert without_proxy(proxied, "http://10.0.0.7:8000/v1") == {"NO_PROXY": both, "no_proxy": both}
    assert without_proxy(theirs, "http://10.0.0.7:8000/v1") == {}, "without a proxy there is nothing to say"
    assert without_proxy(proxied, "https://lightning.example.org/v1") == {}, "it may be reached through the proxy alone"


async def test_an_async_agent_keeps_its_client_across_rollouts(lease: Leases, server: ChatServer) -> None:
    cache: dict[str, httpx.AsyncClient] = {}

    async def agent(task: Task, llm: LLM) -> float:
        client = cache.setdefault("client", httpx.AsyncClient())
        body = {"messages": [{"role": "user", "content": "hi"}]}
        headers = {"authorization": f"Bearer {llm.api_key}"}
        reply = await client.post(f"{llm.base_url}/chat/completions", json=body, headers=headers)
        return float(reply.status_code == 200)

    async with runner_of(agent, concurrency=1, rollouts_per_process=9) as runner:
        for number in range(4):
            assert (await runner.run(lease(), server.llm(f"key-{number}"))).reward == 1.0
    assert [call.rollout for call in server.calls] == [f"key-{number}" for number in range(4)]
    assert server.connections == 1, "the event loop, and so the client's connection, outlives a rollout"


async def test_objects_and_bound_methods_are_agents(lease: Leases) -> None:
    class CountingAgent:
        """An object with an async `__call__` and state of its own."""

        def __init__(self, bonus: float) -> None:
            self.bonus, self.calls = bonus, 0

        async def __call__(self, task: Task, llm: LLM) -> dict[str, float]:
            self.calls += 1
            return {"reward": self.bonus, "calls": self.calls}

        def method(self, task: Task, llm: LLM) -> float:
            return self.bonus

    async with runner_of(CountingAgent(0.5), concurrency=1, rollouts_per_process=9) as runner:
        found = [await runner.run(lease(), NOWHERE) for _ in range(2)]
    assert [(outcome.reward, outcome.rewards["calls"]) for outcome in found] == [(0.5, 1.0), (0.5, 2.0)]
    async with runner_of(CountingAgent(0.25).method) as runner:
        assert (await runner.run(lease(), NOWHERE)).reward == 0.25


async def test_a_sync_agent_may_run_a_loop_of_its_own_or_return_an_awaitable(lease: Leases) -> None:
    async def answer() -> float:
        await asyncio.sleep(0)
        return 1.0

    def agent(task: Task, llm: LLM) -> object:
        return asyncio.run(answer()) if task.input == "run" else answer()

    async with runner_of(agent, concurrency=1) as runner:
        found = [(await runner.run(lease(how), NOWHERE)).reward for how in ("run", "return", "run", "return")]
    assert found == [1.0] * 4


async def test_an_async_agent_may_exit_or_cancel_itself(lease: Leases) -> None:
    async def agent(task: Task, llm: LLM) -> float:
        if task.input == "exit":
            sys.exit(1)
        if task.input == "cancel":
            raise asyncio.CancelledError
        return 1.0

    async with runner_of(agent, concurrency=1) as runner:
        found = [await runner.run(lease(how), NOWHERE) for how in ("exit", "cancel", "fine")]
    assert [outcome.fault for outcome in found] == [Fault.AGENT, Fault.AGENT, None]


async def test_the_siblings_of_a_group_do_not_share_random_numbers(lease: Leases) -> None:
    async with runner_of(lambda task, llm: time.sleep(0.2) or random.random(), concurrency=3) as runner:
        found = await asyncio.gather(*(runner.run(lease(), NOWHERE) for _ in range(3)))
    assert len({outcome.reward for outcome in found}) == 3


async def test_the_task_arrives_whole(lease: Leases) -> None:
    def agent(task: Task, llm: LLM) -> float:
        assert task == Task({"q": ["ü", 1.5, None]})
        assert (llm.base_url, llm.api_key, llm.model) == ("http://127.0.0.1:1/v1", "key", "policy")
        return 1.0

    async with runner_of(agent) as runner:
        outcome = await runner.run(lease({"q": ["ü", 1.5, None]}), NOWHERE)
    assert outcome.reward == 1.0, outcome.error


async def test_a_worker_that_writes_nonsense_is_not_believed(lease: Leases) -> None:
    def agent(task: Task, llm: LLM) -> float:
        reply = json.dumps({"reward": 1.0}).encode()
        for descriptor in range(3, 64):
            try:
                os.write(descriptor, len(reply).to_bytes(4, "big") + reply)
            except OSError:
                continue
        return 0.0

    async with runner_of(agent) as runner:
        outcome = await runner.run(lease(), NOWHERE)
    assert (outcome.reward, outcome.fault) == (None, Fault.AGENT)
    assert "sent no outcome" in outcome.error


def make_forking() -> Agent:
    def agent(task: Task, llm: LLM) -> float:
        if not task.input:
            return 0.5
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            return 0.25
        if task.input == "returns":
            return 9.0
        raise SystemExit(0) if task.input == "exits" else RuntimeError("in the child")

    return agent


async def test_a_forked_child_gives_no_reward_to_its_rollout_nor_to_the_next(
    lease: Leases, capfd: pytest.CaptureFixture[str]
) -> None:
    async with runner_of(make_forking(), concurrency=1, rollouts_per_process=3) as runner:
        for how, said in (("returns", "returned from"), ("exits", "raised SystemExit"), ("raises", "in the child")):
            outcomes = [await runner.run(lease(how if number == 0 else ""), NOWHERE) for number in range(3)]
            assert [outcome.reward for outcome in outcomes] == [0.25, 0.5, 0.5]
            assert said in capfd.readouterr().err


async def test_an_agent_that_cannot_travel_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(RunnerError, match=r"cannot be sent to a worker process.*runner='inline'"):
        ProcessRunner(lambda task, llm: float(lock.locked()), RunnerConfig())
    with pytest.raises(RunnerError, match="cannot be called"):
        ProcessRunner("agent", RunnerConfig())  # type: ignore[arg-type]


REMEMBERS = """
seen = []

async def agent(task, llm):
    import sys
    fresh = "xmlrpc.client" not in sys.modules  # what nothing else here imports
    import xmlrpc.client
    seen.append(task.input)
    return {"reward": 1.0, "seen": float(len(seen)), "fresh": float(fresh)}
"""


async def until_warm(runner: ProcessRunner) -> None:
    async with asyncio.timeout(60):
        while runner._server is None or runner._server.warmed is None:
            await asyncio.sleep(0.01)


async def test_each_rollout_has_a_process_of_its_own_that_begins_with_the_imports_of_the_first(
    lease: Leases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "remembers.py").write_text(REMEMBERS)
    monkeypatch.syspath_prepend(tmp_path)
    agent = importlib.import_module("remembers").agent
    async with runner_of(agent) as runner:
        first = await runner.run(lease(), NOWHERE)
        await until_warm(runner)
        later = [await runner.run(lease(), NOWHERE) for _ in range(2)]
    assert [each.rewards["seen"] for each in (first, *later)] == [1.0, 1.0, 1.0]
    assert [each.rewards["fresh"] for each in (first, *later)] == [1.0, 0.0, 0.0]
    async with runner_of(agent, concurrency=1, rollouts_per_process=9) as runner:
        assert [(await runner.run(lease(), NOWHERE)).rewards["seen"] for _ in range(3)] == [1.0, 2.0, 3.0]
    sys.modules.pop("remembers")


async def test_a_name_that_the_agents_own_path_gives_another_module_is_not_imported_for_the_next(
    lease: Leases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents put a folder before the path: `helpers` is theirs then, and not the one that the fork server would find."""
    for folder, kind in (("theirs/helpers", "theirs"), ("ours/helpers", "ours")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").touch()
        (tmp_path / folder / f"{kind}.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "ours")
    theirs = str(tmp_path / "theirs")

    def agent(task: Task, llm: LLM) -> float:
        sys.path.insert(0, theirs)
        importlib.import_module("helpers.theirs")
        return 1.0

    async with runner_of(agent) as runner:
        for _ in range(3):
            outcome = await runner.run(lease(), NOWHERE)
            assert (outcome.reward, outcome.error) == (1.0, "")
            await until_warm(runner)


async def test_imports_that_start_threads_or_fail_stay_with_the_rollouts(
    lease: Leases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread of the fork server's would be in no worker; what fails there fails in the rollout, where it is said."""
    (tmp_path / "lightning_beats.py").write_text(WITH_THREADS)
    (tmp_path / "lightning_once.py").write_text(
        "import os\nassert os.environ['OPENAI_API_KEY'] == 'a rollout'\nimport wave"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def agent(task: Task, llm: LLM) -> float:
        importlib.import_module(str(task.input))
        return float(any(thread.name == "heartbeat" for thread in threading.enumerate()))

    caplog.set_level("INFO", logger="lightning.runner.forkserver")
    async with runner_of(agent) as runner:
        assert (await runner.run(lease("lightning_beats"), NOWHERE)).reward == 1.0
        await until_warm(runner)
        assert (await runner.run(lease("lightning_beats"), NOWHERE)).reward == 1.0
    async with runner_of(agent) as runner:
        assert (await runner.run(lease("lightning_once"), replace(NOWHERE, api_key="a rollout"))).reward == 0.0
        await until_warm(runner)
    assert "0 modules of the first rollout are imported for the next ones (not: 1 thread (heartbeat))" in caplog.text
    assert "(not: lightning_once)" in caplog.text


async def test_a_users_own_modules_are_each_rollouts_own(
    lease: Leases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator that a module makes at its top would be the same one in all later rollouts."""
    (tmp_path / "explorer.py").write_text("import random, wave\nRNG = random.Random()")
    monkeypatch.syspath_prepend(tmp_path)

    def agent(task: Task, llm: LLM) -> dict[str, float]:
        wave = "wave" in sys.modules
        drawn = importlib.import_module("explorer").RNG.random()
        return {"drawn": drawn, "wave": float(wave), "reward": 1.0}

    async with runner_of(agent) as runner:
        await runner.run(lease("x"), NOWHERE)
        await until_warm(runner)
        drawn = [(await runner.run(lease("x"), NOWHERE)).rewards for _ in range(3)]
    assert len({each["drawn"] for each in drawn}) == 3
    assert all(each["wave"] == 1.0 for each in drawn), "what a library brings is imported once"


WITH_THREADS = """
import threading

class Exporter(threading.Thread):
    __module__ = "opentelemetry.sdk"

for kind, name in ((threading.Thread, "heartbeat"), (Exporter, "exporter")):
    kind(target=threading.Event().wait, name=name, daemon=True).start()
"""


async def test_threads_that_no_worker_has_are_named_once(
    lease: Leases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "with_threads.py").write_text(WITH_THREADS)
    monkeypatch.syspath_prepend(tmp_path)
    async with runner_of(lambda task, llm: float(threading.active_count()), preload=("with_threads",)) as runner:
        assert (await runner.run(lease(), NOWHERE)).reward == 1.0
        await (await runner._new_server()).close()  # as when the first one died
    (warned,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "started 1 thread (heartbeat), which" in warned, "those of OpenTelemetry start again after a fork"
    assert "Start threads inside the agent, or use runner='inline'" in warned


async def test_an_agent_without_threads_starts_in_silence(lease: Leases, caplog: pytest.LogCaptureFixture) -> None:
    async with runner_of(misbehave) as runner:
        assert (await runner.run(lease("fine"), NOWHERE)).reward is not None
    assert not caplog.records


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"preload": ("no_such_module",)}, r"preloading module 'no_such_module' \(runner.preload\) failed"),
        ({"adapters": ("nobody",)}, "installing the adapters failed"),
    ],
)
async def test_what_makes_every_agent_impossible_is_an_error_at_the_start(
    settings: dict[str, object], says: str
) -> None:
    with pytest.raises(RunnerError, match=says):
        async with runner_of(misbehave, **settings):
            pass


async def test_it_must_be_started_and_can_be_started_again(lease: Leases) -> None:
    runner = ProcessRunner(misbehave, RunnerConfig(concurrency=1))
    with pytest.raises(RunnerError, match="has not been started"):
        await runner.run(lease(), NOWHERE)
    for _ in range(2):
        await runner.start()
        await runner.start()
        assert (await runner.run(lease(), NOWHERE)).reward == 1.0
        await runner.close()
        await runner.close()


def test_it_can_be_used_from_one_event_loop_after_another(lease: Leases) -> None:
    runner = ProcessRunner(misbehave, RunnerConfig(concurrency=1))

    async def once() -> list[Outcome]:
        await runner.start()
        try:
            return await asyncio.gather(*(runner.run(lease(), NOWHERE) for _ in range(3)))
        finally:
            await runner.close()

    for _ in range(2):
        assert [outcome.reward for outcome in asyncio.run(once())] == [1.0] * 3


def test_calls_are_recorded_with_the_answer_they_got() -> None:
    with ChatServer(answer=lambda call: call.text[::-1]) as running:
        body = {"messages": [{"role": "user", "content": "abc"}]}
        reply = httpx.post(f"{running.llm().base_url}/chat/completions", json=body).json()
    assert reply["choices"][0]["message"]["content"] == "cba"
    assert isinstance(running.calls[0], ChatRequest)
