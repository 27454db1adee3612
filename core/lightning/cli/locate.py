"""Finds what a command line names: a run (a folder, or an id below the folder of runs) with its store, and an agent.

The invariant: nothing of training is imported here, since a client needs it on many machines.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lightning.errors import ConfigError
from lightning.maintenance import check_schema
from lightning.plugins import plugins
from lightning.store.protocol import Store
from lightning.store.resource_ref import DATABASE, existing_store, run_id_of, store_in

if TYPE_CHECKING:
    from lightning.runner.protocol import Agent


T = TypeVar("T")


def locate(run: str, runs: Path) -> tuple[str, str]:
    """The store's URL and the run's id. Raises `ConfigError` naming where it looked."""
    for folder in (Path(run), runs / run):
        if url := store_in(folder):
            return url, run_id_of(folder)
    raise ConfigError(
        f"no run {run!r}: neither {run} nor {runs / run} has a {DATABASE}, or a run.json that names a store. "
        "`lightning runs` lists what there is"
    )


async def with_store(url: str, use: Callable[[Store], Awaitable[T]], *, make: bool = False, instead: str = "") -> T:
    """Open a store, use it, and close it. Raises `SchemaError` when opening would bring an older one forward, which says what
    can be done `instead`, and `ConfigError` or `SchemaError` when it would make one, unless it is to `make` one."""
    store = plugins().store(url)
    await check_schema(url if make else existing_store(url), make=make, instead=instead)
    await store.open()
    try:
        return await use(store)
    finally:
        await store.close()


LIBRARIES = "site-packages"
"""In the paths of what was installed: an environment may lie in the folder of the agent."""


def load_agent(name: str) -> Agent:
    """Import `MODULE:FUNCTION`, with the current folder importable. Raises `ConfigError` naming what is missing."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{name!r} does not name an agent: write MODULE:FUNCTION, for example my_app.agent:run")
    if module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise ConfigError(f"{module_name!r} is a file, and an agent is named by its module: write {dotted}:{attribute}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"cannot import {module_name!r} for the agent {name!r}: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"importing {module_name!r} for the agent {name!r} failed at {_where(error)}: {type(error).__name__}: {error}. "
            "Mend it there (a client that wants a key can be made inside the agent); --debug shows the traceback"
        ) from error
    target: object = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise ConfigError(f"the module {module_name!r} has no {attribute!r}")
        target = getattr(target, part)
    if not callable(target):
        raise ConfigError(f"{name!r} is a {type(target).__name__}, not something that can be called with (task, llm)")
    return target


def _where(error: Exception) -> str:
    """The line that does not parse, or the one that raised: the last one of this folder, if any, else of a library."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame for frame in frames if Path(frame.filename).is_relative_to(Path.cwd()) and LIBRARIES not in frame.filename
    ]
    last = (own or frames)[-1]
    return f"{last.filename}:{last.lineno}"
