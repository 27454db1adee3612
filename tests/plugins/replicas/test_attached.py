"""Several running vLLMs as servers of one policy: how they are taken, and what is refused before any of them is changed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from lightning.config import config_model, with_settings
from lightning.errors import LightningError, PolicyServerError
from lightning.runner.inline import InlineRunner
from lightning.store.memory import MemoryStore
from lightning.testing.tiny_models import make_tiny_model
from lightning.trainer.stack import Stack, open_stack
from lightning.types import Run

from tests.core.policy_server.conftest import FakeVLLM


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
async def fakes() -> AsyncIterator[list[FakeVLLM]]:
    """Two vLLMs that answer control routes."""
    runners, made = [], []
    for _ in range(2):
        fake, app = FakeVLLM(), web.Application()
        app.router.add_route("*", "/{tail:.*}", fake.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        runners.append(runner)
        made.append(fake)
    yield made
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
async def attach(model: Path, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """`attach(urls, restores=...)` opens a stack with these servers."""
    async with AsyncExitStack() as resources:

        async def made(urls: list[str], *, restores: bool = True, within: AsyncExitStack = resources) -> Stack:
            store = MemoryStore()
            await store.open()
            resources.push_async_callback(store.close)
            config = with_settings(config_model()(), {"policy_server.attach": tuple(urls)})
            return await open_stack(
                within,
                run=Run("run", "run"),
                config=config,
                folder=tmp_path,
                model=model,
                store=store,
                runner=InlineRunner(lambda task, llm: 1.0, config.runner),
                restores=restores,
            )

        yield made


async def test_each_gets_the_weights(fakes: list[FakeVLLM], attach: Callable[..., Any], model: Path) -> None:
    stack = await attach([fake.url for fake in fakes])
    updates = await stack.update(model / "model.safetensors", 3)
    assert [update.version for update in updates] == [3, 3]
    assert [(fake.version, fake.weights) for fake in fakes] == [(3, (str(model / "model.safetensors"),))] * 2
    assert len({upstream.claim for upstream in stack.upstreams()}) == 2


async def refused(attach: Callable[..., Any], urls: list[str], told: str, **options: Any) -> None:
    async with AsyncExitStack() as resources:
        with pytest.raises(LightningError, match=told):
            await attach(urls, within=resources, **options)


async def test_what_is_refused_leaves_the_others_as_they_were(
    fakes: list[FakeVLLM], attach: Callable[..., Any]
) -> None:
    first, second = fakes
    await refused(attach, [first.url, "http://127.0.0.1:1"], r"no vLLM answers at .* 'http://127\.0\.0\.1:1'")
    second.routes = False
    await refused(attach, [first.url, second.url], f"the vLLM at {second.url} has no RL routes")
    second.routes = True
    for name, value in (("dtype", "torch.bfloat16"), ("max_model_len", 64), ("model", "/models/other")):
        second.info = json.loads(json.dumps(first.info))
        first.info["vllm_config"]["model_config"].setdefault(name, "tiny")
        second.info["vllm_config"]["model_config"][name] = value
        await refused(attach, [first.url, second.url], f"{first.url} and {second.url} cannot serve one policy: their ")
    second.info = json.loads(json.dumps(first.info))
    second.version = 5
    await refused(attach, [first.url, second.url], "have different weights: .* has version 5", restores=False)
    assert [fake.claim for fake in fakes] == ["", ""], "each was let go again"
    assert "load" not in first.calls + second.calls
    assert not first.paused | second.paused


async def test_the_same_server_twice_is_refused(attach: Callable[..., Any]) -> None:
    await refused(attach, ["http://127.0.0.1:1", "http://127.0.0.1:1/"], "twice")


async def test_a_server_that_another_trainer_takes_ends_the_run_by_name(
    fakes: list[FakeVLLM], attach: Callable[..., Any], model: Path
) -> None:
    stack = await attach([fake.url for fake in fakes])
    await stack.update(model / "model.safetensors", 1)
    fakes[1].claim = "another"
    with pytest.raises(PolicyServerError, match=fakes[1].url):
        await stack._supervisor
