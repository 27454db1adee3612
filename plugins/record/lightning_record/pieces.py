"""Cuts a request into pieces that come again in the later ones of its attempt, so that each is looked through once.

The invariant: the pieces of a request have all of its values, and equal ones have equal keys, wherever they stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from lightning.store.exchanges import canonical, written

SMALLEST: Final = 1024
"""Bytes of a piece of a request, but for the last ones of a list."""
NESTED: Final = frozenset((dict, list))


class Piece(NamedTuple):
    """What stands side by side in a canonical request and comes again in later ones, from byte `start` to `stop`: items of the
    list `name`, or fields where that is None. `key` is equal for equal ones."""

    name: str | None
    start: int
    stop: int
    key: int


class _Cutter:
    """Joins a request's text and cuts it into pieces."""

    def __init__(self) -> None:
        self.text, self.pieces, self._start = bytearray(), list[Piece](), 0

    def add(self, name: str | None, part: bytes) -> None:
        """A part of the piece that is being made."""
        self.text += part
        if len(self.text) - self._start >= SMALLEST:
            self.close(name)

    def add_all(self, name: str, items: Iterable[Any]) -> None:
        """The items of a list."""
        parts, size = list[bytes](), 0
        for item in items:
            parts.append(part := canonical(item))
            if (size := size + len(part)) >= SMALLEST:
                self.add(name, b",".join(parts))
                parts, size = [b""], 0  # the next piece begins with a comma
        if size:
            self.add(name, b",".join(parts))
        self.close(name)

    def close(self, name: str | None, then: bytes = b"") -> None:
        """The piece ends here. What is written `then` belongs to none."""
        if (stop := len(self.text)) > self._start:
            key = hash((name, bytes(self.text[self._start : stop])))
            self.pieces.append(Piece(name, self._start, stop, key))
        self.text += then
        self._start = len(self.text)


def cut(body: Mapping[str, Any]) -> tuple[bytes, tuple[Piece, ...]]:
    """The canonical JSON of a request, and its pieces: one for each list of numbers or texts, and few for many small items,
    since each costs memory of its own. Raises `RecursionError` for what is nested too deep."""
    made = _Cutter()
    made.close(None, b"{")
    for place, name in enumerate(sorted(body)):
        value, before = body[name], b"%b%b:" % (b"," if place else b"", canonical(name))
        if not isinstance(value, list) or NESTED.isdisjoint(map(type, value)):
            made.add(None, before + canonical(value))
            continue
        made.close(None, before + b"[")
        made.add_all(name, value)
        made.close(None, b"]")
    made.close(None, b"}")
    return bytes(made.text), tuple(made.pieces)


def as_object(request: bytes, piece: Piece) -> bytes:
    """A piece of a canonical request as a JSON object."""
    text = request[piece.start : piece.stop].removeprefix(b",")
    return b"{%b}" % text if piece.name is None else b"{%b:[%b]}" % (written(piece.name), text)
