"""The tool limits of a runner's agents (`runner.tool_limits`): where they stand around attempts, slots made ready, and what is
said of limits that bound nothing.

The invariant: the slots are files of this user's in the machine's folder for temporary files, so that everything that runs
here shares them: runs, clients, actors. They stay, since a file that is made anew would be another slot.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning.config.fields import did_you_mean
from lightning.errors import RunnerError
from lightning.runner.stages import AttemptStage
from lightning.types import Json, Outcome

from lightning_sandbox.tool_slots import ToolLimits, limit_tools, unheld

if TYPE_CHECKING:
    from lightning.config import RunnerConfig

logger = logging.getLogger(__name__)

TOOL_LIMITS: Final = "tool_limits"
"""The name of the stage."""
ENOUGH = 64
"""Rollouts after which a tool that has not run is named: a wrong name should not bound nothing until the end of a long run."""


def make_slots(runs: Mapping[str, int]) -> ToolLimits:
    """The slots of these tools, made where they are missing. Raises `RunnerError` when somebody else has the folder."""
    folder = Path(tempfile.gettempdir(), f"lightning-tools-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise RunnerError(
            f"runner.tool_limits needs the folder {folder}, which belongs to somebody else: set TMPDIR to a folder of yours"
        )
    limits = ToolLimits(str(folder), dict(runs))
    for tool in runs:
        for file in limits.files(tool):
            file.touch(mode=0o600)
    return limits


class LimitStage(AttemptStage):
    """The runs of tools with a limit wait for their turn. Limits that bound nothing are named: at once where a tool runs past
    its limit; where a tool does not run, when `ENOUGH` rollouts or all have ended."""

    api = 1
    carries_out = ("tool_limits",)

    def __init__(self, runs: Mapping[str, int]) -> None:
        self._runs = dict(runs)
        self._rollouts = 0
        self._ran: set[str] = set()
        self._told: set[str] = set()

    async def begun(self) -> None:
        """The slots are made. Raises `RunnerError` when somebody else has their folder."""
        self._limits = make_slots(self._runs)
        self.files = (self._limits.folder,)

    def installed(self) -> Callable[[], None]:
        """From now on they wait."""
        return limit_tools(self._limits)

    def noted(self, outcome: Outcome) -> Json:
        """The tools that ran past their limits, if any."""
        return list(unheld(outcome.tool_events)) or None

    def heard(self, outcome: Outcome, note: Json) -> None:
        """Limits that bound nothing are named."""
        self._rollouts += 1
        self._ran.update(event.name for event in outcome.tool_events)
        past = {str(name) for name in note} if isinstance(note, list) else set()
        for name in sorted((self._runs.keys() & past) - self._told):
            self._told.add(name)
            logger.warning(
                "runner.tool_limits has %r, and that tool ran without waiting for its turn: its framework runs it past "
                "lightning. Put @lightning.tool(name=%r) on its function, or take the limit out",
                name,
                name,
            )
        if self._rollouts == ENOUGH:
            self._name_missing()

    def closed(self) -> None:
        """No more rollouts come."""
        if self._rollouts:
            self._name_missing()

    def _name_missing(self) -> None:
        for name in sorted(self._runs.keys() - self._ran - self._told):
            self._told.add(name)
            logger.warning(
                "runner.tool_limits has %r, and no tool of that name ran in %d rollouts (there ran: %s%s)",
                name,
                self._rollouts,
                ", ".join(sorted(self._ran)) or "none",
                did_you_mean(name, self._ran),
            )


def limits_for(config: RunnerConfig) -> LimitStage | None:
    """The stage of a runner with these settings."""
    return LimitStage(config.tool_limits) if config.tool_limits else None
