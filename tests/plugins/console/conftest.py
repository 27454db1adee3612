"""A real browser for pages: Chromium of the system's packages (`make browser`), driven by Playwright.

A page that says an error in its console, or asks another host for anything, fails its test.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.servers.memory import memory_store as store  # noqa: F401 — a fixture

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-default-apps", "--disable-extensions", "--no-first-run", "--no-default-browser-check",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)  # fmt: skip
HERE = {"", "127.0.0.1", "localhost", "::1"}
"""Hosts of which a page may ask: none (file:, data:, blob:) and this machine."""


def chromium_arguments() -> list[str]:
    """How the browser is started: it asks nobody for anything by itself, and needs no sandbox of its own where root runs it."""
    return [*QUIET, *(["--no-sandbox"] if os.geteuid() == 0 else [])]


OpenPage = Callable[..., "Page"]


@dataclass
class Watched:
    """What pages did that they may not. A test that means an error looks at it and clears it."""

    errors: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        page.on("console", lambda said: self.said(said) if said.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.asked(request.url))
        page.on("websocket", lambda socket: self.asked(socket.url))

    def said(self, message: ConsoleMessage) -> None:
        where = f" ({message.location['url']})" if message.text.startswith("Failed to load") else ""
        self.errors.append(message.text + where)

    def asked(self, url: str) -> None:
        if (urlsplit(url).hostname or "") not in HERE:
            self.elsewhere.append(url)


# Not for the session: Playwright's loop counts as running until it is stopped, and other files' async tests need their own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, for the tests of one file; these are plain functions, not coroutines."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("there is no Chromium: `make browser`, or install the system's package")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=chromium_arguments())
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def everything() -> Watched:
    """What the pages of this file did that they may not."""
    return Watched()


@pytest.fixture
def watched(everything: Watched) -> Iterator[Watched]:
    """What the pages of this test did that they may not."""
    everything.errors.clear()
    everything.elsewhere.clear()
    yield everything
    assert everything.errors == [], "the page's console says errors"
    assert everything.elsewhere == [], "the page asked another host"


@pytest.fixture(scope="module")
def tabs(browser: Browser, everything: Watched) -> Iterator[OpenPage]:
    """Opens a page, or gives the one that was opened with the same arguments, which are those of Playwright's `new_context`: a
    page of its own for each test takes longer than most tests. What is drawn on it begins anew (`gallery.shown`)."""
    found: dict[str, Page] = {}

    def one(**options: Any) -> Page:
        key = repr(sorted(options.items()))
        if key not in found:
            found[key] = browser.new_context(**options).new_page()
            found[key].set_default_timeout(60_000)
            everything.watch(found[key])
        return found[key]

    yield one
    for page in found.values():
        page.context.close()


@pytest.fixture
def open_page(tabs: OpenPage, watched: Watched) -> OpenPage:
    """Opens a page; the arguments are those of Playwright's `new_context`. Other tests of the file may have used it."""
    return tabs


@pytest.fixture
def page(open_page: OpenPage) -> Page:
    """A page of an ordinary width."""
    return open_page(viewport={"width": 1280, "height": 900})
