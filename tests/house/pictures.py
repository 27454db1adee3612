"""Draws the pictures of docs/architecture.md from what they show: the import floors, the schema, the states of a rollout.

The invariant: a picture has no fact of its own that the code could contradict. `make golden` draws them anew.
"""

from __future__ import annotations

import sqlite3
import tomllib
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
LINE: Final = 18
"""Height of a line of text in pixels."""
STYLE: Final = (
    "text{font:13px sans-serif;fill:#222}.title{font-weight:bold}.small{font-size:11px;fill:#555}"
    ".box{fill:#f4f7fb;stroke:#5b7083}.plugin{fill:#fff7e6;stroke:#b58a2c}.arrow{stroke:#5b7083;fill:none}"
)
MARKER: Final = (
    '<defs><marker id="tip" markerWidth="9" markerHeight="9" refX="8" refY="4" orient="auto">'
    '<path d="M0,0 L8,4 L0,8 z" fill="#5b7083"/></marker></defs>'
)

REFERENCES: Final = {
    "rollouts.run": "runs.id",
    "steps.run": "runs.id",
    "metrics.run": "runs.id",
    "state.run": "runs.id",
    "revisions.run": "runs.id",
    "answers.run": "runs.id",
    "attempts.rollout": "rollouts.id",
    "transitions.rollout": "rollouts.n",
    "transitions.parent": "transitions.n",
}
"""Which column names a row of which table. The schema declares no foreign keys: events may arrive in any order."""

COLUMNS_OF_TABLES: Final = (
    ("runs", "steps", "metrics", "state"),
    ("rollouts", "attempts"),
    ("transitions",),
    ("operation_groups", "answers", "revisions"),
)
"""The places of the tables, from left to right and from top to bottom."""

STATES: Final = {
    "pending": (110, 120),
    "running": (400, 120),
    "succeeded": (720, 60),
    "failed": (720, 180),
    "cancelled": (720, 250),
}
CHANGES: Final = (
    ("pending", "running", "lease: attempt + 1"),
    ("running", "succeeded", "complete with a reward"),
    ("running", "failed", "agent or timeout fault; no attempts left"),
    ("running", "cancelled", "wanted no more"),
    ("running", "pending", "infrastructure fault, expired lease, release"),
)
"""The edges of a rollout's state machine. `test_pictures` walks each of them in a real store."""


def svg(width: int, height: int, parts: Sequence[str]) -> str:
    """A picture of this size in pixels."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    return "\n".join([head, f"<style>{STYLE}</style>", MARKER, *parts, "</svg>", ""])


def text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    """One line of text; `y` is its base line."""
    return f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, style: str = "box") -> str:
    """A rectangle with round corners."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" class="{style}"/>'


def arrow(path: str) -> str:
    """A line with a tip at its end."""
    return f'<path d="{path}" class="arrow" marker-end="url(#tip)"/>'


def floors() -> dict[int, list[str]]:
    """The rooms of the core by their floor, the highest first, as the import contract has them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = (contract["layers"] for contract in settings["contracts"] if contract["id"] == "floors")
    names = [[name.strip(" ()") for name in layer.split(":")] for layer in layers]
    return dict(zip(reversed(range(len(layers))), names, strict=True))


def rooms() -> str:
    """The floors of the core with their rooms, and the plugins and adapters on top."""
    adapters = sorted(folder.name for folder in (ROOT / "adapters").iterdir() if folder.is_dir())
    plugins = sorted(folder.name for folder in (ROOT / "plugins").iterdir() if folder.is_dir())
    rows = [("adapters", adapters, "plugin"), ("plugins", plugins, "plugin")]
    for number, names in floors().items():
        rows.append((f"floor {number}", [name for name in names if not name.startswith("_")], "box"))
    parts, y = [], 10
    for label, names, style in (row for row in rows if row[1]):
        parts.append(text(10, y + 22, label, "small"))
        x = 80
        for name in names:
            width = 16 + 8 * len(name)
            parts += [box(x, y, width, 34, style), text(x + width / 2, y + 22, name, anchor="middle")]
            x += width + 10
        y += 46
    parts.append(text(10, y + 12, "A room imports its own floor and those below. The core imports no plugin.", "small"))
    return svg(640, y + 24, parts)


def columns(database: sqlite3.Connection) -> dict[str, list[tuple[str, bool]]]:
    """The columns of each table, and whether each is part of a key: of the primary one or of a unique one."""
    found = {}
    tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name").fetchall()
    for (table,) in tables:
        keys = {name for _, name, _, _, _, place in database.execute(f"PRAGMA table_info({table})") if place}
        for _, index, unique, *_ in database.execute(f"PRAGMA index_list({table})").fetchall():
            if unique:
                keys |= {name for _, _, name in database.execute(f"PRAGMA index_info({index})")}
        found[table] = [(row[1], row[1] in keys) for row in database.execute(f"PRAGMA table_info({table})")]
    return found


def tables(database: sqlite3.Connection) -> str:
    """The tables of the SQLite store: keys in bold, references with the column that they name."""
    found = columns(database)
    parts, bottom = [], 0
    for place, names in enumerate(COLUMNS_OF_TABLES):
        x, y = 10 + place * 235, 10
        for name in names:
            height = LINE * (len(found[name]) + 1) + 12
            parts += [box(x, y, 220, height), text(x + 8, y + LINE, name, "title")]
            for line, (column, is_key) in enumerate(found[name], 2):
                target = REFERENCES.get(f"{name}.{column}")
                parts.append(text(x + 14, y + LINE * line, column, "title" if is_key else ""))
                if target:
                    parts.append(text(x + 212, y + LINE * line, f"→ {target}", "small", "end"))
            y += height + 12
        bottom = max(bottom, y)
    parts.append(text(10, bottom + 12, "Bold: part of a key. → names the column that this one refers to.", "small"))
    return svg(10 + 235 * len(COLUMNS_OF_TABLES), bottom + 24, parts)


def states() -> str:
    """The states of a rollout and what moves it from one to the next."""
    parts = []
    for name, (x, y) in STATES.items():
        parts += [box(x - 60, y - 20, 120, 40), text(x, y + 5, name, "title", "middle")]
    leased, rewarded, failed, cancelled, lost = (label for _, _, label in CHANGES)
    parts += [
        arrow("M170,112 L338,112"),
        text(255, 104, leased, "small", "middle"),
        arrow("M460,110 L658,66"),
        text(560, 66, rewarded, "small", "middle"),
        arrow("M460,130 L658,174"),
        text(590, 144, failed, "small", "middle"),
        arrow("M440,141 L658,244"),
        text(510, 236, cancelled, "small", "middle"),
        arrow("M385,141 C340,220 170,220 125,142"),
        text(255, 222, lost, "small", "middle"),
        text(720, 100, "trained once, by one step", "small", "middle"),
    ]
    return svg(860, 290, parts)
