"""Files that hold what should not change by accident; `make golden` writes them anew after a change that was meant."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"
UPDATE = os.environ.get("UPDATE_GOLDEN") == "1"


def golden(name: str, text: str) -> None:
    """Compare a text with that of a golden file."""
    file = FOLDER / name
    if UPDATE:
        file.write_text(text)
    assert text == file.read_text(), f"{name} changed: if that was meant, run `make golden` and commit it"
