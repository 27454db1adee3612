"""`lightning adapters`: the agent frameworks that can be trained here, and what the others lack."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lightning.cli.output import AsJson, escape, next_steps, print_json, print_table, say
from lightning.installation import install_command
from lightning.plugins import PluginInfo, plugins

State: TypeAlias = Literal["ready", "waiting", "missing", "broken", "disabled"]

COLOURS: dict[State, str] = {
    "ready": "green",
    "waiting": "green",
    "missing": "yellow",
    "broken": "red",
    "disabled": "dim",
}


@dataclass(frozen=True, slots=True)
class AdapterRow:
    """One adapter in the list. `waiting` is as good as `ready`: it attaches as soon as the agent imports `framework`. `missing`
    means that the framework is not installed."""

    name: str
    state: State
    framework: str
    distribution: str
    version: str
    error: str = ""
    cure: str = ""


def adapters(as_json: AsJson = False) -> None:
    """List the agent frameworks that can be trained on this machine.

    ready: attached when an agent starts. waiting: attached as soon as an agent imports the framework. missing: the framework
    is not installed. broken: the adapter cannot be loaded. disabled: by LIGHTNING_DISABLE_PLUGINS.
    """
    rows = [row(info) for info in plugins().adapters()]
    if as_json:
        print_json(rows)
        return
    print_table(
        ["adapter", "state", "framework", "from"],
        [
            [
                item.name,
                f"[{COLOURS[item.state]}]{item.state}",
                item.framework,
                f"{item.distribution} {item.version}",
            ]
            for item in rows
        ],
    )
    for item in rows:  # in lines of their own, which can be copied from a narrow terminal
        for text in (item.error, item.cure):
            if text:
                say(escape(f"{item.name}: {text}"))
    next_steps(("check this machine", ["doctor"]), ("train your own agent", ["train", "--help"]))


def row(info: PluginInfo) -> AdapterRow:
    """Make the row of an adapter: its state, and the cure if its framework is not installed."""
    state: State = "ready" if info.state == "loaded" else info.state
    cure = ""
    if state == "waiting" and not is_installed(info.waits_for):
        state = "missing"
        cure = cure_of(info)
    return AdapterRow(info.name, state, info.waits_for, info.distribution, info.version, info.error, cure)


def is_installed(module: str) -> bool:
    """Whether a module's top-level package can be found, without importing it."""
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def cure_of(info: PluginInfo) -> str:
    """Return how to get an adapter's framework: by the adapter's own extra, if its distribution has one of that name."""
    try:
        extras = importlib.metadata.metadata(info.distribution).get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        extras = []
    if info.name in extras:
        return install_command(info.name, info.distribution)
    return f"install the package that provides the module {info.waits_for}"
