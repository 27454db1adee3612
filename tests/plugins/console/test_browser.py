"""The watch over pages: a console's error and a request to elsewhere are seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.plugins.console.conftest import Watched

pytestmark = pytest.mark.slow


def test_a_page_that_complains_or_asks_elsewhere_is_seen(page: Page, watched: Watched) -> None:
    page.set_content("<p>calm</p>")
    assert (watched.errors, watched.elsewhere) == ([], [])

    page.evaluate("console.error('loud'); fetch('https://elsewhere.example/x').catch(() => 0)")
    page.evaluate("setTimeout(() => { throw Error('thrown') })")
    page.wait_for_timeout(100)

    assert "loud" in watched.errors
    assert "thrown" in " ".join(watched.errors)
    assert watched.elsewhere == ["https://elsewhere.example/x"]
    watched.errors.clear()
    watched.elsewhere.clear()
