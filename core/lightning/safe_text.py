"""Texts of others: those of agents, servers and stores made safe for a terminal, a log and JSON, and those in files of users;
and counts in words.

The invariant: a text of an agent, a server or a store is shown and never obeyed. Control characters could clear a screen,
rename a window, paste, or imitate another program's output; lone surrogates would end the command that prints them. A user's
file is UTF-8, with or without the mark that Windows writes before it. Any other file is refused by name, and never read as
other characters.
"""

from __future__ import annotations

import codecs
import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lightning.errors import LightningError

CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters except line ends and tabs, and lone surrogates."""
MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Byte order marks of other encodings than UTF-8; the longer ones first."""


def counted(count: float, one: str, several: str = "", *, shown: str = "") -> str:
    """Return a count and its noun, such as `1 step` and `2 steps`; `several` is a plural that is more than `one` and an s.
    `shown` is the count as it is written, if not by `str`."""
    return f"{shown or count} {one if count == 1 else several or f'{one}s'}"


def printable(text: str) -> str:
    """Return the text with each control character and lone surrogate escaped, as `\\x1b` and `\\ud800`."""
    return text if text.isprintable() else CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def plain_json(value: object) -> object:
    """Return a value as `json.dumps` takes it, for values that orjson refuses: arrays as lists, keys as text, and None for the
    numbers that JSON does not have (NaN, infinity)."""
    if isinstance(value, memoryview):
        return plain_json(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item) for item in value]
    return value


class PrintableFormatter(logging.Formatter):
    """Formats log records for a terminal. Arguments and tracebacks may have texts of others, which are made printable."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record like `logging.Formatter.format`, as printable text."""
        return printable(super().format(record))


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
