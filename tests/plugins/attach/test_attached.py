"""A vLLM that others run: whose it is, what is left in it, and who may bring it weights, against a stand-in for vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.config import Config
from lightning.config.sections import PolicyServerConfig
from lightning.errors import PolicyServerError
from lightning.policy_server import control, vllm_server
from lightning.policy_server.protocol import PolicyServer, Probe
from lightning.policy_server.vllm_server import OwnedVLLM, make_policy_server
from lightning_attach import attached as attached_module
from lightning_attach.attached import AttachedControl, AttachedVLLM

Alter = Callable[[Path, Callable[[dict[str, Any]], object]], Path]
ORDER = ["attach", "attach", "pause", "in_flight", "load", "reset_prefix_cache", "set_version", "resume"]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of another trainer's is taken over without a wait."""
    monkeypatch.setattr("lightning_attach.attached.TAKE_OVER_SECONDS", 0.0)


async def attached(fake: Any, model: Path) -> AttachedVLLM:
    server = AttachedVLLM(model, PolicyServerConfig(attach=f"{fake.url}/v1/", start_timeout=5))
    await server.start()
    fake.calls.clear()
    return server


def only_serves(fake: Any, model: Path) -> PolicyServer:
    config = Config(policy_server=PolicyServerConfig(attach=fake.url))
    return make_policy_server(model, config, log=Path("unused"), claims=False)


async def test_attach_takes_over_name_and_version(fake: Any, model: Path) -> None:
    fake.version = 7
    server = AttachedVLLM(model, PolicyServerConfig(attach=fake.url))
    with pytest.raises(PolicyServerError, match="has not been started"):
        _ = server.url
    await server.start()
    assert (server.url, server.model, server.alias, server.version) == (fake.url, "someone's", "someone's", 7)
    assert await server.healthy()
    await server.close()
    assert await server.healthy()


async def test_attach_resumes_what_was_left_paused(fake: Any, model: Path) -> None:
    fake.paused = True
    await attached(fake, model)
    assert not fake.paused


async def test_one_that_only_serves_resumes_what_is_nobodys(
    fake: Any, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer's may be between its pause and its load, where the version is still the old one's."""
    fake.paused, fake.claim = True, "theirs"
    serves = only_serves(fake, model)
    await serves.start()
    assert fake.paused
    assert f"{fake.url} was paused by its trainer (its claim is theirs)" in caplog.text
    fake.claim = ""
    await serves.start()
    assert not fake.paused
    await serves.close()
    fake.paused, fake.claim = True, "a killed trainer's"
    await attached(fake, model)
    assert not fake.paused


async def test_one_that_only_serves_resumes_what_a_killed_trainer_left_paused(
    fake: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("LOOK_SECONDS", 0.01), ("AWAKE_SECONDS", 0.01), ("SILENT_SECONDS", 0.3)):
        monkeypatch.setattr(attached_module, name, seconds)
    fake.paused, fake.claim, fake.version = True, "theirs", 1
    serves = make_policy_server(
        model, Config(policy_server=PolicyServerConfig(attach=fake.url)), log=Path("unused"), claims=False
    )
    await serves.start()
    for version in (None, 2):  # it lives, and is in the middle of an update
        await asyncio.sleep(0.2)
        assert (fake.paused, fake.claim) == (True, "theirs")
        fake.version = version
    await asyncio.sleep(0.2)
    assert fake.paused
    async with asyncio.timeout(30):
        while fake.paused:
            await asyncio.sleep(0.01)
    assert (fake.claim, fake.version) == ("", 2)
    await serves.close()


async def test_one_that_only_serves_resumes_what_was_paused_while_it_served(
    fake: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("LOOK_SECONDS", 0.01), ("AWAKE_SECONDS", 0.01), ("SILENT_SECONDS", 0.3)):
        monkeypatch.setattr(attached_module, name, seconds)

    async def until(reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not reached():
                await asyncio.sleep(0.005)

    async def pause() -> None:
        """As a trainer does, until it has been looked at twice."""
        fake.calls.clear()
        fake.paused = True
        await until(lambda: fake.calls.count("attach") >= 4)

    serves = make_policy_server(
        model, Config(policy_server=PolicyServerConfig(attach=fake.url)), log=Path("unused"), claims=False
    )
    fake.claim = "theirs"
    await serves.start()
    await pause()
    fake.paused = False
    await asyncio.sleep(0.35)
    await pause()
    assert (fake.paused, fake.claim) == (True, "theirs"), "it has done something since it paused the first time"
    await until(lambda: not fake.paused)
    assert fake.claim == ""
    fake.claim = "the next trainer's"
    await pause()
    await until(lambda: not fake.paused)
    await serves.close()


@pytest.mark.parametrize("how", ["no version", "closed"])
async def test_what_is_of_no_version_or_is_served_no_more_stays_paused(
    how: str, fake: Any, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, seconds in (("LOOK_SECONDS", 0.01), ("AWAKE_SECONDS", 0.01), ("SILENT_SECONDS", 0.1)):
        monkeypatch.setattr(attached_module, name, seconds)
    fake.paused, fake.claim = True, "theirs"
    serves = make_policy_server(
        model, Config(policy_server=PolicyServerConfig(attach=fake.url)), log=Path("unused"), claims=False
    )
    await serves.start()
    if how == "closed":
        await serves.close()
    else:
        fake.version = None
    await asyncio.sleep(0.3)
    assert (fake.paused, fake.claim) == (True, "theirs")
    await serves.close()
    if how == "no version":
        await serves.start()
        assert "are of no version" in caplog.text


async def test_attach_does_not_resume_unknown_weights(fake: Any, model: Path) -> None:
    fake.paused, fake.version = True, None
    server = await attached(fake, model)
    assert fake.paused
    assert server.version == -1
    await server.update(model / "model.safetensors", 4)
    assert not fake.paused
    assert server.version == fake.version == 4


async def test_attach_says_how_to_start_the_server(fake: Any, model: Path) -> None:
    fake.routes = False
    with pytest.raises(PolicyServerError, match=r"VLLM_SERVER_DEV_MODE=1 and `--worker-extension-cls lightning"):
        await attached(fake, model)


async def test_a_data_parallel_vllm_serves_but_takes_no_weights(fake: Any, model: Path) -> None:
    fake.engines, fake.claim = 3, "theirs"
    with pytest.raises(PolicyServerError, match=r"3 data-parallel engines.* one alone.*--tensor-parallel-size"):
        await attached(fake, model)
    assert fake.claim == "theirs"
    serves = make_policy_server(
        model, Config(policy_server=PolicyServerConfig(attach=fake.url)), log=Path("unused"), claims=False
    )
    await serves.start()
    await serves.close()


async def test_attach_to_nothing(model: Path) -> None:
    server = AttachedVLLM(model, PolicyServerConfig(attach="http://127.0.0.1:9"))
    with pytest.raises(PolicyServerError, match=r"no vLLM answers at policy_server\.attach.*refused.*leave"):
        await server.start()


async def test_weights_that_were_there_before_it_attached_are_not_known_to_be_put_back(fake: Any, model: Path) -> None:
    """The model folder's are not them: under their version's name nothing else is ever sampled from."""
    fake.version, fake.fail["lightning_load"] = 7, 1
    server = await attached(fake, model)
    with pytest.raises(PolicyServerError, match=r"broke; then version 7 could not.*has no weights of it.*stays paused"):
        await server.update(model / "model.safetensors", 8)
    assert fake.calls.count("load") == 1
    assert (fake.paused, fake.version) == (True, None)
    await server.update(model / "model.safetensors", 8)
    fake.version, fake.paused = 7, False
    await server.start()
    fake.fail["lightning_load"] = 1
    with pytest.raises(PolicyServerError, match="has no weights of it"):
        await server.update(model / "model.safetensors", 9)


async def test_an_answer_without_end_is_named(fake: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "LONGEST_REPLY", 10)
    with pytest.raises(PolicyServerError, match=r"GET .*/v1/models was answered with more than 10 bytes"):
        await AttachedControl(fake.url).served_model()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's health is asked for without a second's pause."""
    monkeypatch.setattr(vllm_server, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(vllm_server, "POLL_SECONDS", 0.01)


async def test_an_attached_vllm_that_was_started_again_is_noticed_and_claimed_anew(
    fake: Any, model: Path, soon: None
) -> None:
    """However soon it answers again: it has other weights than it had."""
    server = await attached(fake, model)
    first = server.claim
    assert fake.claim == first != ""
    died = asyncio.create_task(server.wait_died())
    await server.update(model / "model.safetensors", 3)
    await asyncio.sleep(0.1)
    assert not died.done()
    fake.claim, fake.version = "", 0
    await asyncio.wait_for(died, 120)
    await server.restart(model / "model.safetensors", 3)
    assert fake.version == 3
    assert fake.claim == server.claim != first


async def test_a_trainer_whose_vllm_another_one_has_attached_to_stops(fake: Any, model: Path, soon: None) -> None:
    server = await attached(fake, model)
    other = await attached(fake, model)
    await asyncio.wait_for(server.wait_died(), 30)
    with pytest.raises(PolicyServerError, match=r"another trainer has attached to the vLLM at .*policy_server\.attach"):
        await server.restart(None, 0)
    assert fake.claim == other.claim, "it has not been taken back"


async def test_of_two_trainers_that_attach_at_one_moment_one_brings_weights(
    fake: Any, model: Path, alter: Alter
) -> None:
    theirs = alter(model, lambda t: t)
    trainers = [AttachedVLLM(model, PolicyServerConfig(attach=fake.url)) for _ in range(2)]
    await asyncio.gather(*(trainer.start() for trainer in trainers))
    assert all(trainer.claim for trainer in trainers), "both were told that it is theirs"
    (winner,) = (trainer for trainer in trainers if trainer.claim == fake.claim)
    (loser,) = (trainer for trainer in trainers if trainer is not winner)
    await winner.update(theirs, 3)
    fake.calls.clear()
    for attempt in (loser.update(model / "model.safetensors", 8), loser.restart(None, 8)):
        with pytest.raises(PolicyServerError, match=r"another trainer has attached to .*policy_server\.attach.*resume"):
            await attempt
    assert "pause" not in fake.calls
    assert (fake.weights, fake.version, fake.claim) == ((str(theirs),), 3, winner.claim)


@pytest.mark.parametrize(
    ("after", "breaks", "version"),
    [("lightning_in_flight", 0, 0), ("lightning_load", 0, None), ("lightning_load", 1, None)],
)
async def test_a_server_that_is_lost_during_an_update_is_left_to_its_new_trainer(
    fake: Any, model: Path, after: str, breaks: int, version: int | None
) -> None:
    """Paused, where half of an update was done: the other trainer's own update resumes it."""
    server, rpc = await attached(fake, model), fake.rpc
    fake.fail[after] = breaks

    def stolen(method: str, args: list[str]) -> dict[str, object]:
        answer: dict[str, object] = rpc(method, args)
        if method == after:
            fake.claim = "theirs"
        return answer

    fake.rpc = stolen
    with pytest.raises(PolicyServerError, match=r"another trainer has attached to .*its claim is theirs"):
        await server.update(model / "model.safetensors", 1)
    assert (fake.version, fake.paused) == (version, version is None)
    assert fake.calls.count("load") == 1, "nothing was put back"


async def test_a_trainers_server_is_taken_over_when_its_calls_have_ended_and_one_let_go_of_at_once(
    fake: Any, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lightning_attach.attached.TAKE_OVER_SECONDS", 60.0)
    first = await attached(fake, model)
    second = AttachedVLLM(model, PolicyServerConfig(attach=fake.url))
    starting = asyncio.create_task(second.start())
    while "is another trainer's, or was this run's" not in caplog.text:
        await asyncio.sleep(0.01)
    with pytest.raises(PolicyServerError, match="another trainer"):
        await first.update(model / "model.safetensors", 1)
    await first.close()
    assert not starting.done()
    assert fake.claim, "it was not the first one's to let go of"
    starting.cancel()
    await second.close()
    assert fake.claim == "", "also one that had not taken it over yet lets go"
    with pytest.raises(PolicyServerError, match=r"started again since, or another trainer has taken it over and ended"):
        await first.update(model / "model.safetensors", 1)
    monkeypatch.setattr("lightning_attach.attached.TAKE_OVER_SECONDS", 0.0)
    await (await attached(fake, model)).close()
    assert fake.claim == ""
    monkeypatch.setattr("lightning_attach.attached.TAKE_OVER_SECONDS", 60.0)
    async with asyncio.timeout(20):
        await attached(fake, model)


async def test_what_cannot_say_whose_it_is_is_the_same_and_what_has_no_weights_is_not(
    fake: Any, model: Path, soon: None
) -> None:
    server = await attached(fake, model)
    fake.fail["lightning_attach"] = 3
    died = asyncio.create_task(server.wait_died())
    while fake.fail["lightning_attach"] > 0:
        await asyncio.sleep(0.01)
    assert not died.done()
    fake.routes = False
    await asyncio.wait_for(died, 120)


async def test_a_vllm_with_another_releases_extension_is_told_how_to_get_on(fake: Any, model: Path) -> None:
    fake.fail["lightning_claim"] = 1
    with pytest.raises(PolicyServerError, match=r"takes no claim.*lightning_claim broke.*start it again with this one"):
        await attached(fake, model)


async def test_one_that_only_serves_claims_nothing(fake: Any, model: Path) -> None:
    fake.claim = "the trainer's"
    server = only_serves(fake, model)
    await server.start()
    assert (fake.claim, server.claim, server.alias) == ("the trainer's", "", "someone's")
    await server.close()


async def test_an_attached_server_that_came_back_gets_its_weights(fake: Any, model: Path) -> None:
    server = await attached(fake, model)
    fake.version = 0
    await server.restart(model / "model.safetensors", 5)
    assert server.version == fake.version == 5
    await server.restart(None, 6)
    assert server.version == fake.version == 6


async def test_the_order_of_an_update(fake: Any, model: Path) -> None:
    server = await attached(fake, model)
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


def test_make_policy_server_chooses(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    ours = make_policy_server(model, Config(), log=log, version=3)
    assert isinstance(ours, OwnedVLLM)
    assert (ours.version, ours.model) == (3, "policy")
    theirs = make_policy_server(model, Config(policy_server=PolicyServerConfig(attach="http://127.0.0.1:1")), log=log)
    assert isinstance(theirs, AttachedVLLM)
    assert vllm_server.REFUSALS > 1


async def test_the_weights_that_are_there_get_another_version(fake: Any, model: Path) -> None:
    """Nothing is loaded, and what agents have in the prefix cache stays there."""
    server = await attached(fake, model)
    fake.counts = {"chatcmpl-a-00000000": 5}
    update = await server.update(None, 1)
    assert fake.calls == ["attach", "attach", "pause", "in_flight", "set_version", "resume"]
    assert (update.version, update.in_flight, server.version, fake.version) == (1, {"a": 5}, 1, 1)
    fake.fail["lightning_set_version"] = 1
    with pytest.raises(PolicyServerError, match="the name of version 2 was not taken, version 1 goes on"):
        await server.update(None, 2)
    assert (server.version, fake.version, fake.paused) == (1, 1, False)
