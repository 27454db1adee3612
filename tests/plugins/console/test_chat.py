"""A conversation through a real gateway: what is said is recorded, as a session of its own, of the visitor's project."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from lightning.config import GatewayConfig
from lightning.gateway import Gateway
from lightning.gateway.upstream import Upstream
from lightning.store.memory import MemoryStore
from lightning.testing import FakeVLLM, Reply
from lightning.types import Run
from lightning_console.places import Places
from lightning_console.queries.runs import list_runs
from lightning_console.web.chat import NAME, RUNS, TURNS, Chat
from lightning_console.web.desk import Desk
from lightning_console.web.gate import VISITOR, Visitor
from lightning_server.auth import Authenticator
from lightning_server.fleet.owner import Owner
from lightning_server.projects import Projects
from lightning_server.protocol import SESSION_OF, Host
from lightning_server.serving import Sessions

TRAINER = Visitor("s1", "Ada", "team-a", changes=True)
ADMIN = Visitor("s3", "Root", None, changes=True)
VIEWER = Visitor("s2", "Ben", "team-a", changes=False)


@dataclass
class Served:
    store: MemoryStore
    vllm: FakeVLLM
    desk: Desk

    async def page(self, who: Visitor) -> list[dict[str, Any]]:
        VISITOR.set(who)
        return (await self.desk.show({"address": "chat"}))["page"]["blocks"]

    async def act(self, who: Visitor, action: str, text: str = "") -> dict[str, Any]:
        VISITOR.set(who)
        return await self.desk.act({"name": action, "arguments": {"run": "", "text": text}})

    async def said(self, who: Visitor) -> list[tuple[str, str]]:
        found = [block["value"]["messages"] for block in await self.page(who) if block["component"] == "Messages"]
        return [(message["role"], message["text"]) for messages in found for message in messages]


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with AsyncExitStack() as stack:
        store = MemoryStore()
        await store.open()
        stack.push_async_callback(store.close)
        vllm = await stack.enter_async_context(FakeVLLM())
        gateway = Gateway(store, [Upstream(vllm.url, vllm.model)], GatewayConfig(), secret=b"0123456789abcdef")
        await gateway.start()
        stack.push_async_callback(gateway.close)
        sessions = Sessions(store, gateway, {"model": "tiny"})
        host = Host("/console", "", store, Authenticator(store), sessions, gateway.served, own_model=True)
        views = Projects(store)
        desk = Desk(lambda who: Places("db", stores={"db": views.of(who.project)}, project=who.project), Chat(host))
        yield Served(store, vllm, desk)


async def test_a_conversation_is_recorded_and_is_its_visitor_s_alone(served: Served) -> None:
    served.vllm.queue(Reply("<b>hello</b>"), Reply("four"))
    assert await served.act(TRAINER, "say", " hi ") == {"said": "answered"}
    assert await served.act(TRAINER, "say", "2 + 2?") == {"said": "answered"}
    talk = [("user", "hi"), ("assistant", "<b>hello</b>"), ("user", "2 + 2?"), ("assistant", "four")]
    assert await served.said(TRAINER) == talk
    asked = served.vllm.requests[-1].body["messages"]
    assert [message["content"] for message in asked] == ["hi", "<b>hello</b>", "2 + 2?"]
    assert await served.said(Visitor("s9", "Eve", "team-a", changes=True)) == []
    (run,) = await served.store.list_runs()
    assert (run.project, run.name) == ("team-a", "console")
    assert len(await served.store.transitions(f"{run.id}/0")) == 2
    assert (await served.act(TRAINER, "begin_again"))["said"]
    assert await served.said(TRAINER) == []


async def test_an_admin_s_calls_are_of_the_project_of_the_run_that_is_shown(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    await served.store.put_run(Run("theirs", "theirs", {}, 1.0, "team-b"))
    gateway = Gateway(served.store, [], GatewayConfig(), secret=b"0123456789abcdef", shared=True)
    await gateway.start()
    owner = Owner(served.store, "theirs")
    await owner.open((), 0)
    await owner.serve((Upstream(served.vllm.url, served.vllm.model),), 0)
    sessions = Sessions(served.store, gateway, {})
    host = Host("/console", "", served.store, Authenticator(served.store), sessions, gateway.served)
    served.desk = Desk(lambda who: Places("db", stores={"db": Projects(served.store).of(who.project)}), Chat(host))
    try:
        for number in range(RUNS + 1):
            await sessions(NAME, 60.0, run="theirs", project=f"team-{number}")
        assert "Say something" in str(await served.page(ADMIN)), "conversations do not hide the run that is served"
        VISITOR.set(ADMIN)
        assert await served.desk.act({"name": "say", "arguments": {"run": "theirs", "text": "hi"}}) == {
            "said": "answered"
        }
        (talk,) = [run for run in await served.store.list_runs("team-b") if run.id != "theirs"]
        assert talk.config == {SESSION_OF: "theirs"}
        assert await served.store.list_runs("default") == []
    finally:
        await owner.close()
        await gateway.close()


async def test_conversations_are_no_runs_unless_they_are_asked_for(served: Served) -> None:
    await served.store.put_run(Run("trained", "trained", {"model": "m"}, 1.0, "team-a"))
    await served.act(TRAINER, "say", "hi")
    places = Places("db", stores={"db": served.store}, project="team-a")
    found = await list_runs(places)
    assert [line.id for line in found.lines] == ["trained"]
    assert (found.total, found.matched, found.states["session"]) == (1, 1, 1)
    asked = await list_runs(places, state="session")
    assert [line.state.why for line in asked.lines] == ["calls of a model that was served; nothing was trained"]
    (run,) = [run for run in await served.store.list_runs() if run.id == asked.lines[0].id]
    assert run.config == {"model": "tiny", SESSION_OF: ""}


async def test_a_viewer_does_not_call_the_model(served: Served) -> None:
    assert "viewer's token does not call the model" in str(await served.page(VIEWER))
    assert "changes nothing" in (await served.act(VIEWER, "say", "hi"))["error"]
    assert served.vllm.requests == []


async def test_what_cannot_be_said_or_answered_is_told_and_forgotten(served: Served) -> None:
    assert "1 to" in (await served.act(TRAINER, "say", "  "))["error"]
    assert "1 to" in (await served.act(TRAINER, "say", "x" * 30_000))["error"]
    served.vllm.queue(Reply(status=400))
    failed = await served.act(TRAINER, "say", "hi")
    assert "the gateway says 400" in failed["error"]
    assert await served.said(TRAINER) == []


async def test_a_long_conversation_keeps_its_end(served: Served) -> None:
    for number in range(TURNS // 2 + 3):
        await served.act(TRAINER, "say", str(number))
    said = await served.said(TRAINER)
    assert len(said) == TURNS
    assert said[0] == ("user", "3")
