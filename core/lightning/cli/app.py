"""The `lightning` command: a table of commands, of which only the typed one is imported. Plugins add more commands.

The invariant: `lightning --help` is quick whatever the commands need, and an error that lightning raises on purpose is one
clear line and exit code 2, never a traceback.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, TypeAlias, cast

import typer

from lightning._version import __version__
from lightning.cli.core_commands import COMMANDS as COMMANDS  # for tests and the documentation
from lightning.cli.core_commands import CoreCommand as CoreCommand
from lightning.cli.output import fail
from lightning.errors import ConfigError, LightningError, PluginError
from lightning.plugins import plugins
from lightning.safe_text import PrintableFormatter

logger = logging.getLogger(__name__)

EXIT_ERROR = 2
"""Exit code of every error that lightning raises on purpose, and of wrong usage."""
LOG_LEVEL = "--log-level"
LEVELS = ("debug", "info", "warning", "error")


Command: TypeAlias = typer.Typer | Callable[..., None]
"""A command as typer runs it: a group of commands, or a function."""


def build(typed: str = "") -> typer.Typer:
    """Make the command line with every command in its help; of the commands, only the `typed` one can run."""
    app = typer.Typer(
        name="lightning",
        help="Make an agent that already exists better by reinforcement learning.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_global_options)
    for name, command in COMMANDS.items():
        module = importlib.import_module(command.module) if name == typed else None
        found: Command = _not_typed if module is None else getattr(module, "app", None) or getattr(module, name)
        _add(app, name, command.help, found)
    if typed not in COMMANDS:
        _add_from_plugins(app, typed)
    return app


def _add(app: typer.Typer, name: str, text: str, command: Command) -> None:
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name, help=text)
    else:
        app.command(name, help=text if command is _not_typed else None)(command)


def _add_from_plugins(app: typer.Typer, typed: str) -> None:
    """Add the commands of plugins. Called for the help and for a name that is no core command, since it looks for plugins."""
    known = plugins().names("commands")
    for name in known:
        if name in COMMANDS:
            logger.warning(
                "a plugin registers the command %r, which is lightning's own: the plugin's is left out", name
            )
            continue
        try:
            make = cast("Callable[[], Command]", plugins().get("commands", name))
        except PluginError as error:  # two plugins claim it: the help goes on without it
            if name == typed:
                raise
            logger.warning("the command %r is left out: %s", name, error)
            continue
        text = (make.__doc__ or "").strip().partition("\n")[0]
        _add(app, name, text, make() if name == typed else _not_typed)
    if typed and typed not in known and plugins().brought("commands", typed):
        plugins().get("commands", typed)  # raises: says which plugin brings it, and that it is broken or disabled


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Make torch's threads sleep while they wait (vllm_arguments.py in policy_server says why). torch reads this once, when it
    # is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    debug = "--debug" in given
    given = [argument for argument in given if argument != "--debug"]
    try:
        level, given = _log_level(given)
        _log(logging.DEBUG if debug else level.upper())
        typed = next((argument for argument in given if not argument.startswith("-")), "")
        build(typed)(args=given, prog_name="lightning")
    except LightningError as error:
        if debug:
            raise
        fail(str(error))
        sys.exit(EXIT_ERROR)


def _log(level: int | str) -> None:
    handler = logging.StreamHandler()
    # with the time zone, to compare logs of machines in several zones
    handler.setFormatter(
        PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S%z")
    )
    logging.basicConfig(level=level, handlers=[handler])


def _global_options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and stop.", is_eager=True, callback=lambda on: _version(on)),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error and all log messages; goes anywhere.")
    ] = False,
    log_level: Annotated[
        str, typer.Option(LOG_LEVEL, help=f"Log from this level on: {', '.join(LEVELS)}; goes anywhere.")
    ] = "warning",
) -> None:
    """Show the global options in the help. `main` takes `--debug` and `--log-level` out before any command sees them."""


def _log_level(given: Sequence[str]) -> tuple[str, list[str]]:
    """Return the requested level, and the arguments without it. Raises `ConfigError` for an unknown level."""
    level, rest = "warning", []
    arguments = iter(given)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name != LOG_LEVEL:
            rest.append(argument)
            continue
        level = value if equals else next(arguments, "")
        if level not in LEVELS:
            raise ConfigError(f"{LOG_LEVEL} {level!r}: there is no such level; give one of {', '.join(LEVELS)}")
    return level, rest


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lightning {__version__}")
        raise typer.Exit


def _not_typed() -> None:
    """Stand in the help for a command whose module was not imported."""


if __name__ == "__main__":
    main()
