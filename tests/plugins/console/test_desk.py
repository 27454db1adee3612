"""What pages ask of a console: what they are shown, what they may change, and what is said when something is wrong."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from lightning.errors import UnavailableError
from lightning.store.memory import MemoryStore
from lightning.types import Rollout, Run, Task
from lightning_console.blocks import Link, Notice, Notices, Page
from lightning_console.places import Places
from lightning_console.router import Address
from lightning_console.web import desk
from lightning_console.web.chat import Chat
from lightning_console.web.desk import Desk
from lightning_console.web.gate import VISITOR, Visitor
from lightning_resources.nouns import Resource
from lightning_resources.operations import put_resource
from lightning_server.projects import Projects
from lightning_server.protocol import Host

from tests.plugins.console import made_pages

TRAINER = Visitor("s1", "Ada", "team-a", changes=True)
VIEWER = Visitor("s2", "Ben", "team-a", changes=False)
STRANGER = Visitor("s3", "Eve", "team-b", changes=True)


@dataclass
class World:
    store: MemoryStore
    desk: Desk
    places: dict[str | None, Places] = field(default_factory=dict)

    async def show(self, who: Visitor, address: str, seen: str = "") -> dict[str, Any]:
        VISITOR.set(who)
        return await self.desk.show({"address": address, "seen": seen})

    async def act(self, who: Visitor, name: str, **given: object) -> dict[str, Any]:
        return await self.press(who, name, given)

    async def press(self, who: Visitor, name: str, given: Mapping[str, object]) -> dict[str, Any]:
        VISITOR.set(who)
        return await self.desk.act({"name": name, "arguments": dict(given)})

    async def buttons(self, who: Visitor, address: str) -> list[dict[str, Any]]:
        blocks = (await self.show(who, address))["page"]["blocks"]
        return [action for block in blocks if block["component"] == "Actions" for action in block["value"]["actions"]]


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    made_pages.register(monkeypatch)
    store = MemoryStore()
    await store.open()
    projects = Projects(store)
    await store.put_run(Run("a", "of team a", {}, 1.0, "team-a"))
    await store.create_rollouts([Rollout("a/0", "a", Task(input="?"), "a")])
    seen: dict[str | None, Places] = {}

    def places_of(who: Visitor) -> Places:
        if who.project not in seen:
            seen[who.project] = Places("db", stores={"db": projects.of(who.project)}, project=who.project)
        return seen[who.project]

    yield World(store, Desk(places_of, Chat(None), where="db"), seen)
    await store.close()


async def test_a_page_is_sent_again_only_when_it_has_changed(world: World) -> None:
    first = await world.show(VIEWER, "run/a")
    assert (first["page"]["title"], first["live"]) == ("of team a", True)
    assert await world.show(VIEWER, "run/a", first["digest"]) == {"same": True, "live": True}
    await world.store.create_rollouts([Rollout("a/1", "a", Task(input="?"), "a")])
    changed = await world.show(VIEWER, "run/a", first["digest"])
    assert changed["digest"] != first["digest"]
    assert len(changed["page"]["blocks"][1]["value"]["rows"]) == 2


async def test_nobody_sees_another_project(world: World) -> None:
    assert (await world.show(STRANGER, ""))["page"]["blocks"][0]["value"]["rows"] == []
    hidden = await world.show(STRANGER, "run/a")
    missing = await world.show(STRANGER, "run/never")
    words = [page["page"]["blocks"][0]["value"]["notices"][0]["text"] for page in (hidden, missing)]
    assert words[0].replace("'a'", "") == words[1].replace("'never'", "")
    assert "there is no run" in (await world.act(STRANGER, "note", run="a", text="hello"))["error"]
    assert len((await world.show(VIEWER, "runs"))["page"]["blocks"][0]["value"]["rows"]) == 1


async def test_notes_are_kept_shown_and_only_for_those_who_may(world: World) -> None:
    refused = await world.act(VIEWER, "note", run="a", text="mine")
    assert "changes nothing" in refused["error"]
    assert "1 to" in (await world.act(TRAINER, "note", run="a", text=" "))["error"]
    assert (await world.act(TRAINER, "note", run="a", text="the reward was wrong"))["said"]
    assert (await world.act(TRAINER, "note", run="a", text=made_pages.MARKUP))["said"]
    blocks = (await world.show(VIEWER, "run/a"))["page"]["blocks"]
    (notes,) = [block for block in blocks if block["title"] == "Notes"]
    assert [note["text"] for note in notes["value"]["notices"]] == ["the reward was wrong", made_pages.MARKUP]
    assert notes["value"]["notices"][0]["detail"].startswith("Ada, ")
    assert not [block for block in blocks if block["component"] == "Actions"], "a viewer gets no buttons"
    blocks = (await world.show(TRAINER, "run/a"))["page"]["blocks"]
    assert [block for block in blocks if block["component"] == "Actions"]


async def test_an_alias_is_promoted_and_rolled_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the plugin's own pages
    store = Projects(world.store).of("team-a")
    for text in ("one", "two"):
        await put_resource(store, Resource("writer", text))
    (button,) = await world.buttons(TRAINER, "resources/writer")
    about = {"store": "db", "version": 2}
    assert button["arguments"].items() >= about.items()
    assert not await world.buttons(VIEWER, "resources/writer")
    given = {key: value for key, value in button["arguments"].items() if key != "version"}
    assert "changes nothing" in (await world.press(VIEWER, "promote", given | {"version": "1"}))["error"]
    assert "no version" in (await world.press(TRAINER, "promote", given | {"version": "newest"}))["error"]
    for version in ("1", "2"):
        said = await world.press(TRAINER, "promote", given | {"version": version, "alias": ""})
        assert said == {"said": f"writer@production is version {version}"}
    (back,) = [each for each in await world.buttons(TRAINER, "resources/writer") if each["name"] == "roll_back"]
    assert "version 2" in back["ask"]
    said = await world.press(TRAINER, back["name"], back["arguments"])
    assert said == {"said": "writer@production is version 1 again"}
    other = await world.press(TRAINER, "promote", {"store": "other", "name": "writer", "version": "1"})
    assert "there is no store" in other["error"]


async def test_what_is_wrong_is_said_on_a_page_that_looks_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for address, said in (
        ("nowhere", "there is no page 'nowhere'"),
        ("step/a/1", "A fault of the console: ZeroDivisionError"),
        ("x" * 5000, "at most 4000 characters"),
        ("run/b", "there is no run 'b'"),
    ):
        shown = await world.show(VIEWER, address)
        assert said in shown["page"]["blocks"][0]["value"]["notices"][0]["text"]
        assert shown["live"]

    async def gone(*_: object, **__: object) -> None:
        raise UnavailableError("http://127.0.0.1:1 does not answer")

    monkeypatch.setattr(MemoryStore, "get_run", gone)
    shown = await world.show(VIEWER, "run/a")
    assert "does not answer" in shown["page"]["blocks"][0]["value"]["notices"][0]["text"]
    monkeypatch.undo()
    made_pages.register(monkeypatch)
    assert (await world.show(VIEWER, "run/a", shown["digest"]))["page"]["title"] == "of team a"


async def test_a_fault_is_said_without_its_text_and_is_in_the_log(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fault(*_: object, **__: object) -> None:
        raise RuntimeError("SELECT digest FROM tokens")

    said = "A fault of the console: RuntimeError. Its log says more."
    monkeypatch.setattr(desk, "with_actions", fault)
    shown = await world.show(VIEWER, "run/a")
    assert shown["page"]["blocks"][0]["value"]["notices"][0]["text"] == said
    assert shown["live"]
    monkeypatch.setattr(desk, "act", fault)
    assert await world.act(TRAINER, "note", run="a", text="x") == {"error": said}
    monkeypatch.setattr(Chat, "page", fault)
    assert (await world.show(VIEWER, "chat"))["page"]["blocks"][0]["value"]["notices"][0]["text"] == said
    logged = [record for record in caplog.records if record.exc_info]
    assert len(logged) == 3, "each once, with where it happened"
    assert all("SELECT digest" in str(record.exc_info) for record in logged)  # type: ignore[index]


async def test_a_page_that_json_cannot_have_is_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def page(places: Places, address: Address) -> Page:
        return Page(str(address), "Runs", [Notices([Notice("", links=(Link("x", 1 << 80),))])])  # type: ignore[arg-type]

    monkeypatch.setattr(sys.modules["lightning_console.pages.runs"], "page", page)
    shown = await world.show(VIEWER, "runs")
    assert "A fault of the console" in shown["page"]["blocks"][0]["value"]["notices"][0]["text"]


async def test_an_unknown_action_is_refused(world: World) -> None:
    assert "there is no action 'drop'" in (await world.act(TRAINER, "drop"))["error"]
    assert "is a text" in (await world.act(TRAINER, "note", run=["a"], text="x"))["error"]


# chat ----------------------------------------------------------------------------------------------------------
async def test_without_a_server_the_chat_says_how_to_start_one(world: World) -> None:
    page = (await world.show(TRAINER, "chat"))["page"]
    (notice,) = page["blocks"][0]["value"]["notices"]
    assert "lightning serve RUN --out runs/chat" in notice["commands"]


async def test_a_run_whose_model_is_not_served_cannot_be_talked_to() -> None:
    store = MemoryStore()
    await store.open()
    await store.put_run(Run("a", "a"))

    async def served(_: str) -> bool:
        return False

    host = Host("/console", "", store, None, None, served)  # type: ignore[arg-type]
    desk = Desk(lambda _: Places("db", stores={"db": store}), Chat(host))
    VISITOR.set(TRAINER)
    page = (await desk.show({"address": "chat"}))["page"]
    assert "No run's model is served now" in page["blocks"][0]["value"]["notices"][0]["text"]
