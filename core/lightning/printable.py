"""Makes texts of agents, servers and stores safe for a terminal and a log, and their values ready for JSON.

The invariant: such a text is shown and never obeyed. Control characters could clear a screen, rename a window, paste, or
imitate another program's output; lone surrogates would end the command that prints them.
"""

from __future__ import annotations

import logging
import math
import re
from array import array
from collections.abc import Mapping
from typing import Final

CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters except line ends and tabs, and lone surrogates."""


def printable(text: str) -> str:
    """Return the text with each control character and lone surrogate escaped, as `\\x1b` and `\\ud800`."""
    return text if text.isprintable() else CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def plain_json(value: object) -> object:
    """Return a value as `json.dumps` takes it, for values that orjson refuses: arrays as lists, keys as text, and None for the
    numbers that JSON does not have (NaN, infinity)."""
    if isinstance(value, array):
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
