"""How long a browser takes to draw 20,000 tokens of one call, to colour them by another measure and to draw them again.

`python -m tests.bench.bench_console_page [TOKENS]`; it needs a Chromium (`make browser`).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.plugins.console import gallery
from tests.plugins.console.conftest import NAMES, chromium_arguments

# The time until what a script did is on the screen: two frames, since the first one draws.
PAINTED = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))"


def main(tokens: int) -> None:
    """Print the times, in seconds."""
    found = next(path for name in NAMES if (path := shutil.which(name)))
    page = gallery.one(gallery.strip(tokens, tokens // 10))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=chromium_arguments())
        tab = browser.new_page(viewport={"width": 1280, "height": 900})
        began = time.perf_counter()
        gallery.shown(tab, Path(folder), page)
        tab.evaluate(PAINTED)
        print(f"{tab.locator('.t').count():,} tokens ready after {time.perf_counter() - began:.2f} s")
        for name in ("logprob", "version", "advantage"):
            took = tab.evaluate(
                "async (name) => { const began = performance.now();"
                " [...document.querySelectorAll('.segments button')].find((it) => it.textContent === name).click();"
                f" await {PAINTED}; return (performance.now() - began) / 1000; }}",
                name,
            )
            print(f"coloured by {name} after {took:.2f} s")
        took = tab.evaluate(
            f"async () => {{ const began = performance.now(); document.querySelectorAll('.t')[{tokens // 2}].click();"
            f" await {PAINTED}; return (performance.now() - began) / 1000; }}"
        )
        print(f"a token's reasons after {took:.2f} s")
        changed = gallery.one(gallery.strip(tokens + 1, tokens // 10)).to_json()
        took = tab.evaluate(
            f"async (page) => {{ const began = performance.now(); draw(page); await {PAINTED};"
            " return (performance.now() - began) / 1000; }",
            changed,
        )
        print(f"drawn again with one token more after {took:.2f} s")
        browser.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
