"""From an address to its page; what cannot be shown is a page that says why."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from typing import Final

from lightning.errors import DataError, LightningError

from lightning_console.address import Address
from lightning_console.blocks import Link, Notice, Notices, Page
from lightning_console.places import Places

PAGES: Final = ("runs", "compare", "run", "step", "group", "rollout", "versions", "rewards", "resources")
"""Each has a module of its name in `pages/`, with the function `page(places, address)`."""


async def show(places: Places, text: str) -> Page:
    """The page of an address. Never raises a `LightningError`: what is wrong is shown."""
    try:
        address = Address.parse(text or "runs")
        if address.page not in PAGES:
            raise DataError(f"there is no page {address.page[:40]!r}: there are {', '.join(PAGES)}")
        module = importlib.import_module(f"lightning_console.pages.{address.page}")
        make: Callable[[Places, Address], Awaitable[Page]] = module.page
        return await make(places, address)
    except LightningError as error:
        notice = Notice(str(error), "bad", links=(Link("all runs", "runs"),))
        return Page(text, "This cannot be shown", [Notices([notice])], (Link("Runs", "runs"),))
