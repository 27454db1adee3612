"""`runner.tool_limits` over all rollouts of a runner, in worker processes and in this one; and limits that bound nothing."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import lightning
import pytest
from lightning.config.plugin_settings import RunnerConfig
from lightning.errors import RunnerError
from lightning.instrument import emit
from lightning.runner.inline import InlineRunner
from lightning.runner.process import ProcessRunner
from lightning.runner.protocol import Agent
from lightning.types import LLM, Fault, Lease, Outcome, Task, ToolEvent
from lightning_sandbox.tool_slots import ENOUGH, LimitStage, ToolLimits, limits_for, make_slots

NOWHERE = LLM("http://127.0.0.1:1/v1", "key", "policy")
AGENTS = 4
Leases = Callable[..., Lease]


@pytest.fixture(autouse=True)
def _a_machine_of_our_own(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("machine")))


@asynccontextmanager
async def running(
    kind: type[ProcessRunner | InlineRunner], agent: Agent, **settings: object
) -> AsyncIterator[ProcessRunner | InlineRunner]:
    runner = kind(agent, RunnerConfig(**{"concurrency": AGENTS, "timeout": 60, **settings}))  # type: ignore[arg-type]
    await runner.start()
    try:
        yield runner
    finally:
        await runner.close()


@contextmanager
def held_elsewhere(limits: ToolLimits, name: str) -> Iterator[None]:
    """All slots of a tool, as another process has them."""
    with ExitStack() as closing:
        for path in limits.files(name):
            fcntl.flock(closing.enter_context(path.open()), fcntl.LOCK_EX)
        yield


def make_crowd() -> Agent:
    """Its tool runs until as many runs as `most` are under way, and every agent has asked for it; then it counts them.

    It travels by value, so that the fork server need not import this module, pytest and all.
    """

    def crowd(task: Task, llm: LLM) -> float:
        folder, most, agents = Path(task.input["folder"]), task.input["most"], task.input["agents"]

        def marks(kind: str) -> int:
            return len(list(folder.glob(f"{kind}-*")))

        @lightning.tool(name="browser")
        def browse() -> int:
            mine = folder / f"inside-{os.getpid()}"
            mine.touch()
            while marks("asked") < agents or (marks("inside") < most and marks("full") == 0):
                time.sleep(0.001)
            (folder / f"full-{os.getpid()}").touch()
            seen = marks("inside")
            mine.unlink()
            return seen

        (folder / f"asked-{os.getpid()}").touch()
        return float(browse())

    return crowd


def make_holder() -> Agent:
    """Has the slot, says so, and then does what its task says."""

    def holder(task: Task, llm: LLM) -> float:
        @lightning.tool
        def browser() -> None:
            match task.input["then"]:
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "hang":
                    Path(task.input["file"]).touch()
                    time.sleep(600)

        browser()
        return 1.0

    return holder


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 2, AGENTS])
async def test_worker_processes_run_a_tool_as_often_as_its_limit_says(lease: Leases, tmp_path: Path, most: int) -> None:
    task = {"folder": str(tmp_path), "most": most, "agents": AGENTS}
    async with running(ProcessRunner, make_crowd(), tool_limits={"browser": most}) as runner:
        outcomes = await asyncio.gather(*(runner.run(lease(task), NOWHERE) for _ in range(AGENTS)))
    assert [outcome.error for outcome in outcomes] == [""] * AGENTS
    assert max(outcome.reward or 0.0 for outcome in outcomes) == most
    assert [event.status for outcome in outcomes for event in outcome.tool_events] == ["ok"] * AGENTS


@pytest.mark.slow
async def test_runners_of_one_machine_share_the_slots(lease: Leases, tmp_path: Path) -> None:
    """As a training and a client have them, or the actors of Ray on one node."""
    task = {"folder": str(tmp_path), "most": 1, "agents": 2}
    limits = {"tool_limits": {"browser": 1}}
    async with (
        running(ProcessRunner, make_crowd(), **limits) as one,
        running(ProcessRunner, make_crowd(), **limits) as two,
    ):
        outcomes = await asyncio.gather(*(each.run(lease(task), NOWHERE) for each in (one, two)))
    assert [outcome.reward for outcome in outcomes] == [1.0, 1.0]


@pytest.mark.slow
async def test_a_worker_that_dies_leaves_its_slot(lease: Leases, tmp_path: Path) -> None:
    async with running(ProcessRunner, make_holder(), tool_limits={"browser": 1}) as runner:
        died = await runner.run(lease({"then": "kill"}), NOWHERE)
        assert died.fault is Fault.INFRASTRUCTURE
        assert (await runner.run(lease({"then": "return"}), NOWHERE)).reward == 1.0
        file = tmp_path / "inside"
        hanging = asyncio.create_task(runner.run(lease({"then": "hang", "file": str(file)}), NOWHERE))
        waiting = asyncio.create_task(runner.run(lease({"then": "return"}), NOWHERE))
        while not file.exists():
            await asyncio.sleep(0.01)
        assert not hanging.done()
        hanging.cancel()
        assert (await waiting).reward == 1.0


async def test_agents_in_this_process_run_a_tool_as_often_as_its_limit_says(lease: Leases) -> None:
    now, peak = 0, 0

    @lightning.tool(name="browser")
    async def browse(most: int) -> None:
        nonlocal now, peak
        now, peak = now + 1, max(peak, now + 1)
        while peak < most:
            await asyncio.sleep(0)
        now -= 1

    async def agent(task: Task, llm: LLM) -> float:
        await browse(task.input)
        return 1.0

    for most in (1, 2, AGENTS):
        peak = 0
        async with running(InlineRunner, agent, tool_limits={"browser": most}) as runner:
            outcomes = await asyncio.gather(*(runner.run(lease(most), NOWHERE) for _ in range(AGENTS)))
        assert [outcome.reward for outcome in outcomes] == [1.0] * AGENTS
        assert peak == most


async def test_an_agent_whose_time_is_over_while_it_waits_leaves_nothing(lease: Leases) -> None:
    ran: list[bool] = []

    @lightning.tool
    async def browser() -> None:
        ran.append(True)

    async def agent(task: Task, llm: LLM) -> float:
        await browser()
        return 1.0

    limits = make_slots({"browser": 1})
    async with running(InlineRunner, agent, tool_limits={"browser": 1}, timeout=0.2) as runner:
        with held_elsewhere(limits, "browser"):
            outcome = await runner.run(lease(), NOWHERE)
        assert (outcome.fault, outcome.tool_events, ran) == (Fault.TIMEOUT, (), [])
        assert (await runner.run(lease(), NOWHERE)).reward == 1.0
    assert ran == [True]


def make_past() -> Agent:
    """Reports a run of a tool as an adapter does whose framework lets nobody wait."""

    def past(task: Task, llm: LLM) -> float:
        emit(ToolEvent("browser", "ok"))
        return 1.0

    return past


@pytest.mark.parametrize(
    "kind", [InlineRunner, pytest.param(ProcessRunner, marks=pytest.mark.slow)], ids=["inline", "process"]
)
async def test_limits_that_bound_nothing_are_named(
    lease: Leases, kind: type[ProcessRunner | InlineRunner], warnings_of: Callable[[], list[str]]
) -> None:
    async with running(kind, make_past(), tool_limits={"browser": 1, "browsr": 2}) as runner:
        for _ in range(2):
            assert (await runner.run(lease(), NOWHERE)).reward == 1.0
    past, missing = warnings_of()
    assert "runner.tool_limits has 'browser', and that tool ran without waiting for its turn" in past
    assert "@lightning.tool(name='browser')" in past
    assert missing == (
        "runner.tool_limits has 'browsr', and no tool of that name ran in 2 rollouts (there ran: browser; did you mean "
        "'browser'?)"
    )


def test_nothing_is_said_where_nothing_ran_or_nothing_is_limited(warnings_of: Callable[[], list[str]]) -> None:
    LimitStage({"browser": 1}).closed()
    assert limits_for(RunnerConfig()) is None
    ran = LimitStage({"browser": 1})
    ran.heard(Outcome(reward=1.0, tool_events=(ToolEvent("browser", "ok"),)), None)
    ran.closed()
    assert warnings_of() == []


def test_a_tool_that_does_not_run_is_named_before_a_long_run_ends(warnings_of: Callable[[], list[str]]) -> None:
    watch = LimitStage({"browser": 1})
    for _ in range(ENOUGH):
        assert warnings_of() == []
        watch.heard(Outcome(reward=1.0), None)
    watch.closed()
    (said,) = warnings_of()
    assert said == "runner.tool_limits has 'browser', and no tool of that name ran in 64 rollouts (there ran: none)"


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"lightning-tools-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(RunnerError, match="belongs to somebody else: set TMPDIR"):
        make_slots({"browser": 1})


def test_a_tool_may_have_any_name() -> None:
    limits = make_slots({"": 1, "a/b": 2, "\ud800": 1, "x" * 1000: 1})
    assert all(path.exists() for name in limits.runs for path in limits.files(name))
