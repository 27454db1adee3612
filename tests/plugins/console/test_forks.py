"""*Fork here*: on a person's own machine, while the run's trainer serves the version that answered the call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from lightning.cli.output import with_store
from lightning.store.url import sqlite_url
from lightning.testing import Reply
from lightning_console.pages.rollout import FORK
from lightning_console.places import Places
from lightning_console.web import forks as forking
from lightning_console.web.chat import Chat
from lightning_console.web.desk import Desk
from lightning_console.web.forks import Forks
from lightning_console.web.gate import VISITOR, Visitor

from tests.plugins.branching.test_branch import recorded
from tests.plugins.branching.test_branch import runs as runs
from tests.plugins.branching.test_branch_live import Trainer, trained
from tests.plugins.console.reading import to
from tests.plugins.debug.evaluating import ScriptedVLLM
from tests.plugins.debug.evaluating import vllm as vllm

LONG = 3600.0
"""What ends is waited for, however busy the machine is; the test's own time limit is for what does not end."""
OWNER = Visitor("s", "", None, changes=True)
PARENT = "first/0/0/0"


class Page:
    """The page of a recorded rollout in a console of this machine, beside its run's trainer."""

    def __init__(self, desk: Desk, trainer: Trainer, forks: Forks | None) -> None:
        self.desk, self.trainer, self.forks = desk, trainer, forks

    async def ended(self) -> None:
        """Return when the commands that have been begun are over, and what became of them was told."""
        assert self.forks is not None
        while self.forks._following:
            await asyncio.wait(self.forks._following)

    async def show(self, call: int = 3) -> dict[str, Any]:
        VISITOR.set(OWNER)
        page = await self.desk.show({"address": to("rollout", "first", PARENT, call=call)})
        return {block["title"] or block["component"]: block["value"] for block in page["page"]["blocks"]}

    async def button(self, call: int = 3) -> dict[str, Any] | None:
        shown = (await self.show(call)).get("Actions", {"actions": []})["actions"]
        return next((each for each in shown if each["name"] == FORK), None)

    async def fork(self, **given: object) -> dict[str, Any]:
        VISITOR.set(OWNER)
        return await self.desk.act({"name": FORK, "arguments": given})


@asynccontextmanager
async def page(version: int = 0, *, forks: bool = True) -> AsyncIterator[Page]:
    """In the folder of `recorded`."""
    places, made = Places(str(Path("runs").resolve())), Forks() if forks else None
    async with trained(next(iter((await places.stores()).values())), version) as trainer:
        try:
            yield Page(Desk(lambda _: places, Chat(None), forks=made), trainer, made)
        finally:
            if made is not None:
                await made.close()
            await places.close()


def beside_a_trainer(use: Any, **more: Any) -> Any:
    async def run() -> Any:
        async with page(**more) as found:
            return await use(found)

    return asyncio.run(run())


@pytest.mark.slow
def test_the_button_makes_branches_that_the_page_shows(runs: ScriptedVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded()
    monkeypatch.setattr(forking, "SECONDS", LONG)

    async def use(page: Page) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        button = await page.button()
        assert button is not None
        done = await page.fork(**button["arguments"])
        await page.ended()
        return button, done, await page.show()

    button, done, shown = beside_a_trainer(use)
    assert button["label"] == "Fork here: 8 branches"
    assert button["fields"] == []
    assert "Run wandering:agent 8 times on this machine" in button["ask"]
    assert "said" in done, done
    assert [(row[2]["text"], row[3]["text"]) for row in shown["Branches"]["rows"]] == [("–", "no error")] * 8


@pytest.mark.slow
def test_what_the_command_refuses_is_said_and_nothing_outlives_the_console(
    runs: ScriptedVLLM, monkeypatch: pytest.MonkeyPatch, warnings_of: Callable[[], list[str]]
) -> None:
    recorded()
    monkeypatch.setattr(forking, "GRACE", LONG)
    monkeypatch.setattr(forking, "SECONDS", LONG)

    async def use(page: Page) -> list[dict[str, Any]]:
        asked = {"run": "first", "rollout": PARENT, "attempt": 1}
        said = [await page.fork(**asked, agent="wandering:nobody", at=3)]
        with monkeypatch.context() as patch:
            patch.setattr(forking, "SECONDS", 0.0)  # it takes longer to fail than the page waits
            late = await page.fork(**asked, agent="wandering:nobody", at=3)
        assert "the console's terminal says why" in late["said"]
        failed = "the branches first.0.0.0-call3 were not made: the module 'wandering' has no 'nobody'"
        await page.ended()
        assert failed in warnings_of()
        page.trainer.vllm.script = lambda body: Reply("never", delay=3600.0)
        said += await asyncio.gather(*(page.fork(**asked, agent="wandering:agent", at=3) for _ in range(2)))
        return said + [await page.fork(**asked, agent="wandering:agent", at=at) for at in (2, 1)]

    refused, *twice, second, one_too_many = beside_a_trainer(use)
    first, again = sorted(twice, key=lambda each: "error" in each)
    assert refused == {"error": "the module 'wandering' has no 'nobody'"}
    assert all("8 branches have begun" in each["said"] for each in (first, second))
    assert "branches at this call are being made already" in again["error"]
    assert "2 calls are being branched already" in one_too_many["error"]
    url = sqlite_url(Path("runs/first/lightning.db").resolve())
    states = [
        asyncio.run(with_store(url, lambda store, run=run: store.get_state(run, "over")))
        for run in ("first.0.0.0-call3", "first.0.0.0-call2")
    ]
    assert states == [True, True]


@pytest.mark.parametrize(
    ("code", "begun", "told"),
    [
        (0, True, []),
        (1, True, []),  # some are void or failed: the pages show which
        (2, True, ["the branches b broke off: no luck"]),
        (1, False, ["the branches b were not made: no luck"]),
    ],
)
async def test_what_became_of_a_fork_is_told_when_no_page_waits_any_more(
    code: int, begun: bool, told: list[str], monkeypatch: pytest.MonkeyPatch, warnings_of: Callable[[], list[str]]
) -> None:
    async def has_begun(*_: object) -> bool:
        return begun

    async def run() -> tuple[int, str]:
        return code, "no luck"

    monkeypatch.setattr(forking, "_has_begun", has_begun)
    forks = Forks()
    forks._follow(cast("Any", None), "b", 0.0, asyncio.create_task(run()))
    await asyncio.wait(forks._following)
    assert warnings_of() == told


async def test_a_command_that_is_given_up_leaves_no_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be collected in a later test, and blamed on that."""
    monkeypatch.setattr(forking, "BEGIN", "import time; time.sleep(600)")
    forks, begun = Forks(), asyncio.Event()
    start = asyncio.create_subprocess_exec

    async def started(*command: Any, **options: Any) -> Any:
        begun.process = await start(*command, **options)  # type: ignore[attr-defined]
        asyncio.get_running_loop().call_soon(begun.set)
        return begun.process  # type: ignore[attr-defined]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    running = asyncio.create_task(forks._run([]))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    process = begun.process  # type: ignore[attr-defined]
    assert (process.returncode, process._transport.is_closing(), forks._processes) == (-9, True, set())


def test_there_is_a_button_only_where_branches_could_be_made(runs: ScriptedVLLM) -> None:
    recorded()

    async def use(page: Page) -> dict[str, Any] | None:
        return await page.button()

    assert beside_a_trainer(use) is not None
    assert beside_a_trainer(use, version=1) is None  # the weights are others now
    assert beside_a_trainer(use, version=-1) is None  # nobody serves them
    assert beside_a_trainer(use, forks=False) is None  # a server's console


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"agent": "--help"}, "'--help' names no agent"),
        ({"agent": "wandering:agent", "at": "3"}, "say at which call"),
        ({"agent": "wandering:agent", "run": "other"}, "there is no run 'other'"),
    ],
)
def test_what_no_page_asks_for_is_refused(runs: ScriptedVLLM, given: dict[str, object], told: str) -> None:
    recorded()

    async def use(page: Page) -> dict[str, Any]:
        asked: dict[str, object] = {"run": "first", "rollout": PARENT, "attempt": 1, "at": 3}
        return await page.fork(**{**asked, **given})

    assert told in beside_a_trainer(use)["error"]


def test_a_servers_console_makes_none(runs: ScriptedVLLM) -> None:
    recorded()

    async def use(page: Page) -> dict[str, Any]:
        return await page.fork(run="first", rollout=PARENT, attempt=1, at=3, agent="wandering:agent")

    assert "there is no action 'fork'" in beside_a_trainer(use, forks=False)["error"]
