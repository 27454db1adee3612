"""Parse addresses and make their pages; for a page that cannot be made, make one that says why.

An address is the target of a link and the text in the browser's address bar. It has a path and options: `runs`, `run/RUN`,
`step/RUN/3`, `rollout/RUN/ROLLOUT?call=2`. Its parts are percent-encoded.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, quote, unquote, urlencode

from lightning.errors import DataError, LightningError

from lightning_console.blocks import Link, Notice, Notices, Page
from lightning_console.places import Places

LONGEST = 4_000
"""Most characters of an address."""


@dataclass(frozen=True, slots=True)
class Address:
    """An address: the name of a page, the ids of its subject (`about`, such as run and rollout), and options (filters, the
    order, a cursor)."""

    page: str
    about: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse the text of an address. Raises `DataError` if it is too long or names no page."""
        if len(text) > LONGEST:
            raise DataError(f"an address has at most {LONGEST} characters, and this one has {len(text)}")
        path, _, query = text.partition("?")
        page, *about = [unquote(part) for part in path.strip("/").split("/")]
        if not page:
            raise DataError("an address begins with the name of a page, such as runs")
        return cls(page, tuple(about), dict(parse_qsl(query, keep_blank_values=True)))

    def __str__(self) -> str:
        path = "/".join(quote(part, safe="") for part in (self.page, *self.about))
        return path + (f"?{urlencode(self.options)}" if self.options else "")

    def option(self, name: str, default: str = "") -> str:
        """The value of an option of the address; `default` if it has none."""
        return self.options.get(name, default)

    def number(self, name: str, default: int) -> int:
        """The value of an option as a whole number. Raises `DataError` if it is not one."""
        value = self.option(name)
        try:
            return int(value) if value else default
        except ValueError:
            raise DataError(f"{name}={value[:40]!r} in the address is no whole number") from None

    def having(self, **options: object) -> Address:
        """Return the same page's address with these options changed; None removes an option."""
        changed = dict(self.options) | {name: str(value) for name, value in options.items() if value is not None}
        return Address(self.page, self.about, {k: v for k, v in changed.items() if options.get(k, v) is not None})


CANNOT: Final = "This cannot be shown"
"""The title of the page that is shown in place of a page that failed."""
logger = logging.getLogger(__name__)

PAGES: Final = (
    "runs",
    "compare",
    "run",
    "metrics",
    "step",
    "pushed",
    "group",
    "rollout",
    "versions",
    "rewards",
    "tools",
    "search",
    "resources",
)
"""The names of all pages. Each has a module of that name in `pages/`, with a function `page(places, address)`."""


async def show(places: Places, text: str) -> Page:
    """Make the page of an address. Never raises: an error becomes a page that says what is wrong."""
    return await shown(text, _made(places, text))


async def _made(places: Places, text: str) -> Page:
    address = Address.parse(text or "runs")
    if address.page not in PAGES:
        raise DataError(f"there is no page {address.page[:40]!r}: there are {', '.join(PAGES)}")
    module = importlib.import_module(f"lightning_console.pages.{address.page}")
    make: Callable[[Places, Address], Awaitable[Page]] = module.page
    return await make(places, address)


async def shown(text: str, making: Awaitable[Page], seconds: float | None = None) -> Page:
    """Await the page of the address `text`. If making it fails or takes longer than `seconds`, return a page that says why."""
    try:
        async with asyncio.timeout(seconds):
            return await making
    except TimeoutError:
        return cannot_show(text, f"this page took more than {seconds:g} s: it asks for too much, or its store is slow")
    except LightningError as error:
        return cannot_show(text, str(error))
    except Exception as error:
        logger.exception("the page %r could not be made", text[:200])
        return cannot_show(text, fault_of(error))


def fault_of(error: Exception) -> str:
    """Return the text that visitors see for an unexpected error. The error's own text is only for the log."""
    return f"A fault of the console: {type(error).__name__}. Its log says more."


def cannot_show(address: str, why: str) -> Page:
    """Return a page that says why an address cannot be shown. It is marked as live, because the cause may soon be gone."""
    notices = Notices([Notice(why, "bad", links=(Link("all runs", "runs"),))])
    return Page(address, CANNOT, [notices], (Link("Runs", "runs"),), live=True, waits=True)
