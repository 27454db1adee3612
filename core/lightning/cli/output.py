"""What commands share: their output (tables and colours for people, JSON for programs), and the run, the stores and the agent
that a command line names.

The invariant: with `--json` standard output holds one JSON document and nothing else; other messages go to standard error.
Everything for people goes to a `Terminal`, which texts of others cannot steer. One store that cannot be read does not hide the
others. No module of training is imported here, since a client needs this module on many machines.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import shlex
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar, cast

import orjson
import typer

from lightning.cli.core_commands import COMMANDS
from lightning.errors import ConfigError, LightningError
from lightning.plugins import plugins
from lightning.plugins.named import import_named as import_named  # for plugins
from lightning.plugins.named import name_of as name_of  # for plugins
from lightning.safe_text import plain_json
from lightning.store.places import DATABASE, run_id_of, store_in
from lightning.store.protocol import Store
from lightning.store.url import redacted, sqlite_url

if TYPE_CHECKING:
    from rich.text import Text

    from lightning.runner.protocol import Agent

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
"""The `--json` option of every command that lists something."""
SettingsFile = Annotated[Path | None, typer.Option(help="A TOML file of settings.")]
"""The `--config` option of every command that has settings."""
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting.")]
"""The `--set` option of every command that has settings."""
LocalRunner = Annotated[
    str,
    typer.Option(
        "--runner",
        help="Where agents run: each in a process of its own (process), in this one (inline), or by a plugin's runner.",
    ),
]
"""The `--runner` option of commands whose agents run on this machine."""
GAP = 2
"""Spaces between two columns of a table."""
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


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    """Print a table; cells may hold rich's markup. The caller formats numbers.

    A word, such as an id, is never cut or broken, so that it can be copied. In a terminal, cells are wrapped between words to
    its width; in a pipe each row is one line.
    """
    from lightning.terminal import Terminal

    if title:
        say(title)
    if Terminal().is_terminal:
        _print_wrapped(columns, list(rows))
    else:
        _print_lines([[f"[bold]{name}[/bold]" for name in columns], *rows])


def _print_wrapped(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in which cells are wrapped to the terminal's width."""
    from rich.table import Table

    from lightning.terminal import Terminal

    terminal = Terminal()
    texts = [[terminal.render_str(cell) for cell in column] for column in zip(columns, *rows, strict=True)]
    widths = [max(text.__rich_measure__(terminal, terminal.options).maximum for text in column) for column in texts]
    least = [max(_longest_word(text) for text in column) for column in texts]
    widths = _narrowed(widths, least, terminal.width - GAP * (len(widths) - 1))
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    for name, width in zip(columns, widths, strict=True):
        table.add_column(name, width=width, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Terminal(width=max(sum(widths) + GAP * len(widths), terminal.width)).print(table, crop=False)


def _print_lines(rows: Sequence[Sequence[str]]) -> None:
    """Print each row in one line, in columns."""
    from rich.text import Text

    from lightning.terminal import Terminal

    terminal = Terminal(soft_wrap=True)
    texts = [[terminal.render_str(" ".join(cell.split("\n"))) for cell in row] for row in rows]
    widths = [max(text.cell_len for text in column) for column in zip(*texts, strict=True)]
    for row in texts:
        for text, width in zip(row, widths, strict=True):
            text.pad_right(width - text.cell_len)
        line = Text(" " * GAP).join(row)
        line.rstrip()
        terminal.print(line, highlight=False)


def _longest_word(text: Text) -> int:
    """Return the cells that the longest word of a text takes."""
    from rich.cells import cell_len

    return max(map(cell_len, text.plain.split()), default=0)


def _narrowed(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Narrow the widest columns until all fit into `room`, none below its `least` width."""
    narrowed = list(widths)
    while sum(narrowed) > room:
        wide = [place for place, width in enumerate(narrowed) if width > least[place]]
        if not wide:
            break
        narrowed[max(wide, key=lambda place: narrowed[place])] -= 1
    return narrowed


def next_steps(*steps: tuple[str, Sequence[object]]) -> None:
    """Print the commands that are useful next, on standard error: standard output stays what the command was asked for.

    Each step is its purpose, such as `see each rollout`, and the words after `lightning`, which are quoted for a shell.
    Commands of plugins that are not installed are left out, and so are those with a password, which are not printed.
    """
    from rich.text import Text

    from lightning.terminal import Terminal

    shown = [step for step in steps if step[1] and all(redacted(str(word)) == str(word) for word in step[1])]
    known = {*COMMANDS, *plugins().names("commands")} if shown else set()
    lead = "Next: "
    for purpose, words in shown:
        if str(words[0]) in known:
            command = (shlex.join(["lightning", *map(str, words)]), "bold")
            Terminal(stderr=True, soft_wrap=True).print(Text.assemble(lead, purpose, ": ", command), highlight=False)
            lead = " " * len(lead)


def run_words(run: str, runs: Path) -> list[str]:
    """Return the words of a command line that name a run as the user did: its folder, or its id and `--runs`."""
    return [run] if store_in(Path(run)) or runs == Path("runs") else [run, "--runs", str(runs)]


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
def stoppable(how_to_go_on: str | Callable[[], str]) -> Iterator[None]:
    """Turn Ctrl-C into one line that says how to go on, and exit code 130. A function is asked when that happens."""
    try:
        yield
    except KeyboardInterrupt:
        how = how_to_go_on if isinstance(how_to_go_on, str) else how_to_go_on()
        fail(f"stopped; nothing that was recorded is lost. Go on with: {how}")
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


T = TypeVar("T")


def locate(run: str, runs: Path) -> tuple[str, str]:
    """Return the URL of a run's store, and the run's id. Raises `ConfigError` naming the folders that were searched."""
    for folder in (Path(run), runs / run):
        if url := store_in(folder):
            return url, run_id_of(folder)
    command = shlex.join(["lightning", "runs", *([] if runs == Path("runs") else ["--runs", str(runs)])])
    raise ConfigError(
        f"no run {run!r}: neither {run} nor {runs / run} has a {DATABASE}, or a run.json that names a store. "
        f"`{command}` lists what there is"
    )


async def with_store(url: str, use: Callable[[Store], Awaitable[T]], *, make: bool = False) -> T:
    """Open a store, call `use` with it, and close it. Unless `make` is set, raises `ConfigError` or `SchemaError` when opening
    would create a store."""
    async with plugins().opened_store(url, make=make) as store:
        return await use(store)


def databases(where: str) -> list[str]:
    """Return the URLs of the stores at a place. Raises `ConfigError` if the place is neither a URL, a file nor a folder; the
    folder `runs` may be missing."""
    if "://" in where:
        return [where]
    path = Path(where)
    if path.is_file():
        return [sqlite_url(path)]
    if not path.is_dir():
        if where == "runs":
            return []
        raise ConfigError(
            f"{redacted(where)} is neither a folder nor a database: give a folder of runs, or a run's folder"
        )
    folders = [path, *sorted(file.parent for file in path.glob("*/*") if file.name in (DATABASE, "run.json"))]
    return list(dict.fromkeys(url for folder in folders if (url := store_in(folder))))


def answers(
    where: str, ask: Callable[[str, Store], Awaitable[T]], *, all_of_them: bool = False
) -> Iterator[tuple[str, T]]:
    """Yield the URL of each store at a place, and what `ask` returns for it. A store that cannot be read is named on standard
    error and left out. If none can be read, the last error is raised; with `all_of_them` the first error is raised."""
    urls, readable = databases(where), False
    for count, url in enumerate(urls, 1):
        try:
            found = asyncio.run(with_store(url, partial(ask, url)))
        except LightningError as error:
            if all_of_them or (count == len(urls) and not readable):
                raise
            fail(f"{redacted(url)}: {error}")
        else:
            readable = True
            yield url, found


def load_agent(name: str) -> Agent:
    """Import an agent from `MODULE:FUNCTION`, with the current folder importable, or make what a plugin knows by `NAME:TEXT`.

    Raises `ConfigError` naming what is missing, or a name that means both.
    """
    first, _, rest = name.partition(":")
    if rest and first in plugins().names("agents"):
        if rest.isidentifier() and Path(f"{first}.py").exists():
            raise ConfigError(
                f"{name!r} is a function of your {first}.py and also what the plugin for {first}: would run. Rename the "
                f"module, or write '{first}: {rest}' for the latter"
            )
        return cast("Callable[[str], Agent]", plugins().get("agents", first))(rest)
    target = import_named(name, "agent")
    if not callable(target):
        raise ConfigError(f"{name!r} is a {type(target).__name__}, not something that can be called with (task, llm)")
    return target
