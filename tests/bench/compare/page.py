"""Puts generated text into a page of the documentation, between two markers, and leaves the rest of the page alone."""

from __future__ import annotations

from pathlib import Path


def replace_table(page: Path, name: str, text: str) -> None:
    """Replace what lies between `<!-- NAME: begin -->` and `<!-- NAME: end -->`. Raises `ValueError` without the markers."""
    old = page.read_text()
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, found, rest = old.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page} has no place for {name!r}: write {begin.strip()} and {end} around it")
    page.write_text(f"{before}{begin}\n{text}\n\n{end}{after}")
