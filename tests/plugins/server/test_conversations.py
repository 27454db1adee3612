"""Texts that clients store through the control API."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lightning.errors import DataError
from lightning.store.memory import MemoryStore
from lightning.types import Rollout, Run, Task, Transition, logprobs, token_ids
from lightning_record.conversation import CONVERSATION, Conversation, conversation_in, pack
from lightning_server.http_store import HttpStore

from tests.servers.control import ControlServer


def said(text: str) -> Conversation:
    """A conversation with a text in it."""
    return Conversation(({"role": "user", "content": [{"type": "text", "text": text}]},), "resp_1", 2)


async def test_a_conversation_that_comes_through_the_control_api_is_looked_at_too() -> None:
    with ControlServer() as server:
        url, token = server.add(MemoryStore())
        store = HttpStore(url, token=token)
        await store.open()
        await store.put_run(Run("run", "run"))
        await store.create_rollouts([Rollout("a", "run", Task("find it"), "g")])
        await store.lease("run", "worker")
        texts = ("hi there", "password=hunter2-and-more")
        calls = [
            Transition(
                *("a", 1, seq, f"c{seq}", token_ids(), token_ids(), logprobs()),
                extras={CONVERSATION: pack(said(text)), "other": text.encode()},
            )
            for seq, text in enumerate(texts)
        ]
        assert await store.append(calls) == 2
        assert await store.append(calls) == 0
        kept = await store.transitions("a")
        assert [conversation_in(call) for call in kept] == [said("hi there"), None]
        assert [call.extras["other"].decode() for call in kept] == list(texts), "bytes of plugins are theirs"
        odd = replace(calls[0], seq=2, extras={CONVERSATION: b"[1, 2]"})
        with pytest.raises(DataError, match=r"'conversation' of transition \('a', 1, 2\) is none that a gateway wrote"):
            await store.append([odd])
        await store.close()
