"""Imports what a text names as MODULE:NAME: an agent, a grader, a credit function.

The invariant: an error names the module, and the line in the user's own code where its import failed.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

from lightning.errors import ConfigError

MAIN = "__main__"
LIBRARIES = "site-packages"
"""Stands in the path of every installed package; an environment with packages may lie in the agent's folder."""


def import_named(name: str, what: str) -> object:
    """Import `MODULE:NAME`, with the current folder importable. Errors call the object a `what`, such as an agent.

    Raises `ConfigError` naming what is missing.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{name!r} does not name the {what}: write MODULE:FUNCTION, for example my_app.{what}:run")
    if module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise ConfigError(
            f"{module_name!r} is a file, and the {what} is named by its module: write {dotted}:{attribute}"
        )
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"cannot import {module_name!r} for the {what} {name!r}: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"importing {module_name!r} for the {what} {name!r} failed at {_where(error)}: {type(error).__name__}: {error}. "
            f"Mend it there (a client that wants a key can be made inside the {what}); --debug shows the traceback"
        ) from error
    target: object = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise ConfigError(f"the module {module_name!r} has no {attribute!r}")
        target = getattr(target, part)
    return target


def _where(error: Exception) -> str:
    """Return file and line of an import's error: the line that does not parse, or the last one in this folder that raised, else
    the last one in a library."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame for frame in frames if Path(frame.filename).is_relative_to(Path.cwd()) and LIBRARIES not in frame.filename
    ]
    last = (own or frames)[-1]
    return f"{last.filename}:{last.lineno}"


def name_of(target: object) -> str:
    """Return the MODULE:NAME under which another process finds an object; "" if there is none, as in a script or inside a
    function."""
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == MAIN:
        return ""
    found: object = sys.modules.get(module)
    if getattr(getattr(found, "__spec__", None), "name", None) != module:  # made in this process
        return ""
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is target else ""
