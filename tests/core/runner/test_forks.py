"""What an agent forks by itself never comes back into lightning: neither as an answer, nor as a second runner."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from lightning.config import RunnerConfig
from lightning.runner import forkserver_main, worker
from lightning.runner.inline import InlineRunner
from lightning.runner.protocol import Agent
from lightning.runner.worker import flush, run_agent
from lightning.types import LLM, Lease, Outcome, Rollout, Task

NOWHERE = LLM("http://127.0.0.1:1/v1", "key", "policy")
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def in_a_fork(what: Callable[[], object]) -> list[object]:
    """What every process that comes back from `what` has got, in a process of its own: none may come back into pytest."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            os.write(writing, json.dumps(what()).encode() + b"\n")
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        answers = [json.loads(line) for line in told]
    os.waitpid(child, 0)
    return answers


def fork(how: str) -> float:
    """0.25 in this process, when the child has ended; what a child does is said by `how`."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return 0.25 if os.waitstatus_to_exitcode(status) == {"returns": 0, "exits": 3}.get(how, 1) else -1.0
    if how == "returns":
        return 9.0
    raise SystemExit(3) if how == "exits" else RuntimeError("in the child")


def forks(task: Task, llm: LLM) -> float:
    return fork(str(task.input))


def forks_in_a_thread(task: Task, llm: LLM) -> float:
    found: list[float] = []

    def run() -> None:
        child = os.fork()
        if child:
            os.waitpid(child, 0)
        found.append(0.25 if child else 9.0)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


async def forks_on_a_loop(task: Task, llm: LLM) -> float:
    await asyncio.sleep(0)
    return forks(task, llm)


def forks_behind_an_awaitable(task: Task, llm: LLM) -> Awaitable[float]:
    return forks_on_a_loop(task, llm)


def in_the_worker(agent: Agent, how: str) -> Outcome:
    with asyncio.Runner() as loop:
        return run_agent(agent, Task(how), NOWHERE, loop)


def inline(agent: Agent, how: str) -> Outcome:
    async def run() -> Outcome:
        runner = InlineRunner(agent, RunnerConfig(adapters=()))
        await runner.start()
        try:
            return await runner.run(Lease(Rollout("r", "run", Task(how), "group", attempt=1), "worker", 0.0), NOWHERE)
        finally:
            await runner.close()

    return asyncio.run(run())


@pytest.mark.parametrize("how", ["returns", "exits", "raises"])
@pytest.mark.parametrize("agent", [forks, forks_on_a_loop, forks_behind_an_awaitable])
@pytest.mark.parametrize("runner", [in_the_worker, inline])
def test_a_child_ends_where_it_comes_back(runner: Callable[[Agent, str], Outcome], agent: Agent, how: str) -> None:
    assert in_a_fork(lambda: runner(agent, how).reward) == [0.25]


def test_a_child_of_a_thread_comes_back_nowhere() -> None:
    assert in_a_fork(lambda: in_the_worker(forks_in_a_thread, "returns").reward) == [0.25]


def test_what_a_child_has_printed_is_written_and_its_end_is_said(tmp_path: Path) -> None:
    def agent(task: Task, llm: LLM) -> float:
        with Path(tmp_path, "out").open("w") as sys.stdout, Path(tmp_path, "err").open("w") as sys.stderr:
            child = os.fork()
            if child:
                os.waitpid(child, 0)
                return 0.25
            print("from the child")
            sys.stdout, sys.stderr = (os.fdopen(os.dup(each.fileno()), "a") for each in (sys.stdout, sys.stderr))
            print("and more", end="")
            return 9.0

    assert in_a_fork(lambda: in_the_worker(agent, "").reward) == [0.25]
    assert Path(tmp_path, "out").read_text() == "from the child\nand more"
    assert "returned from the agent's code and was ended" in Path(tmp_path, "err").read_text()


class WritesAlone:
    def write(self, text: str) -> None: ...


class Interrupts(WritesAlone):
    def flush(self) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("out", [None, WritesAlone()], ids=["none", "write alone"])
def test_no_stdout_of_an_agent_keeps_its_outcome_from_the_worker(
    out: WritesAlone | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", out)
    flush()


@pytest.mark.parametrize("out", [None, WritesAlone(), Interrupts()], ids=["none", "write alone", "interrupts"])
def test_a_child_ends_whatever_the_agent_has_put_in_the_place_of_stdout(out: WritesAlone | None) -> None:
    def agent(task: Task, llm: LLM) -> float:
        sys.stdout = out  # type: ignore[assignment]
        return fork("returns")

    assert in_a_fork(lambda: in_the_worker(agent, "").reward) == [0.25]


@pytest.mark.parametrize("out", [None, Interrupts()], ids=["none", "interrupts"])
def test_a_worker_never_comes_back_into_the_loop_of_the_fork_server(
    out: WritesAlone | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(sock: socket.socket, *_: object) -> None:
        sys.stdout = out  # type: ignore[assignment]

    def become_worker() -> bool:
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                mine, theirs = socket.socketpair()
                setup = {"adapters": [], "reroute": []}
                server = forkserver_main._Template(mine, os.getppid(), b"", setup, forkserver_main._Inside())
                server._pid = os.getppid()
                server._become_worker(theirs.detach())
            os._exit(9)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    monkeypatch.setattr(worker, "serve", serve)
    assert in_a_fork(become_worker) == [True]


def test_a_child_that_exits_with_a_text_says_it(tmp_path: Path) -> None:
    def agent(task: Task, llm: LLM) -> float:
        child = os.fork()
        if child:
            return 0.25 if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1 else -1.0
        sys.stderr = Path(tmp_path, "err").open("w")  # noqa: SIM115 — it is closed with the process
        sys.exit("no such page")

    assert in_a_fork(lambda: in_the_worker(agent, "").reward) == [0.25]
    assert Path(tmp_path, "err").read_text().startswith("no such page\nlightning: process ")


def test_a_module_that_forks_makes_no_second_fork_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(tmp_path, "forks_when_imported.py").write_text(
        "import os\nchild = os.fork()\nif not child:\n    raise SystemExit(0)\nos.waitpid(child, 0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert in_a_fork(lambda: forkserver_main._import_all(["forks_when_imported"])) == [[]]
