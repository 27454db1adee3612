"""docs/runners.md can be copied: its settings load, its manifests are YAML, its commands are ones that there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from lightning.cli.app import build
from lightning.config import load_config
from lightning_k8s.manifests import Manifests, read_template
from lightning_server.protocol import Site

PAGE = (Path(__file__).parents[3] / "docs" / "runners.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def manifests() -> list[dict[str, Any]]:
    return [document for block in blocks("yaml") for document in yaml.safe_load_all(block)]


@pytest.mark.parametrize("text", blocks("toml"))
def test_its_settings_load(text: str, tmp_path: Path) -> None:
    file = tmp_path / "lightning.toml"
    file.write_text(text)
    config = load_config(file, env={})
    assert config.runner.concurrency == 64


def test_its_template_makes_a_pod(tmp_path: Path) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text(next(block for block in blocks("yaml") if "kind: Pod\n" in block))
    config = load_config(env={}).runner
    made = Manifests(Site("http://x", "t", "run-1", None), config, "a:b", read_template(str(file)))  # type: ignore[arg-type]
    (container,) = made.pod({"metadata": {"name": "s", "uid": "u"}, "apiVersion": "v1", "kind": "Secret"}, 1)["spec"][
        "containers"
    ]
    assert container["image"] == "registry.example/my-agents:1"


def commands() -> list[list[str]]:
    found = [line.split() for block in blocks("bash") for line in block.splitlines() if line.startswith("lightning ")]
    for manifest in manifests():
        pod = manifest.get("spec", {}).get("template", {}).get("spec", {})
        found += [[*one["command"], *one["args"]] for one in pod.get("containers", ()) if "args" in one]
    return found


@pytest.mark.parametrize("typed", commands(), ids=" ".join)
def test_its_commands_are_ones_that_there_are(
    typed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, name, *arguments = typed
    assert program == "lightning"
    command: Any = typer.main.get_command(build(name)).commands[name]  # type: ignore[attr-defined]
    while hasattr(command, "commands"):
        command, arguments = command.commands[arguments[0]], arguments[1:]
    command.make_context(name, arguments)  # a usage error is raised
