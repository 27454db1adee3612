"""What needs the plugin is refused by its name where the plugin is not there."""

from __future__ import annotations

import sys

import pytest
from lightning.cli import app
from lightning.errors import PluginError
from lightning.plugins import Plugins


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Plugins:
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "server")
    found = Plugins()
    monkeypatch.setattr(app, "plugins", lambda: found)
    return found


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_store_over_http_is_refused_with_what_brings_it(without: Plugins, scheme: str) -> None:
    with pytest.raises(PluginError, match=rf"no store '{scheme}'.*plugin 'server' brings it.*pip install.*is disabled"):
        without.store(f"{scheme}://there:8000")


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("command", ["runner"])
def test_a_command_of_the_plugin_says_that_it_is_switched_off(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning", command])
    with pytest.raises(SystemExit):
        app.main()
    assert f"no command '{command}'" in (said := " ".join(capsys.readouterr().err.split()))
    assert "'server'" in said
    assert "is disabled: LIGHTNING_DISABLE_PLUGINS lists it" in said
