"""What a coding agent is taught: every command of it is one that there is, with options that it has."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import lightning_console
import pytest
import typer.main
from lightning.cli.app import build
from lightning_console.command import console

SKILL = Path(lightning_console.__file__).parent / "SKILL.md"
LINES = re.findall(r"^\$ lightning (.+)$", SKILL.read_text(), re.MULTILINE)


LISTINGS = (
    "runs", "runs show", "resources ls", "resources show", "resources diff", "token ls", "db status", "db prune", "adapters",
    "doctor", "audit", "advise", "profile", "reward try", "eval", "ab", "plan", "console",
)  # fmt: skip
"""Commands that list or report something."""


def command_of(words: list[str]) -> Any:
    """The command that the first of the words name; these are taken away."""
    command: Any = typer.main.get_command(build(words[0]))
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    return command


@pytest.mark.parametrize("listing", LISTINGS)
def test_every_listing_is_printed_as_json_for_a_program(listing: str) -> None:
    options = {option for parameter in command_of(listing.split()).params for option in parameter.opts}
    assert "--json" in options


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_of_the_skill_is_taken(line: str) -> None:
    words = shlex.split(line)
    name, command = words[0], command_of(words)
    if words != ["--help"]:
        command.make_context(name, words, resilient_parsing=False)


def test_the_skill_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    console(skill=True)
    printed = capsys.readouterr().out
    assert printed == SKILL.read_text()
    assert printed.startswith("---\nname: ")
    assert len(LINES) > 10
