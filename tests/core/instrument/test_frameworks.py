"""Calls of a framework that has no adapter say so, since its agents have no names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import httpx
import lightning
import pytest
from lightning.instrument import activate, component, emit, install_tap
from lightning.instrument.marking import FRAMEWORKS
from lightning.plugins import plugins
from lightning.testing.chat_server import ChatServer

BODY = {"messages": [{"role": "user", "content": "hi"}]}
CREW = """
import httpx

def kickoff(url, body):
    return httpx.post(url, json=body)
"""


@pytest.fixture
def crewai(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    assert "crewai" in FRAMEWORKS
    installed = tmp_path / "site-packages"
    (installed / "crewai").mkdir(parents=True)
    (installed / "crewai" / "__init__.py").touch()
    (installed / "crewai" / "crew.py").write_text(CREW)
    monkeypatch.syspath_prepend(installed)
    importlib.invalidate_caches()
    yield importlib.import_module("crewai.crew")
    for name in ("crewai", "crewai.crew"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("adapters", [[], ["raw"]], ids=["none", "raw"])
def test_a_call_through_its_code_names_it_unless_the_user_names_the_call(
    crewai: ModuleType, adapters: list[str]
) -> None:
    with ChatServer() as server:
        undos = [install_tap(), plugins().install_adapters(emit, adapters)]
        url = f"{server.llm().base_url}/chat/completions"
        try:
            with activate(server.llm()):
                crewai.kickoff(url, BODY)
                with component("writer"):
                    crewai.kickoff(url, BODY)
                httpx.post(url, json=BODY)
        finally:
            for undo in reversed(undos):
                undo()
    theirs, named, own = (call.caller or lightning.Caller("") for call in server.calls)
    assert theirs.framework == "no-adapter:crewai"
    assert theirs.agent == (
        "test_a_call_through_its_code_names_it_unless_the_user_names_the_call" if adapters else "agent"
    )
    assert not named.framework.startswith("no-adapter")
    assert own.framework == ("raw" if adapters else "")
