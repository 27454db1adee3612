"""The plugin as it is installed, in a gateway before a fake vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import lightning
from lightning.config import GatewayConfig
from lightning.gateway import Gateway, Upstream
from lightning.plugins import plugins
from lightning.testing import FakeVLLM
from lightning.types import Rollout, Run, Transition


def asked(folder: Path, *requests: tuple[str, str]) -> tuple[list[dict[str, Any]], list[Transition], list[str]]:
    """What a message and a tag are answered each, the calls that the store has then, and the stages."""

    async def ask() -> tuple[list[dict[str, Any]], list[Transition], list[str]]:
        store = plugins().store(f"sqlite:///{folder / 'one.db'}")
        await store.open()
        await store.put_run(Run("run", "a run"))
        await store.create_rollouts([Rollout("one", "run", lightning.Task("hello"), "group")])
        (lease,) = await store.lease("run", "me")
        answers = []
        async with FakeVLLM() as vllm:
            gateway = Gateway(store, [Upstream(vllm.url, vllm.model)], GatewayConfig(), secret=b"sixteen bytes or more")
            await gateway.start()
            llm = gateway.llm(lease)
            async with httpx.AsyncClient(headers={"authorization": f"Bearer {llm.api_key}"}) as client:
                for content, tag in requests:
                    body = {"model": llm.model, "messages": [{"role": "user", "content": content}]}
                    url, headers = f"{llm.base_url}/chat/completions", {"x-tag": tag} if tag else {}
                    answers.append((await client.post(url, json=body, headers=headers)).json())
            stages = [*gateway.stages]
            await gateway.close()
        calls = await store.transitions("one")
        await store.close()
        return answers, calls, stages

    return asyncio.run(ask())


def test_a_tag_is_stored_with_its_call(tmp_path: Path) -> None:
    _, calls, stages = asked(tmp_path, ("hello", "plan"), ("hello", ""))
    assert [call.extras.get("tag") for call in calls] == [b"plan", None]
    assert stages[-1] == "tag"


def test_a_ping_is_answered_without_the_model(tmp_path: Path) -> None:
    (answer,), calls, _ = asked(tmp_path, ("ping", ""))
    assert answer["choices"][0]["message"]["content"] == "pong"
    assert calls == []


def test_a_tag_that_is_too_long_is_refused_and_the_refusal_recorded(tmp_path: Path) -> None:
    (answer,), (call,), _ = asked(tmp_path, ("hello", "x" * 101))
    assert answer["error"]["message"] == "The header x-tag has 101 characters; send at most 100."
    assert call.finish_reason == "tag_too_long"
