"""`Terminal`: the console for everything that lightning shows to people, on either stream.

The invariant: a terminal receives only lightning's own styles and printable text, whoever has written it. All output passes
`render`, so that no command has to take care. This module loads rich: import it where something is printed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from lightning.safe_text import printable


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
        """Render like `rich.console.Console.render_str`, with printable text; columns of tables are measured by the result."""
        return super().render_str(printable(text), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render like `rich.console.Console.render`, with printable text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
