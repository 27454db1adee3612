"""Pictures of the console's pages for the documentation, from a run of `lightning demo`.

    python -m tests.plugins.console.screenshots [RUN]

Without a run, `lightning demo tiny` makes one in `build/screenshots`. The pages are those of `lightning console --export`.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

from lightning.store.places import run_id_of
from lightning_console.export import export_pages
from playwright.sync_api import Page, sync_playwright

from tests.plugins.console.conftest import NAMES, chromium_arguments

IMAGES = Path(__file__).parents[3] / "docs" / "images"
WIDTH, HEIGHT = 1280, 860
HIDE = """path => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(path, "runs/");
}"""
"""Where the run lies on this machine does not belong into pictures."""


def made(folder: Path) -> Path:
    """The run of a demo, trained once."""
    if not (folder / "report.json").exists():
        command = [
            sys.executable,
            "-m",
            "lightning",
            "demo",
            "tiny",
            "--steps",
            "6",
            "--no-pages",
            "--out",
            str(folder),
        ]
        subprocess.run(command, check=True)
    return folder


def chosen(files: dict[str, str], kind: str) -> str:
    """The last page of a kind that is of training: late steps are those in which siblings part ways."""
    found = [
        address
        for address in files
        if address.partition("/")[0] == kind and "val" not in address and "?" not in address
    ]
    return found[-1]


def with_splits(out: Path, files: dict[str, str]) -> str:
    """The last group whose rollouts part ways after some calls that all share."""
    groups = {address: file for address, file in files.items() if address.startswith("group/") and "?" not in address}
    found = [
        address for address, file in groups.items() if (out / "data" / file).read_text().count('"compare":"group') > 1
    ]
    return found[-1]


def show(tab: Page, address: str) -> None:
    """Open an exported page, from its top."""
    tab.evaluate("address => { location.hash = '#' + encodeURIComponent(address) }", address)
    tab.wait_for_function(
        "address => document.querySelector('[data-address]')?.getAttribute('data-address') === address", arg=address
    )
    tab.wait_for_timeout(300)
    tab.evaluate(HIDE, f"{Path.cwd()}/build/screenshots/")
    tab.evaluate("scrollTo(0, 0)")


def main(run: Path) -> None:
    """Export the run, and take the pictures."""
    out = Path("build/screenshots/pages")
    asyncio.run(export_pages(str(run), f"run/{run_id_of(run)}", out, rollouts=300))
    index = (out / "data" / "index.js").read_text()
    files: dict[str, str] = json.loads(index[index.index("exported(") + 9 : -4])["files"]
    IMAGES.mkdir(exist_ok=True)
    browser_path = next(path for name in NAMES if (path := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=chromium_arguments())
        tab = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}).new_page()
        tab.goto((out / "index.html").resolve().as_uri())
        for kind in ("run", "step", "group", "rollout"):
            show(tab, with_splits(out, files) if kind == "group" else chosen(files, kind))
            tab.screenshot(path=IMAGES / f"console-{kind}.png", full_page=kind == "group")
            if kind == "rollout":
                tab.locator(".t:not(.given)").nth(2).click()
                tab.evaluate("document.querySelector('.block.TokenStrip').scrollIntoView()")
                tab.wait_for_timeout(300)
                tab.screenshot(path=IMAGES / "console-tokens.png")
        for look, options in {
            "dark": {"color_scheme": "dark", "viewport": {"width": WIDTH, "height": HEIGHT}},
            "phone": {"viewport": {"width": 360, "height": 760}, "has_touch": True, "is_mobile": True},
        }.items():
            tab = browser.new_context(**options).new_page()
            tab.goto((out / "index.html").resolve().as_uri())
            for kind in ("run", "step", "group", "rollout"):
                show(tab, chosen(files, kind))
                tab.screenshot(path=f"build/screenshots/{kind}-{look}.png", full_page=True)
        browser.close()


if __name__ == "__main__":
    main(made(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("build/screenshots/demo")))
