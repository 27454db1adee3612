"""The agent that a command line names. A client needs it on many machines: nothing of training is imported here."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.errors import ConfigError

if TYPE_CHECKING:
    from lightning.runner.protocol import Agent


def load_agent(name: str) -> Agent:
    """Import `MODULE:FUNCTION`, with the current folder importable. Raises `ConfigError` naming what is missing."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{name!r} does not name an agent: write MODULE:FUNCTION, for example my_app.agent:run")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"cannot import {module_name!r} for the agent {name!r}: {error}") from error
    target: object = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise ConfigError(f"the module {module_name!r} has no {attribute!r}")
        target = getattr(target, part)
    if not callable(target):
        raise ConfigError(f"{name!r} is a {type(target).__name__}, not something that can be called with (task, llm)")
    return target
