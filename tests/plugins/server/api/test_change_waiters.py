"""Waiting for changes: no change is missed, waiters share a watch of the store, and nobody waits for a server that stops."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from lightning.errors import StoreError
from lightning.store.memory import MemoryStore
from lightning.types import Rollout, Run, Task
from lightning_server.api import change_waiters
from lightning_server.api.change_waiters import Watchers
from lightning_server.tokens import revoke_token

from .conftest import World, connection


async def changed(world: World, since: str, timeout: float = 5.0) -> dict[str, Any]:
    answer = await world.ask("GET", f"/watch?run=run&since={since}&timeout={timeout}", token="runner")
    assert answer.status == 200
    found: dict[str, Any] = answer.json
    return found


async def add(world: World, name: str) -> None:
    await world.store.create_rollouts([Rollout(name, "run", Task("q"), "g")])


async def test_a_change_between_two_requests_is_told(world: World) -> None:
    first = await changed(world, "")
    assert first["changed"]  # nobody has looked yet
    await add(world, "run/1")
    second = await changed(world, first["since"])
    assert second["changed"]
    assert not (await changed(world, second["since"], 0.01))["changed"]


async def test_a_change_ends_the_wait(world: World) -> None:
    since = (await changed(world, ""))["since"]
    waiting = [asyncio.create_task(changed(world, since, 30)) for _ in range(5)]
    await asyncio.sleep(0.05)
    await add(world, "run/1")
    answers = await asyncio.wait_for(asyncio.gather(*waiting), 15)
    assert {(answer["changed"], answer["since"]) for answer in answers} == {(True, answers[0]["since"])}


async def test_what_another_server_said_is_taken_for_a_change(world: World) -> None:
    assert (await changed(world, "another.0.7", 30))["changed"]


async def test_a_server_that_stops_lets_everybody_go(world: World) -> None:
    since = (await changed(world, ""))["since"]
    waiting = asyncio.create_task(changed(world, since, 30))
    await asyncio.sleep(0.05)
    await world.api.close()
    assert not (await asyncio.wait_for(waiting, 120))["changed"]


async def test_waiters_share_one_watch_which_ends_when_nobody_asks(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_waiters, "IDLE", 0.02)
    monkeypatch.setattr(change_waiters, "ROUND", 0.02)
    opened: list[str] = []
    closed: list[str] = []

    class Counting(MemoryStore):
        def watch(self, run: str) -> Any:
            @asynccontextmanager
            async def counted() -> AsyncIterator[Any]:
                opened.append(run)
                async with MemoryStore.watch(self, run) as watch:
                    yield watch
                closed.append(run)

            return counted()

    store = Counting()
    await store.open()
    await store.put_run(Run("run", "a run"))
    watchers = Watchers()
    first = await watchers.wait(store, "key", "run", "", 0)
    await asyncio.gather(*(watchers.wait(store, "key", "run", first.since, 0.05) for _ in range(10)))
    assert (opened, closed) == (["run"], [])
    for _ in range(200):
        if closed:
            break
        await asyncio.sleep(0.01)
    assert closed == ["run"]
    again = await watchers.wait(store, "key", "run", first.since, 30)
    assert again.changed  # it was not watched meanwhile
    await watchers.close()
    await store.close()


async def test_a_watch_that_fails_is_an_error_and_not_a_silence(world: World) -> None:
    class Broken(MemoryStore):
        def watch(self, run: str) -> Any:
            raise StoreError("no watching here")

    watchers = Watchers()
    for _ in range(2):
        with pytest.raises(StoreError, match="no watching here"):
            await watchers.wait(Broken(), "key", "run", "", 1)


async def test_a_watch_that_breaks_later_is_a_change_and_begins_again(caplog: pytest.LogCaptureFixture) -> None:
    broken = asyncio.Event()

    class Breaking(MemoryStore):
        def watch(self, run: str) -> Any:
            @asynccontextmanager
            async def breaking() -> AsyncIterator[Any]:
                yield self

            return breaking()

        async def wait(self, timeout: float) -> bool:
            await broken.wait()
            raise StoreError("the database went away")

    watchers, store = Watchers(), Breaking()
    first = await watchers.wait(store, "key", "run", "", 0)
    waiting = asyncio.create_task(watchers.wait(store, "key", "run", first.since, 30))
    await asyncio.sleep(0.01)
    broken.set()
    assert (await asyncio.wait_for(waiting, 120)).changed
    assert "the database went away" in caplog.text
    broken.clear()
    assert (await watchers.wait(store, "key", "run", first.since, 30)).changed
    await watchers.close()


async def test_changes_as_server_sent_events(world: World) -> None:
    sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    gone = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    scope = connection("GET", "/watch?run=run", (*world.authorization("viewer"), (b"accept", b"text/event-stream")))
    serving = asyncio.create_task(world.api(scope, receive, sent.put))
    start = await asyncio.wait_for(sent.get(), 15)
    assert (start["status"], dict(start["headers"])[b"content-type"]) == (200, b"text/event-stream")
    first = event(await asyncio.wait_for(sent.get(), 15))
    await add(world, "run/1")
    second = event(await asyncio.wait_for(sent.get(), 15))
    assert second["changed"]
    assert second["since"] != first["since"]
    gone.set()
    await asyncio.wait_for(serving, 120)


async def test_a_stream_for_another_project_is_an_error(world: World) -> None:
    answer = await world.ask("GET", "/watch?run=theirs", token="viewer", headers=((b"accept", b"text/event-stream"),))
    assert (answer.status, answer.error) == (422, "refused")


def event(message: dict[str, Any]) -> dict[str, Any]:
    name, data, *rest = message["body"].decode().split("\n")
    assert (name, rest) == ("event: changed", ["", ""])
    found: dict[str, Any] = json.loads(data.removeprefix("data: "))
    return found


async def test_a_token_that_is_revoked_during_the_wait_is_told_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_server.auth.CACHE_SECONDS", 0.0)
    since = (await world.ask("GET", "/watch?run=run", token="viewer")).json["since"]
    waiting = asyncio.create_task(world.ask("GET", f"/watch?run=run&since={since}&timeout=20", token="viewer"))
    await asyncio.sleep(0.02)
    await revoke_token(world.store, world.tokens["viewer"].split("_")[1])
    await add(world, "run/1")
    assert (await asyncio.wait_for(waiting, 120)).status == 401


async def test_a_revoked_token_hears_no_more(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_server.auth.CACHE_SECONDS", 0.0)
    sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    scope = connection("GET", "/watch?run=run", (*world.authorization("viewer"), (b"accept", b"text/event-stream")))
    serving = asyncio.create_task(world.api(scope, asyncio.Event().wait, sent.put))  # type: ignore[arg-type]
    for _ in range(2):
        await asyncio.wait_for(sent.get(), 15)
    await revoke_token(world.store, world.tokens["viewer"].split("_")[1])
    await add(world, "run/1")
    last = await asyncio.wait_for(sent.get(), 15)
    assert (last["body"], last["more_body"]) == (b"", False)
    await asyncio.wait_for(serving, 120)
