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

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

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
        page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.asked(request.url))
        page.on("websocket", lambda socket: self.asked(socket.url))

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


@pytest.fixture
def watched() -> Watched:
    """What the pages of this test did that they may not."""
    return Watched()


@pytest.fixture
def open_page(browser: Browser, watched: Watched) -> Iterator[OpenPage]:
    """Opens a page with cookies of its own; the arguments are those of Playwright's `new_context`."""
    contexts = []

    def open_one(**options: Any) -> Page:
        context = browser.new_context(**options)
        context.set_default_timeout(15_000)
        contexts.append(context)
        page = context.new_page()
        watched.watch(page)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert watched.errors == [], "the page's console says errors"
    assert watched.elsewhere == [], "the page asked another host"


@pytest.fixture
def page(open_page: OpenPage) -> Page:
    """A page of an ordinary width in an own context."""
    return open_page(viewport={"width": 1280, "height": 900})
