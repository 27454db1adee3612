"""From an address to its page; what cannot be shown is a page that says why."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from lightning.errors import DataError, LightningError

from lightning_console.address import Address
from lightning_console.blocks import Link, Notice, Notices, Page
from lightning_console.places import Places

CANNOT: Final = "This cannot be shown"
"""The title of a page that stands for another."""
logger = logging.getLogger(__name__)

PAGES: Final = ("runs", "compare", "run", "step", "group", "rollout", "versions", "rewards", "resources")
"""Each has a module of its name in `pages/`, with the function `page(places, address)`."""


async def show(places: Places, text: str) -> Page:
    """The page of an address. Never raises: what is wrong is shown, and a fault of a page leaves the others alone."""
    try:
        address = Address.parse(text or "runs")
        if address.page not in PAGES:
            raise DataError(f"there is no page {address.page[:40]!r}: there are {', '.join(PAGES)}")
        module = importlib.import_module(f"lightning_console.pages.{address.page}")
        make: Callable[[Places, Address], Awaitable[Page]] = module.page
        return await make(places, address)
    except LightningError as error:
        return cannot_show(text, str(error))
    except Exception as error:
        logger.exception("the page %r could not be made", text[:200])
        return cannot_show(text, fault_of(error))


def fault_of(error: Exception) -> str:
    """What is said of an error that nobody has foreseen. Its text is for the log, not for visitors."""
    return f"A fault of the console: {type(error).__name__}. Its log says more."


def cannot_show(address: str, why: str) -> Page:
    """The page that stands for one that cannot be shown. It is live: what is wrong may be over in a moment."""
    notices = Notices([Notice(why, "bad", links=(Link("all runs", "runs"),))])
    return Page(address, CANNOT, [notices], (Link("Runs", "runs"),), live=True)
