"""The audit is refused by its name where the plugin is not there."""

from __future__ import annotations

import sys

import pytest
from lightning.cli import app
from lightning.plugins import Plugins


def test_the_command_says_that_it_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "proof")
    found = Plugins()
    monkeypatch.setattr(app, "plugins", lambda: found)
    monkeypatch.setattr(sys, "argv", ["lightning", "audit", "run"])
    with pytest.raises(SystemExit):
        app.main()
    assert "no command 'audit'" in (said := " ".join(capsys.readouterr().err.split()))
    assert "'proof'" in said
    assert "is disabled: LIGHTNING_DISABLE_PLUGINS lists it" in said
