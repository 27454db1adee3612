"""The output of commands: tables and colours for people, JSON for programs.

The invariant: with `--json` standard output holds one JSON document and nothing else; other messages go to standard error.
Everything for people goes to a `Terminal`, which texts of others cannot steer.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated

import orjson
import typer

from lightning.errors import ConfigError

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
"""The `--json` option of every command that lists something."""
SettingsFile = Annotated[Path | None, typer.Option(help="A TOML file of settings.")]
"""The `--config` option of every command that has settings."""
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting.")]
"""The `--set` option of every command that has settings."""
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
"""Seconds of each unit of a duration."""
_BEYOND_ASCII = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}
"""Control characters that JSON allows unescaped in strings, with their escapes."""


def print_json(value: object) -> None:
    """Print plain values and dataclasses as indented JSON. Numbers that JSON does not have (NaN, infinity) become null; control
    characters are escaped."""
    try:
        text = orjson.dumps(value, default=_plain, option=orjson.OPT_INDENT_2).decode()
    except TypeError:  # a lone surrogate, or an integer of more than 64 bits, which tasks may hold
        text = json.dumps(plain_json(value), default=lambda item: plain_json(_plain(item)), indent=2)
    sys.stdout.write(text.translate(_BEYOND_ASCII) + "\n")


def plain_json(value: object) -> object:
    """A value as the standard library writes it where orjson refuses: a number that JSON does not have is null here, too."""
    if isinstance(value, array):
        return plain_json(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item) for item in value]
    return value


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    """Print a table; cells may hold rich's markup. The caller formats numbers."""
    from rich.table import Table

    from lightning.terminal import Terminal

    table = Table(*columns, title=title or None, box=None, pad_edge=False, title_justify="left", header_style="bold")
    for row in rows:
        table.add_row(*row)
    Terminal().print(table)


def say(text: str) -> None:
    """Print a line on standard output; it may hold rich's markup."""
    from lightning.terminal import Terminal

    Terminal(highlight=False, soft_wrap=True).print(text)


def fail(text: str) -> None:
    """Print an error, in red, on standard error."""
    from rich.text import Text

    from lightning.terminal import Terminal

    Terminal(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), (text, "red")))


def warn(text: str) -> None:
    """Print a warning, in yellow, on standard error."""
    from rich.text import Text

    from lightning.terminal import Terminal

    Terminal(stderr=True, soft_wrap=True).print(Text.assemble(("warning: ", "bold yellow"), (text, "yellow")))


@contextmanager
def stoppable(how_to_go_on: str) -> Iterator[None]:
    """Turn Ctrl-C into one line that says how to go on, and exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        fail(f"stopped; nothing that was recorded is lost. Go on with: {how_to_go_on}")
        raise typer.Exit(130) from None


def escape(text: str) -> str:
    """Return text in which rich's markup is escaped, so that brackets are printed."""
    from rich.markup import escape as escape_markup

    return escape_markup(text)


def local_time(at: float | None) -> str:
    """Format a time for people, in their time zone; `-` for None, and for a time that no calendar has."""
    try:
        return "-" if at is None else f"{datetime.fromtimestamp(at).astimezone():%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):
        return "-"


def seconds_of(text: str, what: str) -> float:
    """Return a duration such as `90d`, `12h` or `30m` in seconds. For any other text raises `ConfigError`, which says that the
    text is no `what`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if found is None:
        raise ConfigError(f"{text!r} is no {what}: write a number and one of {', '.join(UNITS)}, for example 90d")
    return float(found[1]) * UNITS[found[2]]


def timestamp() -> str:
    """Return the present local time, as part of a folder's name."""
    return f"{datetime.now().astimezone():%Y%m%d-%H%M%S}"


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)
