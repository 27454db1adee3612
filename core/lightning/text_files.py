"""Reads the text of a file that a user gives.

The invariant: the text is UTF-8, with or without the mark that Windows writes before it. Any other file is refused by name, and
never read as other characters.
"""

from __future__ import annotations

import codecs
from pathlib import Path

from lightning.errors import LightningError

MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Byte order marks of other encodings than UTF-8; the longer ones first."""


def read_text(file: Path, failure: type[LightningError]) -> str:
    """Return the file's text without a byte order mark. Raises `failure`, naming the file, for anything but UTF-8, and
    `OSError`."""
    content = file.read_bytes()
    if coding := next((name for mark, name in MARKS.items() if content.startswith(mark)), ""):
        raise failure(f"{file} is {coding} text: save it as UTF-8")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise failure(f"{file} is not UTF-8 text ({error}): save it as UTF-8") from error
    if "\0" in text:
        raise failure(f"{file} has zero bytes in it, so that it is UTF-16 text or no text at all: save it as UTF-8")
    return text
