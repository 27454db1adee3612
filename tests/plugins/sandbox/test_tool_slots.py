"""Slots of tools in one process: how many runs are under way, counted as they overlap, and waits that would never end."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType

import lightning
import pytest
from lightning.errors import ConfigError, RunnerError
from lightning.instrument import activate, emit, hold_slots, reward
from lightning.instrument.threads import carry_names
from lightning.types import LLM, ToolEvent
from lightning_sandbox import tool_slots
from lightning_sandbox.tool_slots import ToolLimits, limit_tools, make_slots, tool_slot, unheld

from tests.core.runner.test_forks import in_a_fork

ONE = LLM("http://127.0.0.1:8000/v1", "one", "policy")
CASES = pytest.mark.parametrize(("name", "most"), [("search", 1), ("browse", 2), ("other", 4)])


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ToolLimits]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = make_slots({"search": 1, "browse": 2})
    undos = [limit_tools(made), carry_names()]
    yield made
    for undo in reversed(undos):
        undo()


class Overlap:
    """Counts the runs that are under way. No run ends before as many as `enough` have been so at once."""

    def __init__(self, enough: int) -> None:
        self.now = self.peak = self.runs = 0
        self.enough = enough
        self.reached = threading.Event()

    def __enter__(self) -> None:
        self.now, self.runs = self.now + 1, self.runs + 1
        self.peak = max(self.peak, self.now)
        if self.now == self.enough:
            self.reached.set()

    def __exit__(self, *_: object) -> None:
        self.now -= 1


@contextmanager
def held_elsewhere(limits: ToolLimits, name: str) -> Iterator[None]:
    """All slots of a tool, as another process has them."""
    with ExitStack() as closing:
        for path in limits.files(name):
            file = closing.enter_context(path.open())
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def free(limits: ToolLimits, name: str) -> int:
    """How many slots another process would find."""
    found = 0
    for path in limits.files(name):
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            found += 1
    return found


@CASES
def test_threads_run_a_tool_as_often_as_it_has_slots(limits: ToolLimits, name: str, most: int) -> None:
    overlap, lock = Overlap(most), threading.Lock()

    @lightning.tool(name=name)
    def run() -> None:
        with lock:
            overlap.__enter__()
        assert overlap.reached.wait(60)
        with lock:
            overlap.__exit__()

    with activate(ONE) as session, ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(run) for _ in range(4)]:
            each.result()
        assert [event.status for event in session.tool_events] == ["ok"] * 4
    assert (overlap.runs, overlap.peak) == (4, most)


@CASES
async def test_tasks_of_one_loop_run_a_tool_as_often_as_it_has_slots(limits: ToolLimits, name: str, most: int) -> None:
    overlap = Overlap(most)

    @lightning.tool(name=name)
    async def run() -> None:
        with overlap:
            while not overlap.reached.is_set():
                await asyncio.sleep(0)

    with activate(ONE) as session:
        await asyncio.wait_for(asyncio.gather(*(run() for _ in range(4))), 60)
        assert [event.status for event in session.tool_events] == ["ok"] * 4
    assert (overlap.runs, overlap.peak) == (4, most)


async def test_a_task_that_waits_leaves_the_loop_to_others(limits: ToolLimits) -> None:
    @lightning.tool
    async def search() -> None:
        pass

    with activate(ONE) as session, ExitStack() as elsewhere:
        elsewhere.enter_context(held_elsewhere(limits, "search"))
        waiting = asyncio.create_task(search())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not waiting.done()
        elsewhere.close()
        await asyncio.wait_for(waiting, 60)
        assert [event.status for event in session.tool_events] == ["ok"]


def test_a_tool_inside_itself_has_one_slot(limits: ToolLimits) -> None:
    @lightning.tool
    def search(depth: int) -> int:
        assert free(limits, "search") == 0
        with ThreadPoolExecutor(1) as pool:
            return depth if depth == 3 else pool.submit(search, depth + 1).result()

    with activate(ONE):
        assert search(0) == 3
    assert free(limits, "search") == 1


async def test_what_outlives_the_run_that_started_it_needs_a_slot_of_its_own(limits: ToolLimits) -> None:
    go, started = asyncio.Event(), list[asyncio.Task[None]]()

    @lightning.tool
    async def search(inner: bool = False) -> None:
        if not inner:
            started.append(asyncio.create_task(again()))
        else:
            assert free(limits, "search") == 0

    async def again() -> None:
        await go.wait()
        await search(inner=True)

    with activate(ONE):
        await search()
        assert free(limits, "search") == 1
        go.set()
        await started[0]


@pytest.mark.parametrize("error", [None, LookupError("nothing"), asyncio.CancelledError()])
async def test_a_slot_comes_back_however_a_run_ends(limits: ToolLimits, error: BaseException | None) -> None:
    @lightning.tool
    async def search() -> None:
        assert free(limits, "search") == 0
        if error is not None:
            raise error

    with activate(ONE), pytest.raises(type(error)) if error else ExitStack():
        await search()
    assert free(limits, "search") == 1


def test_a_stream_keeps_its_slot_between_its_items(limits: ToolLimits) -> None:
    @lightning.tool
    def search(count: int) -> Iterator[int]:
        yield from range(count)

    with activate(ONE):
        items = search(3)
        assert free(limits, "search") == 1, "it has not begun"
        assert next(items) == 0
        assert free(limits, "search") == 0
        assert list(search(2)) == [0, 1], "whoever reads it may use the tool"
        items.close()  # type: ignore[attr-defined]
    assert free(limits, "search") == 1


async def test_a_stream_of_a_task_keeps_its_slot_between_its_items(limits: ToolLimits) -> None:
    @lightning.tool
    async def search(count: int) -> AsyncIterator[int]:
        for item in range(count):
            yield item

    with activate(ONE):
        assert [free(limits, "search") async for _ in search(2)] == [0, 0]
    assert free(limits, "search") == 1


def test_wrong_arguments_leave_no_slot_taken(limits: ToolLimits) -> None:
    @lightning.tool
    def search(count: int) -> Iterator[int]:
        yield count

    with activate(ONE), pytest.raises(TypeError):
        next(search())  # type: ignore[call-arg]
    assert free(limits, "search") == 1


async def test_a_cancelled_wait_leaves_nothing(limits: ToolLimits) -> None:
    ran: list[bool] = []

    @lightning.tool
    async def search() -> None:
        ran.append(True)

    with activate(ONE) as session:
        with held_elsewhere(limits, "search"):
            waiting = asyncio.create_task(search())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert session.tool_events == ()
    assert (ran, free(limits, "search")) == ([], 1)


def test_a_thread_stops_waiting_when_its_rollout_ends(limits: ToolLimits, monkeypatch: pytest.MonkeyPatch) -> None:
    looked, ended = threading.Event(), list[str]()
    monkeypatch.setattr(tool_slot, "_must_come_free", lambda self: looked.set())

    @lightning.tool
    def search() -> None:
        ended.append("it ran")

    def agent() -> None:
        try:
            search()
        except RunnerError as error:
            ended.append(str(error))

    with held_elsewhere(limits, "search"):
        with activate(ONE):
            thread = threading.Thread(target=agent)
            thread.start()
            assert looked.wait(60)
        thread.join(60)
    assert ended == ["the rollout ended while its tool 'search' waited for a slot (runner.tool_limits)"]


async def test_a_wait_that_would_stop_the_loop_for_ever_is_refused(limits: ToolLimits) -> None:
    @lightning.tool(name="search")
    def at_once() -> None:
        """Called without `await`, and so on the loop."""

    @lightning.tool(name="search")
    async def slowly(until: asyncio.Event) -> None:
        await until.wait()

    end = asyncio.Event()
    with activate(ONE) as session:
        other = asyncio.create_task(slowly(end))
        async with asyncio.timeout(60):
            while free(limits, "search"):
                await asyncio.sleep(0)
        with pytest.raises(ConfigError, match="the tool 'search' was called without `await`"):
            at_once()
        await asyncio.to_thread(end.set)
        await other
        at_once()
        assert [event.status for event in session.tool_events] == ["ok", "ok"]


def test_outside_a_rollout_and_after_the_undo_nobody_waits(limits: ToolLimits) -> None:
    @lightning.tool
    def search() -> str:
        return "found"

    with held_elsewhere(limits, "search"):
        assert search() == "found"
        undo = limit_tools(ToolLimits("", {}))
        with activate(ONE):
            assert search() == "found"
        undo()


class Tool:
    """A framework's."""

    def __init__(self, name: str, limits: ToolLimits) -> None:
        self.name, self.limits = name, limits

    def run(self) -> int:
        return free(self.limits, "search")

    async def arun(self) -> int:
        return free(self.limits, "search")

    async def stream(self) -> AsyncIterator[int]:
        yield free(self.limits, "search")


async def test_a_frameworks_tools_hold_slots_between_start_and_undo(
    limits: ToolLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("acme_tools")
    module.Tool = Tool  # type: ignore[attr-defined]
    before = dict(vars(Tool))

    async def seen(name: str) -> list[int]:
        tool = Tool(name, limits)
        return [tool.run(), await tool.arun(), *[item async for item in tool.stream()]]

    undo = hold_slots("acme_tools", "Tool", ("run", "arun", "stream", "absent"))
    monkeypatch.setitem(sys.modules, "acme_tools", module)
    undo()
    undo = hold_slots("acme_tools", "Tool", ("run", "arun", "stream", "absent"))
    with activate(ONE):
        assert await seen("search") == [0, 0, 0]
        assert await seen("other") == [1, 1, 1]
    undo()
    assert dict(vars(Tool)) == before
    with activate(ONE):
        assert await seen("search") == [1, 1, 1]


def test_without_limits_a_framework_is_left_as_it_is() -> None:
    before = dict(vars(Tool))
    undo = hold_slots(__name__, "Tool", ("run",))
    assert dict(vars(Tool)) == before
    undo()


def test_tools_that_ran_past_their_limits_are_known(limits: ToolLimits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_sandbox.tool_slots._held_once", set())

    @lightning.tool
    def search() -> None:
        """Held back."""

    with activate(ONE) as session:
        search()
        session.add_tool_event(ToolEvent("browse", "ok"))
        session.add_tool_event(ToolEvent("other", "ok"))
        assert unheld(session.tool_events) == ["browse"]
    assert unheld([ToolEvent("browse", "blocked")]) == [], "a guardrail stopped it before it began"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_slot_is_given_back_by_the_process_that_took_it_wherever_it_was_made(limits: ToolLimits) -> None:
    """What that process has forked since has the lock, too."""
    (file,) = limits.files("search")
    with activate(ONE):
        slot = tool_slot("search")
        child = os.fork()
        if child == 0:
            found = 1
            try:
                with slot:
                    pipe = os.pipe()
                    if (grandchild := os.fork()) == 0:
                        os.close(pipe[1])
                        os.read(pipe[0], 1)  # until its parent has ended
                        os._exit(0)
                with file.open() as other:
                    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = 0 if grandchild else 2
            finally:
                os._exit(found)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_that_leaves_a_tool_does_not_free_its_parents_slot(limits: ToolLimits) -> None:
    with activate(ONE), tool_slot("search") as held, limits.files("search")[0].open() as file:
        assert in_a_fork(held.release) == [None]
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # that is what this is about
def test_a_process_that_is_forked_while_another_thread_takes_a_slot_does_not_wait_for_it(limits: ToolLimits) -> None:
    held, let_go = threading.Event(), threading.Event()

    def take() -> None:
        with tool_slots._lock:
            held.set()
            let_go.wait(20)

    with activate(ONE), ThreadPoolExecutor(1) as pool:
        taking = pool.submit(take)
        held.wait(20)
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(3)  # ends it where it waits
                with tool_slot("search"):
                    reward(1.0)
                    emit(ToolEvent("search", "ok"))
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitpid(child, 0)[1]
        let_go.set()
        taking.result()
    assert status == 0
