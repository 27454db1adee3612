"""A real vLLM on a CPU that another process has started, given weights by file and over the network."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest
import torch
from lightning.config.sections import PolicyServerConfig
from lightning.errors import PolicyServerError
from lightning.gateway.upstream import Found, Pool, Upstream
from lightning.policy_server import vllm_server
from lightning.policy_server.control import NotOursError, VLLMControl
from lightning.policy_server.vllm_server import OwnedVLLM
from lightning.testing.tiny_models import make_tiny_model
from lightning_attach.attached import AttachedControl, AttachedVLLM
from lightning_attach.transfer import LocalSender, OverNetwork

from tests.core.policy_server.test_vllm import (
    GAP,
    PROMPT,
    adapters_of,
    call,
    forward,
    gap,
    gap_of,
    gone,
    probe,
    wait_for,
)

pytestmark = pytest.mark.slow

OWNER = """
import asyncio, sys
from pathlib import Path
import psutil
from lightning.config import Config
from lightning.config.sections import PolicyServerConfig
from lightning.policy_server.vllm_server import make_policy_server

async def main():
    config = Config(policy_server=PolicyServerConfig(device="cpu", weight_transfer=sys.argv[3]))
    server = make_policy_server(Path(sys.argv[1]), config, log=Path(sys.argv[2]))
    await server.start()
    children = psutil.Process(server.pid).children(recursive=True)
    print(server.url, server.pid, *(child.pid for child in children), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@dataclass
class Owner:
    """A process that owns a server of a model with a tied head; `folders` are two policies, it began with the first."""

    process: subprocess.Popen[bytes]
    folders: tuple[Path, Path]
    url: str
    pids: list[int]


@contextmanager
def begun(root: Path, way: str) -> Iterator[Owner]:
    """One whose server gets weights in this way."""
    folders = (make_tiny_model(root / "first", tied=True), make_tiny_model(root / "second", tied=True, seed=1))
    command = [sys.executable, "-c", OWNER, str(folders[0]), str(root / "vllm.log"), way]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        url, *pids = process.stdout.readline().decode().split()
        yield Owner(process, folders, url, [int(pid) for pid in pids])
        process.kill()


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    """Its server takes weights over the network, too."""
    with begun(tmp_path_factory.mktemp("owner"), "gloo") as owner:
        yield owner


def over_gloo(sender: LocalSender | None = None) -> OverNetwork:
    return OverNetwork("gloo", sender or LocalSender(), 60)


async def test_an_attached_one_with_logprobs_of_another_distribution_is_refused(
    model: Path, tmp_path: Path, warnings_of: Callable[[], list[str]]
) -> None:
    args = ("--generation-config", "auto", "--logprobs-mode", "raw_logprobs")
    started = OwnedVLLM(
        model, PolicyServerConfig(device="cpu", args=args, tool_call_parser=""), log=tmp_path / "vllm.log"
    )
    check, refused = VLLMControl.check_settings, list[str]()

    async def unheeded(control: VLLMControl, *extensions: str, updates: bool) -> None:
        """Somebody who does not know goes on."""
        with pytest.raises(PolicyServerError) as error:
            await check(control, *extensions, updates=updates)
        refused.append(str(error.value))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VLLMControl, "check_settings", unheeded)
        await started.start()
    (told,) = refused
    assert re.search(r"logprobs are raw_logprobs.*--logprobs-mode processed_logprobs", told), "of an owned one, too"
    try:
        attached = AttachedVLLM(model, PolicyServerConfig(attach=started.url))
        with pytest.raises(PolicyServerError, match=r"raw_logprobs.*; .*generation_config 'auto'"):
            await attached.start()
        assert await started._running().claimed() == "", "it was not even claimed"
        assert not await AttachedControl(started.url).parses_tools("policy")
    finally:
        await started.close()


async def test_an_attached_one_is_the_trainers_that_attached_last(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_attach.attached.TAKE_OVER_SECONDS", 0.0)
    config = PolicyServerConfig(attach=served.vllm.url)
    first, second = (AttachedVLLM(served.first, config) for _ in range(2))
    await first.start()
    async with aiohttp.ClientSession() as session:
        pool = Pool([Upstream(first.url, first.alias, first.claim)])
        assert await pool.check(pool.slots[0], session) is Found.WELL
        await second.start()
        assert await pool.check(pool.slots[0], session) is Found.OUT
        assert "another trainer has attached" in pool.slots[0].other
    version = second.version
    with pytest.raises(PolicyServerError, match="another trainer has attached"):
        await first.update(served.second / "model.safetensors", version + 1)
    with pytest.raises(NotOursError, match="another trainer has attached"):
        await first._running().load([served.second / "model.safetensors"])
    await first.close()
    assert await second._running().attach() == version
    update = await second.update(served.first / "model.safetensors", version, [probe(served.first)])
    assert max(probe(served.first).gaps(update.served[0])) <= GAP
    await second.close()
    assert await served.vllm._running().claimed() == ""


async def test_another_process_can_attach_and_finds_the_version(served: Any) -> None:
    await served.use(served.second)
    version = served.vllm.version
    attached = AttachedVLLM(served.first, PolicyServerConfig(attach=served.vllm.url))
    await attached.start()
    assert (attached.version, attached.model) == (version, "policy")
    assert await AttachedControl(served.vllm.url).parses_tools("policy")
    update = await attached.update(served.first / "model.safetensors", version, [probe(served.first)])
    assert max(probe(served.first).gaps(update.served[0])) <= GAP
    await attached.close()
    assert await served.vllm.healthy()


@pytest.mark.parametrize("way", ["file", "gloo"])
async def test_a_tied_head_is_not_stale(owner: Owner, way: Literal["file", "gloo"], tmp_path: Path) -> None:
    first, second = owner.folders
    server = AttachedVLLM(first, PolicyServerConfig(attach=owner.url), None if way == "file" else over_gloo())
    await server.start()
    steps = [(folder / "model.safetensors", folder) for folder in (second, first, second)]
    for weights, folder in [*steps, *([adapters_of(first, tmp_path)] if way == "file" else [])]:
        update = await server.update(weights, server.version + 1, [probe(folder)])
        assert max(probe(folder).gaps(update.served[0])) <= GAP
        answer = await call(server, "completions", prompt=PROMPT, max_tokens=16, ignore_eos=True)
        choice = answer["choices"][0]
        own = forward(folder, PROMPT + choice["token_ids"])[len(PROMPT) :]
        assert gap(choice["logprobs"]["token_logprobs"], own) <= GAP
    await server.close()


async def test_a_transfer_that_breaks_off_is_undone(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, alter: Callable[..., Path]
) -> None:
    first, second = owner.folders
    sender = LocalSender()
    config = PolicyServerConfig(attach=owner.url)
    server = AttachedVLLM(first, config, over_gloo(sender))
    await server.start()
    await server.update(second / "model.safetensors", 20)
    monkeypatch.setattr(vllm_server, "check_weights", lambda weights, folder: None)
    half = alter(first, lambda t: t.pop("model.layers.1.mlp.down_proj.weight"))
    with pytest.raises(PolicyServerError, match=r"version 20 goes on.*over gloo.*no weights for .*down_proj"):
        await server.update(half, 21)
    odd = alter(first, lambda t: t.update({"model.layers.0.mlp.down_proj.weight": torch.zeros(3, 4)}))
    with pytest.raises(PolicyServerError, match="version 20 goes on"):
        await server.update(odd, 21)
    assert await gap_of(server, second) <= GAP
    sender.leave()  # as when its process was started again
    update = await server.update(first / "model.safetensors", 21, [probe(first)])
    assert max(probe(first).gaps(update.served[0])) <= GAP
    control = server._running()
    await control.pause()
    await control.rpc("lightning_expect", control.claimed_as)
    await control.call("POST", "/start_weight_update")
    await server.close()  # without an end of the update, as when its trainer is killed
    other = AttachedVLLM(first, config, over_gloo())
    await other.start()
    assert other.version == -1
    update = await other.update(second / "model.safetensors", 22, [probe(second)])
    assert max(probe(second).gaps(update.served[0])) <= GAP
    await other.close()


async def test_a_vllm_that_was_not_started_for_the_network_says_how(served: Any) -> None:
    server = AttachedVLLM(served.first, PolicyServerConfig(attach=served.vllm.url), over_gloo())
    await server.start()
    with pytest.raises(
        PolicyServerError, match=r"start it with --weight-transfer-config '\{\"backend\": \"lightning_gloo\"\}'"
    ):
        await server.update(served.first / "model.safetensors", served.vllm.version)
    await server.close()


def test_no_process_outlives_an_owner_that_was_killed(owner: Owner) -> None:
    """The last test of this file, since the owner is one for all of them."""
    assert len(owner.pids) >= 2
    assert not any(gone(pid) for pid in owner.pids)
    owner.process.kill()
    wait_for(lambda: all(gone(pid) for pid in owner.pids))
