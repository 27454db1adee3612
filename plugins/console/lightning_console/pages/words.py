"""Helpers of the pages: format numbers, times and shares, make links, and find the run of an address."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning.cli.output import local_time
from lightning.errors import DataError
from lightning.store.url import parse
from lightning.types import Json, StepRecord

from lightning_console.blocks import Block, Link, Notice, Notices, Tone
from lightning_console.places import SERVER, Located, Places
from lightning_console.queries.conversation import one_line
from lightning_console.queries.runs import said_seconds
from lightning_console.router import Address

NONE = "–"
"""The text that pages show for a missing value."""


async def located(places: Places, address: Address) -> Located:
    """Find the run that an address names. Raises `DataError` if it names none, `ConfigError` if the run is unknown."""
    if not address.about or not address.about[0]:
        raise DataError(f"the address {str(address)!r} names no run: {address.page}/RUN")
    return await places.find(address.about[0])


def name_of(run: str, url: str, several: bool) -> str:
    """Return a run's name on pages: its id, followed by the folder of its store if `several` stores have that id."""
    if not several:
        return run
    return f"{run} in {Path(parse(url).path).parent.name if url.startswith('sqlite:') else url}"


def to(page: str, *about: str | int, **options: str | int) -> str:
    """Return the text of the address of a page."""
    return str(Address(page, tuple(map(str, about)), {name: str(value) for name, value in options.items()}))


def inside(found: Located, name: str) -> str:
    """Return the id of a group or a rollout without the prefix of its run."""
    return name.removeprefix(f"{found.run.id}/")


def rollout_link(found: Located, rollout: str) -> Link:
    """Return a link to a rollout of a run."""
    return Link(inside(found, rollout), to("rollout", found.key, rollout))


def place_of(found: Located) -> str:
    """Return a run's store for the option `--runs` of a command: its quoted URL, or `PLACE` for a server's own store, whose
    URL only its owner knows."""
    return "PLACE" if found.url == SERVER else shlex.quote(found.url)


def trail(found: Located, *more: Link) -> tuple[Link, ...]:
    """Return the links to the pages above a page of a run, then the links `more`."""
    return (Link("Runs", "runs"), Link(found.run.id, to("run", found.key)), *more)


def step_links(found: Located, record: StepRecord | None) -> list[Link]:
    """Return a link to the step that used a group or a rollout; none without a record."""
    return [] if record is None else [Link(f"step {record.step}", to("step", found.key, record.step))]


def cannot_read(unreadable: Mapping[str, str]) -> list[Block]:
    """Return notices about the stores that cannot be read, with the reasons."""
    notices = [Notice(f"{url} cannot be read", "bad", why) for url, why in unreadable.items()]
    return [Notices(notices)] if notices else []


def number(value: float | None, digits: int = 3) -> str:
    """Format a reward, a share or a metric with `digits` decimals."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return str(value)
    if value and abs(value) < 0.5 * 10**-digits:
        return f"{value:.1e}"
    return f"{value:.{digits}f}"


def mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def tone_of(value: float | None) -> Tone:
    """Return the colour of a number: good above 0, bad below, none for 0 or None."""
    return "" if not value else "good" if value > 0 else "bad"


def share(value: float | None) -> str:
    """Format a share as a percentage."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{100 * value:.1f} %" if abs(value) < 0.1 else f"{100 * value:.0f} %"


def count(value: float | None) -> str:
    """Format a count with spaces between thousands."""
    return NONE if value is None else f"{value:,.0f}".replace(",", " ")


def seconds(value: float | None) -> str:
    """Format a duration in seconds."""
    return NONE if value is None else said_seconds(value)


def when(at: float | None) -> str:
    """Format a Unix time in the time zone of the machine that shows it."""
    return NONE if not at else local_time(at)


def change(before: float | None, after: float | None) -> str:
    """Format two numbers as "before → after"; only the first if there is no second."""
    return number(before) if after is None else f"{number(before)} → {number(after)}"


def written(value: Json, longest: int = 160) -> str:
    """Format a value as one line: a text as it is, anything else as JSON."""
    return one_line(value, longest)


def page_links(address: Address, total: int, each: int) -> list[Link]:
    """Return links to the pages of a long table with `each` rows a page; none if there is only one page."""
    firsts = range(0, total, each) if total > each else ()
    return [
        Link(f"{first + 1}–{min(first + each, total)}", str(address.having(cursor=first or None))) for first in firsts
    ]
