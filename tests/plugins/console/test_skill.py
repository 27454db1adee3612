"""What a coding agent is taught: every command of it is one that there is, with options that it has."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import lightning_console
import pytest
import typer.main
from lightning.cli.app import build
from lightning_console.command import console

SKILL = Path(lightning_console.__file__).parent / "SKILL.md"
LINES = re.findall(r"^\$ lightning (.+)$", SKILL.read_text(), re.MULTILINE)


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_of_the_skill_is_taken(line: str) -> None:
    name, *words = shlex.split(line)
    command = typer.main.get_command(build(name)).commands[name]  # type: ignore[attr-defined]
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    if words != ["--help"]:
        command.make_context(name, words, resilient_parsing=False)


def test_the_skill_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    console(skill=True)
    printed = capsys.readouterr().out
    assert printed == SKILL.read_text()
    assert printed.startswith("---\nname: ")
    assert len(LINES) > 10
