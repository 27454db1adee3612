"""The table of the core's commands: the module of each, which is imported when the command is typed, and its line in the help.

The invariant: nothing is imported here but this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class CoreCommand:
    """A command of the core: its module and its line in the help. The module has a function of the command's name, or a group
    `app`."""

    module: str
    help: str


COMMANDS: Mapping[str, CoreCommand] = MappingProxyType(
    {
        "demo": CoreCommand("lightning.cli.demo", "Train a real agent on this machine, in minutes."),
        "train": CoreCommand("lightning.cli.train", "Train the model behind your agent."),
        "runs": CoreCommand("lightning.cli.runs", "List runs, or show one."),
        "adapters": CoreCommand(
            "lightning.cli.adapters", "List the agent frameworks that can be trained on this machine."
        ),
        "doctor": CoreCommand(
            "lightning.cli.doctor", "Show what is installed, what is missing, and the command that installs it."
        ),
    }
)
