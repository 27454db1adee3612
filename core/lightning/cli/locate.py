"""Finds the run that a command line names (a folder, or an id below the folder of runs) with its store, and the agent.

The invariant: no module of training is imported here, since a client needs this module on many machines.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from lightning.errors import ConfigError
from lightning.plugins import plugins
from lightning.plugins.named import import_named as import_named  # for plugins
from lightning.plugins.named import name_of as name_of  # for plugins
from lightning.store.places import DATABASE, run_id_of, store_in
from lightning.store.protocol import Store

if TYPE_CHECKING:
    from lightning.runner.protocol import Agent


T = TypeVar("T")


def locate(run: str, runs: Path) -> tuple[str, str]:
    """Return the URL of a run's store, and the run's id. Raises `ConfigError` naming the folders that were searched."""
    for folder in (Path(run), runs / run):
        if url := store_in(folder):
            return url, run_id_of(folder)
    raise ConfigError(
        f"no run {run!r}: neither {run} nor {runs / run} has a {DATABASE}, or a run.json that names a store. "
        "`lightning runs` lists what there is"
    )


async def with_store(url: str, use: Callable[[Store], Awaitable[T]], *, make: bool = False) -> T:
    """Open a store, call `use` with it, and close it. Unless `make` is set, raises `ConfigError` or `SchemaError` when opening
    would create a store."""
    async with plugins().opened_store(url, make=make) as store:
        return await use(store)


def load_agent(name: str) -> Agent:
    """Import an agent from `MODULE:FUNCTION`, with the current folder importable, or make what a plugin knows by `NAME:TEXT`.

    Raises `ConfigError` naming what is missing, or a name that means both.
    """
    first, _, rest = name.partition(":")
    if rest and first in plugins().names("agents"):
        if rest.isidentifier() and Path(f"{first}.py").exists():
            raise ConfigError(
                f"{name!r} is a function of your {first}.py and also what the plugin for {first}: would run. Rename the "
                f"module, or write '{first}: {rest}' for the latter"
            )
        return cast("Callable[[str], Agent]", plugins().get("agents", first))(rest)
    target = import_named(name, "agent")
    if not callable(target):
        raise ConfigError(f"{name!r} is a {type(target).__name__}, not something that can be called with (task, llm)")
    return target
