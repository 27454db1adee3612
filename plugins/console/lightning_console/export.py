"""Write the console's pages into a folder that opens without a server: a report for a colleague, or for a paper.

The invariant: the folder has the content that the console shows, and says which pages it leaves out. Its pages load nothing
from any host, and Gradio is needed neither to write nor to read them.
"""

from __future__ import annotations

import hashlib
import html
import json
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lightning.errors import ConfigError, DataError
from lightning.safe_text import counted

from lightning_console import router
from lightning_console.blocks import Notices, json_of
from lightning_console.places import Places
from lightning_console.queries.branches import runs_with_branches
from lightning_console.router import Address

STATIC: Final = Path(__file__).parent / "static"
MARK: Final = "lightning-export.json"
"""The file that marks a folder as an export, which a new export may replace."""
PAGES_FOR_A_ROLLOUT: Final = 8
"""An export has at most this many pages for each rollout that `--limit` allows, plus `OTHER_PAGES`."""
OTHER_PAGES: Final = 200
BYTES: Final = 200 << 20
LINKS: Final = frozenset({"to", "compare", "previous", "next", "to_left", "to_right"})
"""Names of the fields of pages and blocks that hold an address or a list of addresses."""
KEPT: Final = frozenset({"call", "attempt", "cursor", "of", "from", "to", "store", "split", "runs", "tool", "agent"})
"""An export follows a link only if all options of its address are among these. Other options sort or filter a page, and each
would add one more copy of it."""
INDEX: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><link rel="icon" href="data:,">
{styles}
<style>:root {{ color-scheme: light dark; }}
body {{ margin: 0; font-family: ui-sans-serif, system-ui, sans-serif;
background: light-dark(#ffffff, #15181d); color: light-dark(#1b2028, #e4e7ec); }}
</style></head>
<body><div id="host"></div>
{scripts}
<script src="data/index.js"></script>
</body></html>
"""


@dataclass(frozen=True, slots=True)
class Exported:
    """A finished export: its `index.html`, its number of pages, and a sentence about what it has and what it leaves out."""

    index: Path
    pages: int
    said: str


@dataclass(slots=True)
class _Found:
    """The progress of an export. `files` has the written scripts by address; `rollouts` are those that got a page, `left_out`
    those beyond the `limit`; `bytes` counts the JSON written."""

    limit: int
    files: dict[str, str] = field(default_factory=dict)
    rollouts: set[tuple[str, ...]] = field(default_factory=set)
    left_out: set[tuple[str, ...]] = field(default_factory=set)
    pages_left_out: int = 0
    bytes: int = 0

    def takes(self, address: Address) -> bool:
        """Return whether the limits leave room for the page of an address, and count it as exported or left out."""
        if address.page == "rollout" and address.about not in self.rollouts and len(self.rollouts) >= self.limit:
            self.left_out.add(address.about)
            return False
        most = OTHER_PAGES + PAGES_FOR_A_ROLLOUT * self.limit
        if len(self.files) < most and self.bytes < BYTES:
            if address.page == "rollout":
                self.rollouts.add(address.about)
            return True
        self.pages_left_out += 1
        return False

    def said(self) -> str:
        """Say in a sentence how much the folder has, and how much is left out."""
        text = f"{counted(len(self.files), 'page')} with {counted(len(self.rollouts), 'rollout')}"
        if self.left_out:
            text += f"; at least {len(self.left_out)} rollouts are left out: --limit {self.limit} was the limit"
        if self.pages_left_out:
            text += f"; {self.pages_left_out} other pages are left out"
        return text


async def export_pages(where: str, start: str, folder: Path, *, rollouts: int = 100) -> Exported:
    """Write the page `start` of a place and all pages that its links lead to, the nearest first, with the pages of at most
    `rollouts` rollouts.

    Raises `ConfigError` for a folder with other content, a place without runs or an unknown run, and `DataError` for a start
    that cannot be shown.
    """
    places = Places(where)
    found = _Found(rollouts)
    try:
        runs = await _runs_of(places, start)
        _prepare(folder)
        waiting = deque([start, "resources"])
        asked = set(waiting)
        while waiting:
            text = waiting.popleft()
            address = Address.parse(text)
            if not found.takes(address):
                continue
            shown = await router.show(places, text)
            if text == start and shown.title == router.CANNOT:
                notices = [each for block in shown.blocks if isinstance(block, Notices) for each in block.notices]
                why = " ".join(notice.text for notice in notices)
                raise DataError(f"{start} cannot be exported: {why}")
            page = {**shown.to_json(), "live": False, "address": text}
            page["blocks"] = [block for block in page["blocks"] if block["component"] not in ("Actions", "Controls")]
            for link in links_of(page):
                if link not in asked and _is_followed(link, runs):
                    asked.add(link)
                    waiting.append(link)
            found.files[text] = _write_page(folder, text, page, found)
    finally:
        await places.close()
    _write_index(folder, start, found)
    return Exported(folder / "index.html", len(found.files), found.said())


async def _runs_of(places: Places, start: str) -> frozenset[str]:
    """Return the keys of the runs that an export covers: for the page of a run, that run and the runs with its branches; for
    any other start, an empty set, which means all runs. Raises `ConfigError` for an unknown run or a place without runs."""
    address = Address.parse(start)
    if address.page == "run" and address.about:
        found = await places.find(address.about[0])
        return frozenset((address.about[0], *await runs_with_branches(found)))
    if not await places.stores():
        raise ConfigError(f"there is nothing to export in {places.where}: it has no run")
    return frozenset()


def _prepare(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / MARK).is_file())):
        raise ConfigError(f"{folder} has something else in it: give --export a folder that is new, or an older export")
    shutil.rmtree(folder / "data", ignore_errors=True)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / "static").mkdir(exist_ok=True)
    for file in STATIC.iterdir():
        if file.suffix in (".js", ".css"):
            shutil.copyfile(file, folder / "static" / file.name)


def links_of(value: object) -> Iterator[str]:
    """Yield the addresses in the JSON of a page (its fields named in `LINKS`), in order."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            if name in LINKS:
                yield from _texts(item)
            else:
                yield from links_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from links_of(item)


def _texts(item: object) -> Iterable[str]:
    found = item if isinstance(item, list | tuple) else (item,)
    return [text for text in found if isinstance(text, str) and text]


def _is_followed(link: str, runs: frozenset[str]) -> bool:
    """Return whether an export follows a link: not to pages of runs outside `runs` or comparisons with them, unless `runs` is
    empty; not to a search, which needs the store; and of failed tool runs only to the first ones, so that other rollouts
    have room."""
    try:
        address = Address.parse(link)
    except DataError:
        return False
    if address.page not in router.PAGES or address.page == "search" or set(address.options) - KEPT:
        return False
    if address.page == "tools" and "cursor" in address.options:
        return False
    if runs and address.page in ("compare", "versions"):
        named = address.option("runs" if address.page == "compare" else "of").split(",")
        return all(name.rpartition("@")[0] in runs or name in runs for name in named)
    of_a_run = address.page in ("run", "metrics", "step", "pushed", "group", "rollout", "rewards", "tools")
    return not (runs and of_a_run) or (bool(address.about) and address.about[0] in runs)


def _write_page(folder: Path, address: str, page: dict[str, Any], found: _Found) -> str:
    """Write a page as a script into the folder's `data`, and return the script's file name."""
    written = json_of(page)
    name = f"{hashlib.sha256(address.encode()).hexdigest()[:16]}.js"
    (folder / "data" / name).write_bytes(b"lightning.page(" + _as_script(written) + b");\n")
    found.bytes += len(written)
    return name


def _as_script(written: bytes) -> bytes:
    """Escape two Unicode line separators, which JSON allows in a text but which end a line in older JavaScript."""
    return written.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")


def _write_index(folder: Path, start: str, found: _Found) -> None:
    index = {"start": start, "files": found.files, "said": found.said()}
    began = b"lightning.start(document.getElementById('host'), lightning.exported("
    (folder / "data" / "index.js").write_bytes(began + _as_script(json_of(index)) + b"));\n")
    names = sorted(file.name for file in STATIC.iterdir())
    styles = "\n".join(f'<link rel="stylesheet" href="static/{name}">' for name in names if name.endswith(".css"))
    scripts = "\n".join(f'<script src="static/{name}"></script>' for name in names if name.endswith(".js"))
    page = INDEX.format(title=html.escape(f"{start} · lightning"), styles=styles, scripts=scripts)
    (folder / "index.html").write_text(page, encoding="utf-8")
    (folder / MARK).write_text(json.dumps({"start": start, "pages": len(found.files), "said": found.said()}) + "\n")
