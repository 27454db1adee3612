"""Texts of agents, servers and stores as a terminal and a log may show them.

The invariant: such a text is shown and never obeyed. Control characters could clear a screen, rename a window, paste, or paint
another program's words; lone surrogates would end the command that prints them.
"""

from __future__ import annotations

import logging
import re
from typing import Final

CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters but for line ends and tabs, and halves of characters."""


def printable(text: str) -> str:
    """The text with each control character and lone surrogate written out, as `\\x1b` and `\\ud800`."""
    return text if text.isprintable() else CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


class PrintableFormatter(logging.Formatter):
    """Formats records for a terminal: arguments and tracebacks may have texts of others."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        return printable(super().format(record))
