"""Rollouts as text: what was said once is told once, and a server that makes no texts costs only them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pytest
from lightning.store.memory import MemoryStore
from lightning.testing.fake_vllm import FakeVLLM
from lightning.testing.vllm_replies import tokenize
from lightning.types import Caller, CallStatus, Outcome, Rollout, Run, Task, ToolEvent, Transition, logprobs, token_ids
from lightning_prompts.transcripts import LONGEST, LONGEST_PART, Transcripts


@dataclass
class Server:
    url: str
    model: str = "tiny"


async def told(server: Any, *calls: tuple[str, str], events: tuple[ToolEvent, ...] = ()) -> str:
    (text,) = await told_by([server], *calls, events=events)
    return text


async def told_by(servers: list[Any], *calls: tuple[str, str], events: tuple[ToolEvent, ...] = ()) -> list[str]:
    """The transcript, once for each state that the policy server is in."""
    store = MemoryStore()
    await store.open()
    await store.put_run(Run("run", "run"))
    await store.create_rollouts([Rollout("r", "run", Task("x"), "g")])
    await store.lease("run", "w")
    made = [
        Transition("r", 1, n, f"c{n}", token_ids(tokenize(p)), token_ids(tokenize(a)), logprobs(), Caller("writer"))
        for n, (p, a) in enumerate(calls)
    ]
    failed = Transition("r", 1, 9, "c9", token_ids([1]), token_ids(), logprobs(), status=CallStatus.ERROR)
    await store.append([*made, failed])
    rollout = await store.complete("r", 1, Outcome(reward=1.0, tool_events=events))
    server = Server("")
    made, texts = Transcripts(store, server), []
    for now in servers:
        server.url = now.url
        texts.append(await made.of(rollout))
    await store.close()
    return texts


async def test_each_call_tells_what_is_new() -> None:
    async with FakeVLLM() as fake:
        text = await told(
            Server(fake.url),
            ("Question one", " answer"),
            ("Question one answer Question two", " reply"),
            events=(ToolEvent("look_up", "error", arguments={"word": "ä"}, error="not found"),),
        )
    assert text == (
        "[model call 1, by writer]\nQuestion one\n[response]\n answer\n"
        "[model call 2, by writer]\n Question two\n[response]\n reply\n"
        '[tool look_up({"word": "ä"}): error] not found'
    )


async def test_long_parts_lose_their_middle() -> None:
    async with FakeVLLM() as fake:
        text = await told(Server(fake.url), ("begin " + "word " * 2000 + "end", "ok"))
    assert LONGEST_PART < len(text) < LONGEST_PART + 200
    assert "begin" in text
    assert "[...]" in text
    assert "end\n[response]" in text


async def test_a_server_that_makes_no_texts_leaves_the_tools(caplog: pytest.LogCaptureFixture) -> None:
    event = ToolEvent("look_up", "ok", output="found")
    with caplog.at_level(logging.WARNING):
        text = await told(Server("http://127.0.0.1:9"), ("a", "b"), ("c", "d"), events=(event,))
    assert text == "[tool look_up(): ok] found"
    assert caplog.text.count("detokenize failed") == 1


async def test_a_server_that_was_away_for_a_while_is_asked_again() -> None:
    async with FakeVLLM() as fake:
        texts = await told_by([Server("http://127.0.0.1:9"), Server(fake.url)], ("a", "b"))
    assert texts == ["", "[model call 1, by agent]\na\n[response]\nb".replace("agent", "writer")]


async def test_a_server_without_the_path_is_asked_once() -> None:
    async with FakeVLLM() as fake:
        texts = await told_by([Server(f"{fake.url}/nowhere"), Server(fake.url)], ("a", "b"))
    assert texts == ["", ""]


async def test_a_long_transcript_loses_its_middle() -> None:
    events = tuple(ToolEvent(f"tool{number}", "ok", output="x" * 1500) for number in range(20))
    async with FakeVLLM() as fake:
        text = await told(Server(fake.url), ("begin", "ok"), events=events)
    assert LONGEST < len(text) < LONGEST + 100
    assert "begin" in text
    assert "[tool tool19()" in text
