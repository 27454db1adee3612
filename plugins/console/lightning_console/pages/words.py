"""How pages say numbers, times and shares, and which run an address means."""

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
"""What stands for no value."""


async def located(places: Places, address: Address) -> Located:
    """The run that an address is about. Raises `DataError` for an address without one, `ConfigError` for an unknown one."""
    if not address.about or not address.about[0]:
        raise DataError(f"the address {str(address)!r} names no run: {address.page}/RUN")
    return await places.find(address.about[0])


def name_of(run: str, url: str, several: bool) -> str:
    """What a run is called: its id, and where `several` have it, the folder of its store as well."""
    if not several:
        return run
    return f"{run} in {Path(parse(url).path).parent.name if url.startswith('sqlite:') else url}"


def to(page: str, *about: str | int, **options: str | int) -> str:
    """The text of an address."""
    return str(Address(page, tuple(map(str, about)), {name: str(value) for name, value in options.items()}))


def inside(found: Located, name: str) -> str:
    """The id of a group or a rollout without that of its run."""
    return name.removeprefix(f"{found.run.id}/")


def rollout_link(found: Located, rollout: str) -> Link:
    """Opens a rollout of a run."""
    return Link(inside(found, rollout), to("rollout", found.key, rollout))


def place_of(found: Located) -> str:
    """Where a run is, as a command's option says it; of a server's own store only its owner knows that."""
    return "PLACE" if found.url == SERVER else shlex.quote(found.url)


def trail(found: Located, *more: Link) -> tuple[Link, ...]:
    """The pages above one of a run."""
    return (Link("Runs", "runs"), Link(found.run.id, to("run", found.key)), *more)


def step_links(found: Located, record: StepRecord | None) -> list[Link]:
    """Opens the step that looked at a group or a rollout; nothing where none has."""
    return [] if record is None else [Link(f"step {record.step}", to("step", found.key, record.step))]


def cannot_read(unreadable: Mapping[str, str]) -> list[Block]:
    """Which stores cannot be read, and why."""
    notices = [Notice(f"{url} cannot be read", "bad", why) for url, why in unreadable.items()]
    return [Notices(notices)] if notices else []


def number(value: float | None, digits: int = 3) -> str:
    """A reward, a share or a metric."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return str(value)
    if value and abs(value) < 0.5 * 10**-digits:
        return f"{value:.1e}"
    return f"{value:.{digits}f}"


def mean_of(values: Sequence[float | None]) -> float | None:
    """The mean of those that are known."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def tone_of(value: float | None) -> Tone:
    """Whether a number is above or below 0."""
    return "" if not value else "good" if value > 0 else "bad"


def share(value: float | None) -> str:
    """A share as a percentage."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{100 * value:.1f} %" if abs(value) < 0.1 else f"{100 * value:.0f} %"


def count(value: float | None) -> str:
    """A number of things, with its thousands apart."""
    return NONE if value is None else f"{value:,.0f}".replace(",", " ")


def seconds(value: float | None) -> str:
    """A duration."""
    return NONE if value is None else said_seconds(value)


def when(at: float | None) -> str:
    """A moment, by the clock of the machine that shows it."""
    return NONE if not at else local_time(at)


def change(before: float | None, after: float | None) -> str:
    """Two numbers, the earlier first."""
    return number(before) if after is None else f"{number(before)} → {number(after)}"


def written(value: Json, longest: int = 160) -> str:
    """A value as a text of one line: a text as it is, anything else as JSON."""
    return one_line(value, longest)


def page_links(address: Address, total: int, each: int) -> list[Link]:
    """Links to the pages of a long table, each with so many rows; none where there is one page."""
    firsts = range(0, total, each) if total > each else ()
    return [
        Link(f"{first + 1}–{min(first + each, total)}", str(address.having(cursor=first or None))) for first in firsts
    ]
