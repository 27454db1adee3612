"""A real vLLM that follows an alias while 64 clients stream: ten promotions, one of a scaled version that the probe refuses,
and two rollbacks."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import httpx
import pytest
from lightning.config import Config, with_settings
from lightning.plugins import plugins
from lightning.store.url import sqlite_url
from lightning.trainer.training_data import all_rollouts
from lightning_examples.raw_python import MODEL
from lightning_resources.nouns import Resource, ResourceKind
from lightning_resources.operations import put_resource, roll_back_alias, set_alias
from lightning_resources.reference import find, parse_reference
from lightning_resources.weights import WEIGHTS_NAME, weights_content
from lightning_server import following
from lightning_server.serving import Followed, serve
from safetensors.torch import load_file, save_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CLIENTS = 64
ASK = {"role": "user", "content": "Ann has 20 pens. Ann gives away 5. How many pens now?"}


def scaled(folder: Path, by: float) -> Path:
    """The demo's model with all weights times a number."""
    shutil.copytree(MODEL, folder)
    for file in folder.glob("*.safetensors"):
        save_file({name: value * by for name, value in load_file(file).items()}, file, {"format": "pt"})
    return folder


async def test_a_running_vllm_takes_versions_and_refuses_a_scaled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.1)
    store = plugins().store(sqlite_url(tmp_path / "weights.db"))
    await store.open()
    for folder in (MODEL, scaled(tmp_path / "near", 1.001), scaled(tmp_path / "bad", 3.0)):
        await put_resource(store, Resource(WEIGHTS_NAME, weights_content(folder), ResourceKind.WEIGHTS))
    await set_alias(store, WEIGHTS_NAME, "live", 1)
    reference = parse_reference(f"{WEIGHTS_NAME}@live")
    follows = Followed(store, reference, await find(store, reference), Path())
    config = with_settings(Config(), {"runner.concurrency": CLIENTS})
    async with serve(MODEL, config, tmp_path / "serve", follows) as server:
        llm = await server.open_session("clients", 600)
        over, statuses = asyncio.Event(), list[int]()
        headers = {"authorization": f"Bearer {llm.api_key}"}
        async with httpx.AsyncClient(base_url=llm.base_url, headers=headers, timeout=60) as http:

            async def client() -> None:
                while not over.is_set():
                    body = {"model": "policy", "messages": [ASK], "stream": True, "max_tokens": 24}
                    reply = await http.post("/chat/completions", json=body)
                    statuses.append(reply.status_code)
                    assert reply.text.endswith("data: [DONE]\n\n"), reply.text[-300:]

            async def until(version: int) -> None:
                async with asyncio.timeout(60):
                    while (await http.get(f"{server.gateway.url}/health")).json()["policy_version"] != version:
                        await asyncio.sleep(0.05)
                await asyncio.sleep(0.2)

            clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
            await asyncio.sleep(1.0)
            for version in (2, 1) * 4 + (2,):
                await set_alias(store, WEIGHTS_NAME, "live", version)
                await until(version)
            await set_alias(store, WEIGHTS_NAME, "live", 3)  # the tenth
            async with asyncio.timeout(60):
                while "@3 is not served, version 2 goes on" not in caplog.text:
                    await asyncio.sleep(0.05)
            assert "nats less likely per token" in caplog.text
            await until(2)
            for version in (2, 1):  # from 3, which was never served, then from 2
                assert (await roll_back_alias(store, WEIGHTS_NAME, "live")).version == version
                await until(version)
            over.set()
            await asyncio.gather(*clients)
        assert set(statuses) == {200}
        runs = [run for run in await server.store.list_runs() if run.name == "clients"]
        rollouts = await all_rollouts(server.store, runs[0].id)
        made = await server.store.transitions_of([(each.id, each.attempt) for each in rollouts])
        versions = [{run.version for run in call.versions} for calls in made for call in calls]
        assert len(versions) == len(statuses)
        assert {frozenset(each) for each in versions} == {frozenset({1}), frozenset({2})}
        said = (tmp_path / "serve" / "vllm.log").read_text()
        assert "Traceback" not in said
    await store.close()
