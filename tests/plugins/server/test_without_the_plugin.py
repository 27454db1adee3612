"""What needs the plugin is refused by its name where the plugin is not there; a training on one machine asks for none of it."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from lightning import Trainer
from lightning.cli import app
from lightning.config import Config, LimitsConfig, load, plugin_settings, recorded_config, with_settings
from lightning.errors import ConfigError, PluginError, PolicyServerError
from lightning.gateway import connections
from lightning.gateway import http as gateway_http
from lightning.gateway import policy as gateway_policy
from lightning.gateway.connections import Serving, bind
from lightning.gateway.http import RefusalError, read_body, send_bytes
from lightning.plugins import Plugins
from lightning.store.memory import MemoryStore
from lightning.trainer import agents, trainer
from lightning.types import CallStatus
from lightning_branching import live_policy
from lightning_branching.live_policy import join_gateway, why_not_served
from starlette.types import Receive, Scope, Send

from tests.core.gateway.conftest import build  # noqa: F401 — a fixture
from tests.core.trainer.test_opening import House, ask, house  # noqa: F401 — a fixture

CURE = r", and there is none\. The plugin 'server' brings it\. Run: pip install .*disabled"
ABSENT = rf"needs a plugin that lets clients in{CURE}"
UNKNOWN_SETTING = r"settings: unknown setting '{}'\. The plugin 'server' brings it\. Run: pip install .*disabled"
NO_GUARD = rf"needs a plugin that guards ports{CURE}"
NO_FLEET = rf"needs a plugin that knows of gateways elsewhere{CURE}"


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Plugins:
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "server")
    found = Plugins()
    for module in (
        app,
        connections,
        gateway_http,
        gateway_policy,
        agents,
        trainer,
        live_policy,
        load,
        plugin_settings,
    ):
        monkeypatch.setattr(module, "plugins", lambda: found)
    return found


def make_trainer(folder: Path, runner: str = "inline", **settings: object) -> Trainer:
    (folder / "config.json").write_text("{}")
    config = with_settings(Config(), {"engine.lr": 1e-4, **settings})
    return Trainer(folder, config=config, out=folder / "run", runner=runner)


@pytest.mark.usefixtures("without")
def test_one_machine_needs_no_server(tmp_path: Path) -> None:
    assert make_trainer(tmp_path)._project == "default"


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [
        ("server.port", 8000, UNKNOWN_SETTING.format("server.port")),
        ("gateway.host", "0.0.0.0", rf"gateway\.host = '0\.0\.0\.0', beyond this machine, {ABSENT}"),
        ("server.host", "0.0.0.0", UNKNOWN_SETTING.format("server.host")),
        ("trainer.project", "team-a", UNKNOWN_SETTING.format("trainer.project")),
    ],
)
def test_a_setting_is_refused_before_anything_is_started(
    setting: str, value: object, named: str, tmp_path: Path
) -> None:
    with pytest.raises((PluginError, ConfigError), match=f"^{named}"):
        make_trainer(tmp_path, **{setting: value})
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("without")
def test_the_settings_of_a_record_are_left_out_by_name() -> None:
    said = {"server": {"port": 8000}, "trainer": {"project": "team-a", "steps": 3}}
    config, unknown = recorded_config(said)
    assert (config.trainer.steps, unknown) == (3, ["trainer.project", "server"])
    assert said["server"] == {"port": 8000}


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize(
    ("setting", "value"), [("requests_per_second", 5.0), ("header_timeout", 1.0), ("connections_per_address", 3)]
)
def test_a_limit_that_a_guard_keeps_is_refused(setting: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{UNKNOWN_SETTING.format(f'gateway.limits.{setting}')}"):
        make_trainer(tmp_path, **{f"gateway.limits.{setting}": value})
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("without")
async def test_a_port_without_a_guard_is_on_loopback_and_bounds_what_it_reads() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(scope, receive, 100)
        await send_bytes(send, 200, b"")

    refused = rf"^to listen on '0\.0\.0\.0', beyond this machine, {NO_GUARD}"
    with bind("0.0.0.0", 0) as listener, pytest.raises(PluginError, match=refused):
        Serving(app, listener, LimitsConfig())
    port = Serving(app, bind("127.0.0.1", 0), LimitsConfig(hosts=("agents.example",), json_values=2))
    await port.start()
    async with httpx.AsyncClient(base_url=port.url) as http:
        assert (await http.post("/", content=b"[1]")).status_code == 200
        assert (await http.post("/", content=b"[1]", headers={"host": "agents.example"})).status_code == 200
        assert (await http.post("/", content=b"[1]", headers={"host": "evil.example"})).status_code == 421
        long = {f"x-{number}": "y" * 20_000 for number in range(5)}
        assert (await http.post("/", content=b"[1]", headers=long)).status_code == 400
    await port.stop()


@pytest.mark.usefixtures("without")
async def test_a_packed_body_is_refused_with_what_would_unpack_it(build) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    opened = await build()
    http = await opened.http()
    said = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    answer = await http.post("/chat/completions", content=gzip.compress(said), headers={"content-encoding": "gzip"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_encoding")
    cure = r"send it as it is, or to a port that a plugin guards\. The plugin 'server' brings it\. Run: pip install .*disabled"
    assert re.search(
        rf"content-encoding is 'gzip', and nothing here unpacks it: {cure}", answer.json()["error"]["message"]
    )
    (call,) = await opened.transitions()
    assert (call.status, opened.fake.requests) == (CallStatus.REFUSED, [])
    for encoding in ("identity", ""):
        answer = await http.post("/chat/completions", content=said, headers={"content-encoding": encoding})
        assert answer.status_code == 200


@pytest.mark.usefixtures("without")
def test_the_runner_of_clients_is_refused_with_what_brings_it(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"no runner 'remote'.*plugin 'server' brings it.*pip install.*is disabled"):
        make_trainer(tmp_path, "remote")


@pytest.mark.usefixtures("without")
async def test_a_runner_of_another_plugin_whose_agents_run_in_clients_is_refused(
    house: House,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.core.trainer.test_opening.Idle.concurrency", 0)
    with pytest.raises(PluginError, match=f"^a runner whose agents run in clients {ABSENT}"):
        await house.open(tmp_path, restores=False)
    assert house.policy.notice is None, "nothing was started"


@pytest.mark.usefixtures("without")
async def test_one_machine_needs_no_fleet(house: House, tmp_path: Path) -> None:  # noqa: F811
    """A trainer alone holds its own calls, restarts its policy server, and leaves no word for gateways elsewhere."""
    lease = await house.lease()
    stack = await house.open(tmp_path, restores=True)
    asking = asyncio.create_task(ask(stack.gateway.llm(lease)))
    with pytest.raises(PolicyServerError, match="does not fit"):
        await stack._update(Path("bad"), 7, None)
    house.policy.died.set()
    await house.policy.restarted.wait()
    await stack._serving.wait()
    await asyncio.sleep(0.2)
    assert not asking.done()
    await stack.update(Path("good"), 8)
    assert await asking == 200
    assert await house.versions() == [8]
    await stack.owner.close()
    assert await house.store.get_state("", "policy/run") is None


@pytest.mark.usefixtures("without")
async def test_what_another_trainer_serves_is_refused(house: House, tmp_path: Path) -> None:  # noqa: F811
    stack = await house.open(tmp_path, restores=False)
    with pytest.raises(RefusalError, match=rf"^a key of the run 'other', .* {NO_FLEET}") as refused:
        stack.gateway._policies.of("other")
    assert (refused.value.status, refused.value.code) == (501, "run_elsewhere")
    with pytest.raises(PluginError, match=rf"^a gateway before the policies that trainers serve {NO_FLEET}"):
        await join_gateway(AsyncExitStack(), house.store, Config())
    why = await why_not_served(house.store, "other", 0, Config())
    assert re.match(rf"the policy of run other, which its trainer serves, {NO_FLEET}", why)


@pytest.mark.usefixtures("without")
async def test_the_names_of_another_project_are_never_those_of_the_default_one() -> None:
    store = MemoryStore()
    assert agents.of_project(store, "default") is store
    with pytest.raises(PluginError, match=f"^the project 'team-a' {ABSENT}"):
        agents.of_project(store, "team-a")
    await agents.check_exposure(store, "localhost")
    with pytest.raises(PluginError, match=f"^to listen on '10.0.0.1', beyond this machine, {ABSENT}"):
        await agents.check_exposure(store, "10.0.0.1")


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_store_over_http_is_refused_with_what_brings_it(without: Plugins, scheme: str) -> None:
    with pytest.raises(PluginError, match=rf"no store '{scheme}'.*plugin 'server' brings it.*pip install.*is disabled"):
        without.store(f"{scheme}://there:8000")


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("command", ["runner", "serve", "token", "pull"])
def test_a_command_of_the_plugin_says_that_it_is_switched_off(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning", command])
    with pytest.raises(SystemExit):
        app.main()
    assert f"no command '{command}'" in (said := " ".join(capsys.readouterr().err.split()))
    assert "'server'" in said
    assert "is disabled: LIGHTNING_DISABLE_PLUGINS lists it" in said
