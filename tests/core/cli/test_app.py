"""The command line as a whole."""

from __future__ import annotations

import subprocess
import sys

import pytest
from lightning.cli import app
from lightning.errors import ConfigError


def test_version(lightning) -> None:
    from lightning import __version__

    ran = lightning("--version")
    assert (ran.code, ran.out) == (0, f"lightning {__version__}\n")


@pytest.mark.parametrize("name", sorted(app.COMMANDS))
def test_every_command_has_help(lightning, name: str) -> None:
    ran = lightning(name, "--help")
    assert ran.code == 0
    assert f"Usage: lightning {name}" in ran.out


def test_an_unknown_command_is_a_usage_error_with_a_suggestion(lightning) -> None:
    ran = lightning("docter")
    assert ran.code == 2
    assert "doctor" in ran.err


@pytest.fixture
def failing(install, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from lightning.errors import ConfigError\ndef failing():\n    raise ConfigError('the [thing] is wrong: do this')"
    install("failing", modules={"failing_command": source})
    monkeypatch.setattr(app, "COMMANDS", {"failing": app.Command("failing_command", "Fails.")})


@pytest.mark.usefixtures("failing")
def test_an_error_is_one_line_and_exit_code_2(lightning) -> None:
    ran = lightning("failing")
    assert (ran.code, ran.out, ran.err) == (2, "", "error: the [thing] is wrong: do this\n")


@pytest.mark.usefixtures("failing")
@pytest.mark.parametrize("arguments", [("--debug", "failing"), ("failing", "--debug")])
def test_debug_shows_the_traceback(lightning, arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        lightning(*arguments)


def test_help_imports_none_of_the_commands() -> None:
    code = (
        "import sys\nfrom lightning.cli.app import build\nbuild()\n"
        "print(sorted({'torch', 'numpy', 'aiohttp', 'pydantic', 'starlette', 'lightning.trainer'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_a_module_is_a_command_too() -> None:
    ran = subprocess.run([sys.executable, "-m", "lightning", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("lightning 0.")
