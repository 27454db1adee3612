"""Helpers of the pages: format numbers, times and shares, make links, and find the run of an address."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from lightning.cli.output import local_time
from lightning.errors import DataError
from lightning.safe_text import counted as with_noun
from lightning.store.url import parse
from lightning.types import Json, Rollout, Status, StepRecord
from lightning_branching.recorded import is_void

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


def in_short(notices: Sequence[Notice]) -> list[Block]:
    """Return the block at the top of a page with the answers that people come for; none without a notice."""
    return [Notices(notices, title="In short")] if notices else []


def number(value: float | None, digits: int = 3) -> str:
    """Format a reward, a share or a metric with `digits` decimals."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return str(value)
    if value and abs(value) < 0.5 * 10**-digits:
        return f"{value:.1e}"
    return f"{value:.{digits}f}"


def plus_or_minus(half: float | None) -> str:
    """Format half the width of an interval."""
    return "interval unknown" if half is None else f"±{number(half)}"


def part_text(name: str, value: float) -> str:
    """Say a named part of a reward; of the part `correct`, whether the answer was right or wrong."""
    said = f"{name} {number(value)}"
    right = {0.0: "answer wrong", 1.0: "answer right"}.get(value, "") if name == "correct" else ""
    return f"{right} ({said})" if right else said


def mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def tone_of(value: float | None) -> Tone:
    """Return the colour of a difference or an advantage: up above 0, down below, none for 0 or None."""
    return "" if not value else "up" if value > 0 else "down"


def share(value: float | None) -> str:
    """Format a share as a percentage."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{100 * value:.1f} %" if abs(value) < 0.1 else f"{100 * value:.0f} %"


def count(value: float | None) -> str:
    """Format a count with spaces between thousands."""
    return NONE if value is None else f"{value:,.0f}".replace(",", " ")


def counted(value: float | None, one: str, several: str = "") -> str:
    """Format a count with its noun, such as `1 step` and `2 steps`; several of them if it is unknown."""
    return with_noun(2 if value is None else value, one, several, shown=count(value))


def seconds(value: float | None) -> str:
    """Format a duration in seconds."""
    return NONE if value is None else said_seconds(value)


def when(at: float | None) -> str:
    """Format a Unix time in the time zone of the machine that shows it."""
    return NONE if not at else local_time(at)


def change(before: float | None, after: float | None) -> str:
    """Format two numbers as "before → after"; only the first if there is no second."""
    return number(before) if after is None else f"{number(before)} → {number(after)}"


UNSEEN: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters, and those that turn the text around them to another direction."""


def task_text(value: Json) -> str:
    """Return a task's input as one line that people read: a text as it is, messages as their texts, an object as
    `name: value; name: value`. Characters that nobody sees become their codes."""
    return UNSEEN.sub(lambda found: f"⟨{ord(found[0]):x}⟩", " ".join(_flat(value).split()))


def _flat(value: Json) -> str:
    match value:
        case str():
            return value
        case {"role": _, "content": content}:
            return _flat(content)
        case dict() if len(value) == 1:
            return _flat(next(iter(value.values())))
        case dict():
            return "; ".join(f"{name}: {_flat(item)}" for name, item in value.items())
        case list() | tuple():
            return "; ".join(map(_flat, value))
        case _:
            return written(value)


LONGEST_TITLE: Final = 240
"""Most characters of a task's text as the title of a page."""


def title_of(rollout: Rollout) -> str:
    """Return the text of a rollout's task as a title; the task's id if the text is empty."""
    return one_line(task_text(rollout.task.input), LONGEST_TITLE) or rollout.task.id


def ending_of(rollout: Rollout) -> tuple[str, Tone]:
    """Return in words, with their colour, how a rollout ended. An end without an error has no colour: how good the rollout was,
    only its reward says."""
    if is_void(rollout):
        return "void", "bad"
    if rollout.status is Status.FAILED:
        return f"failed ({rollout.fault})" if rollout.fault else "failed", "bad"
    return ("no error" if rollout.status is Status.SUCCEEDED else str(rollout.status)), ""


SHARED: Final = 16
"""Beginnings shared by texts are left out from this many characters on, up to the word in which the texts part."""


def differing(texts: Sequence[str], longest: int) -> list[str]:
    """Shorten each text to `longest` characters so that the part in which it differs from the others stands in front: the
    beginning that it shares with another text is left out."""
    ordered = sorted(set(texts))
    shared = dict.fromkeys(ordered, 0)
    for one, other in pairwise(ordered):
        parted = (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
        length = next(parted, min(len(one), len(other)))
        shared[one], shared[other] = max(shared[one], length), max(shared[other], length)
    return [one_line(_without_start(text, shared[text]), longest) for text in texts]


def _without_start(text: str, shared: int) -> str:
    if shared < SHARED:
        return text
    begin = text.rfind(" ", shared - SHARED, shared) + 1 or shared
    return f"… {text[begin:]}"


def written(value: Json, longest: int = 160) -> str:
    """Format a value as one line: a text as it is, anything else as JSON."""
    return one_line(value, longest)


def page_links(address: Address, total: int, each: int) -> list[Link]:
    """Return links to the pages of a long table with `each` rows a page; none if there is only one page."""
    firsts = range(0, total, each) if total > each else ()
    return [
        Link(f"{first + 1}–{min(first + each, total)}", str(address.having(cursor=first or None))) for first in firsts
    ]
