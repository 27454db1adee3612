"""Addresses of pages: what a link names and the browser's address bar shows.

An address is a path and options: `runs`, `run/RUN`, `step/RUN/3`, `rollout/RUN/ROLLOUT?call=2`. Its parts are percent-encoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, unquote, urlencode

from lightning.errors import DataError

LONGEST = 4_000
"""Characters of an address."""


@dataclass(frozen=True, slots=True)
class Address:
    """The name of a page, what it is about (ids, in the page's own order), and options: filters, the order, a cursor."""

    page: str
    about: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises `DataError` for one that is too long or names no page."""
        if len(text) > LONGEST:
            raise DataError(f"an address has at most {LONGEST} characters, and this one has {len(text)}")
        path, _, query = text.partition("?")
        page, *about = [unquote(part) for part in path.strip("/").split("/")]
        if not page:
            raise DataError("an address begins with the name of a page, such as runs")
        return cls(page, tuple(about), dict(parse_qsl(query, keep_blank_values=True)))

    def __str__(self) -> str:
        path = "/".join(quote(part, safe="") for part in (self.page, *self.about))
        return path + (f"?{urlencode(self.options)}" if self.options else "")

    def option(self, name: str, default: str = "") -> str:
        """The value of an option."""
        return self.options.get(name, default)

    def number(self, name: str, default: int) -> int:
        """The value of an option that is a whole number. Raises `DataError` where it is none."""
        value = self.option(name)
        try:
            return int(value) if value else default
        except ValueError:
            raise DataError(f"{name}={value[:40]!r} in the address is no whole number") from None

    def having(self, **options: object) -> Address:
        """The same page with these options changed; None takes one away."""
        changed = dict(self.options) | {name: str(value) for name, value in options.items() if value is not None}
        return Address(self.page, self.about, {k: v for k, v in changed.items() if options.get(k, v) is not None})
