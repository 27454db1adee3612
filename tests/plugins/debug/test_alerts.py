"""Serious findings reach a webhook and a program, and nobody waits for these."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from lightning.config import Config, with_settings
from lightning.errors import ConfigError
from lightning.testing.tiny_models import make_tiny_model
from lightning.trainer.trainer import Trainer
from lightning_debug.stage import Alerts, read_alerts

ALERT = {"run": "r", "step": 3, "cause": "collapsed", "text": "the reward collapsed", "steps": [1, 3], "rollouts": []}
URL = "LIGHTNING_TEST_WEBHOOK"


@pytest.fixture
async def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a webhook was told; it answers 200 until `fail` is in the list."""
    told: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        if "fail" in told:
            return web.Response(status=503)
        told.append(await request.json())
        return web.Response()

    app = web.Application()
    app.router.add_post("/secret", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    monkeypatch.setenv(URL, f"http://127.0.0.1:{runner.addresses[0][1]}/secret")
    yield told
    await runner.cleanup()


async def test_a_webhook_and_a_program_are_told(hook: list[Any], tmp_path: Path) -> None:
    program = f"command:{sys.executable} -c \"import sys; open('{tmp_path}/told', 'w').write(sys.stdin.read())\""
    alerts = Alerts([f"webhook:{URL}", program])
    alerts.send(ALERT)
    await alerts.close()
    assert hook == [ALERT]
    assert json.loads((tmp_path / "told").read_text()) == ALERT


async def test_what_fails_is_logged_once_and_without_the_address(
    hook: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    hook.append("fail")
    alerts = Alerts([f"webhook:{URL}", f"command:{sys.executable} -c 'raise SystemExit(3)'"])
    alerts.send(ALERT)
    alerts.send(ALERT)
    await alerts.close()
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sorted(text.partition(": ")[2].split(". ")[0] for text in said) == ["it answered 503", "it ended with 3"]
    assert "/secret" not in caplog.text


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("https://hooks.example/T0/secret", "neither webhook:NAME"),
        ("webhook:https://hooks.example/T0/secret", "name of the variable that holds the URL"),
        ("webhook:LIGHTNING_NOT_SET", "LIGHTNING_NOT_SET, of trainer.alerts, holds no URL"),
        ("command:curl -d @- https://hooks.example/T0/secret", "has an address in it"),
        ("command:no-such-program now", "no program 'no-such-program'"),
        ("command:'open", "cannot be read as a command"),
    ],
)
def test_a_target_that_cannot_be_meant_is_refused_and_no_secret_is_repeated(target: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        read_alerts([target])
    assert "secret," not in str(caught.value).replace("may be a secret,", "")
    assert "hooks.example" not in str(caught.value)


def test_a_trainer_refuses_it_before_anything_is_started(tmp_path: Path) -> None:
    config = with_settings(Config(), {"trainer.alerts": ("webhook:LIGHTNING_NOT_SET",)})
    with pytest.raises(ConfigError, match="holds no URL"):
        Trainer(make_tiny_model(tmp_path), config=config)


async def test_a_program_that_is_given_up_leaves_no_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be collected in the middle of a later test, and blamed on that."""
    begun: list[asyncio.subprocess.Process] = []
    start, there = asyncio.create_subprocess_exec, asyncio.Event()

    async def started(*command: Any, **options: Any) -> asyncio.subprocess.Process:
        begun.append(await start(*command, **options))
        asyncio.get_running_loop().call_soon(there.set)
        return begun[0]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    ((_, send),) = read_alerts([f"command:{sys.executable} -c 'import time; time.sleep(600)'"])
    telling = asyncio.ensure_future(send(b"{}"))
    await there.wait()
    telling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await telling
    assert (begun[0].returncode, begun[0]._transport.is_closing()) == (-9, True)  # type: ignore[attr-defined]
