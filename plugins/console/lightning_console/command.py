"""`lightning console`: show runs on a web page, export the pages into a folder, or serve them to a coding agent as tools."""

from __future__ import annotations

import asyncio
import contextlib
import html
import tempfile
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from lightning.asyncio_utils import run_to_end
from lightning.cli.output import databases, escape, locate, print_json, say
from lightning.errors import ConfigError, DataError, MissingExtraError
from lightning.store.places import run_id_of, store_in
from lightning.store.url import redacted

from lightning_console.places import WAITS, Places
from lightning_console.router import Address

SKILL = Path(__file__).parent / "SKILL.md"
PATIENCE = "patience=5"
"""The option added to a server's URL without one: a page waits this many seconds for a server that does not answer."""


@dataclass(frozen=True, slots=True)
class Target:
    """The place that a command line names (a folder, a store's or a server's URL), and the address of the first page."""

    where: str
    start: str


def console(
    place: Annotated[
        str,
        typer.Argument(
            metavar="[RUN|FOLDER|STORE-URL|SERVER-URL]",
            help="A run, a folder of runs, a store's URL, or a server's (with a token in LIGHTNING_TOKEN).",
        ),
    ] = "runs",
    port: Annotated[int, typer.Option(help="The port on this machine; 0 takes a free one.", min=0, max=65535)] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")] = True,
    page: Annotated[
        str, typer.Option(metavar="ADDRESS", help="The first page: an address, such as run/RUN or step/RUN/3.")
    ] = "",
    export: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the pages into a folder that opens without a server, and stop."),
    ] = None,
    limit: Annotated[int, typer.Option(help="With --export: maximum number of rollouts.", min=1)] = 100,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the page of --page (default: the first one) as JSON, and stop.")
    ] = False,
    mcp: Annotated[
        bool, typer.Option("--mcp", help="Answer a coding agent on standard input and output, as an MCP server.")
    ] = False,
    skill: Annotated[
        bool, typer.Option("--skill", help="Print what a coding agent should know about lightning (SKILL.md).")
    ] = False,
    seconds: Annotated[float | None, typer.Option(help="Stop after this many seconds; default: at Ctrl-C.")] = None,
) -> None:
    """Open a page on which you see your agent learn, and why: runs, steps, groups, rollouts and single tokens."""
    if skill:
        typer.echo(SKILL.read_text(encoding="utf-8"), nl=False)
        return
    if sum((mcp, as_json, export is not None)) > 1:
        raise ConfigError("give --json, --mcp or --export DIR: one of the three")
    target = find(place, page)
    if export is not None:
        from lightning_console.export import export_pages

        written = asyncio.run(export_pages(target.where, target.start, export, rollouts=limit))
        say(f"{escape(str(written.index))} opens in a browser: {escape(written.said)}")
    elif as_json:
        print_json(asyncio.run(_answer(target)))
    elif mcp:
        from lightning_console.answers import serve_stdio

        asyncio.run(serve_stdio(target.where))
    else:
        with contextlib.suppress(KeyboardInterrupt):
            run_to_end(_serve(target, port, browser, seconds))


async def _answer(target: Target) -> dict[str, object]:
    """Return the page of a target as JSON. Raises `DataError` if it cannot be shown."""
    from lightning_console.answers import answer

    places = Places(target.where)
    try:
        found = await answer(places, target.start)
    finally:
        await places.close()
    if "error" in found:
        raise DataError(str(found["error"]))
    return found


def find(place: str, page: str = "") -> Target:
    """Find the target of a command line. An empty `page` means the place's own page: that of its run, or the list of runs.
    Raises `ConfigError` for a place that does not exist, `DataError` for an address that is not valid."""
    if page:
        Address.parse(page)
    if "://" in place:
        is_server = place.partition("://")[0] in ("http", "https")
        return Target(_patient(place) if is_server else place, page or "runs")
    path = Path(place)
    if store_in(path):
        return Target(place, page or str(Address("run", (run_id_of(path),))))
    if not path.exists() and place != "runs":
        with contextlib.suppress(ConfigError):
            locate(place, Path("runs"))
            return find(str(Path("runs") / place), page)
    databases(place)  # says what is wrong
    return Target(place, page or "runs")


def _patient(url: str) -> str:
    if "patience=" in url:
        return url
    return f"{url}{'&' if '?' in url else '?'}{PATIENCE}"


async def _serve(target: Target, port: int, browser: bool, seconds: float | None) -> None:
    from lightning_console.web.consoles import local_console

    places = Places(target.where, patience=WAITS)
    await places.stores()
    for url, why in places.unreadable.items():
        if len(places.unreadable) == len(databases(target.where)):
            await places.close()
            raise ConfigError(f"{url}: {why}")
        say(f"{escape(url)} is left out: {escape(why)}")
    async with local_console(places, port=port, start=target.start) as running:
        try:
            await asyncio.shield(running.ready)
        except ModuleNotFoundError as error:
            raise MissingExtraError("console", str(error.name)) from error
        say(f"{escape(redacted(target.where))} is shown at {running.url} (Ctrl-C ends it)")
        with leading_to(running.once) as file:
            if browser:
                await asyncio.to_thread(webbrowser.open, file.as_uri())
            await (asyncio.Event().wait() if seconds is None else asyncio.sleep(seconds))


@contextmanager
def leading_to(url: str) -> Iterator[Path]:
    """Make a temporary page that only this user can read and that redirects to `url`. The browser is started with the file's
    name, because other users can read a command line, and `url` has a token."""
    with tempfile.TemporaryDirectory(prefix="lightning-console-") as folder:
        file = Path(folder, "open.html")
        file.touch(0o600)
        file.write_text(
            f'<meta http-equiv="refresh" content="0; url={html.escape(url, quote=True)}">', encoding="utf-8"
        )
        yield file
