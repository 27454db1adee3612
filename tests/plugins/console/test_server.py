"""The console with Gradio on a server's port, for the holders of its tokens; `test_beside.py` has that of one's own machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from lightning.config import Config
from lightning.store.url import sqlite_url
from lightning.types import Run, Scope
from lightning_server.auth import issue_token
from lightning_server.serving import serve_store
from lightning_server.tokens import put_token, revoke_token

from tests.plugins.console import made_pages


async def ask(client: httpx.AsyncClient, url: str, function: str, **given: object) -> httpx.Response:
    """What a page's script asks of Gradio's server functions."""
    config = (await client.get(f"{url}/config")).json()
    (host,) = [component["id"] for component in config["components"] if component["type"] == "html"]
    body = {"data": given, "component_id": host, "session_hash": "a", "fn_name": function}
    return await client.post(f"{url}/gradio_api/component_server/", json=body)


@pytest.mark.slow
async def test_the_tokens_of_a_server_open_its_console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_pages.register(monkeypatch)
    url = sqlite_url(tmp_path / "lightning.db")
    tokens = {}
    async with serve_store(url, Config(), tmp_path) as server:
        assert "/console" in server.web_apps
        for name in ("team-a", "team-b"):
            await server.store.put_run(Run(f"run-{name}", f"of {name}", {}, 1.0, name))
            token, tokens[name] = issue_token(Scope.VIEWER, name)
            await put_token(server.store, token)
        console = f"{server.url}/console"
        async with httpx.AsyncClient(timeout=60) as stranger:
            assert (await stranger.get(f"{console}/config")).status_code == 401
            assert (await ask_blindly(stranger, console)).status_code == 401
            assert (await stranger.get(f"{console}/", headers={"host": "evil.example"})).status_code == 421
            assert (await stranger.get(f"{server.url}/api/v1/health")).status_code == 200, "the API is where it was"
        for mine, other in (("team-a", "team-b"), ("team-b", "team-a")):
            async with httpx.AsyncClient(timeout=60, follow_redirects=True) as client:
                page = await client.post(f"{console}/login", data={"token": tokens[mine]})
                assert page.status_code == 200
                assert "gradio_config" in page.text
                assert 'analytics_enabled":true' not in page.text.replace(" ", "")
                shown = (await ask(client, console, "show", address="runs", seen="")).json()
                assert [row[0]["text"] for row in shown["page"]["blocks"][0]["value"]["rows"]] == [f"run-{mine}"]
                hidden = (await ask(client, console, "show", address=f"run/run-{other}", seen="")).json()
                assert "there is no run" in str(hidden["page"]["blocks"])
                refused = (
                    await ask(client, console, "act", name="note", arguments={"run": f"run-{mine}", "text": "x"})
                ).json()
                assert "changes nothing" in refused["error"]
                theme = (await client.get(f"{console}/theme.css")).text
                assert "@import" not in theme, "no web font"
                assert "fonts.g" not in page.text + theme
                await revoke_token(server.store, tokens[mine].split("_")[1])
                await asyncio.sleep(1.1)
                assert (await ask_blindly(client, console)).status_code == 401


async def ask_blindly(client: httpx.AsyncClient, url: str) -> httpx.Response:
    body: dict[str, Any] = {"data": {}, "component_id": 1, "session_hash": "a", "fn_name": "show"}
    return await client.post(f"{url}/gradio_api/component_server/", json=body)


@pytest.mark.slow
async def test_wrong_tokens_are_slowed_down(tmp_path: Path) -> None:
    """The server's own limit, `gateway.limits.failures_per_minute`, counts them."""
    async with (
        serve_store(sqlite_url(tmp_path / "lightning.db"), Config(), tmp_path) as server,
        httpx.AsyncClient() as client,
    ):
        codes = [
            (await client.post(f"{server.url}/console/login", data={"token": f"lt_{n:016x}_{'a' * 43}"})).status_code
            for n in range(130)
        ]
    assert set(codes) == {401, 429}
    assert codes[-1] == 429
