"""`Terminal`: the console of whatever lightning says to people, on either stream.

The invariant: nothing reaches a terminal but lightning's own styles and printable text, whoever has written it. All that is
printed passes `render`, so that no command has to think of it. It loads rich: import it where something is printed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from lightning.printable import printable


class Terminal(Console):
    """rich's console, without emoji codes: `:cat:` in a name stays as it is."""

    def __init__(
        self,
        *,
        file: IO[str] | None = None,
        stderr: bool = False,
        quiet: bool = False,
        width: int | None = None,
        highlight: bool = True,
        soft_wrap: bool = False,
    ) -> None:
        super().__init__(
            file=file, stderr=stderr, quiet=quiet, width=width, highlight=highlight, soft_wrap=soft_wrap, emoji=False
        )

    def render_str(self, text: str, **how: Any) -> Text:
        """See `rich.console.Console.render_str`; columns of tables are measured by what it gives."""
        return super().render_str(printable(text), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See `rich.console.Console.render`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
