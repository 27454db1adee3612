"""What plugins keep with a call, an outcome or a step: opaque bytes by the plugin's name, as one value of a database.

The invariant: equal extras are equal bytes, in whatever order their plugins brought them, and what is read back equals what was
written. The bounds are checked here and nowhere else: every store refuses the same in the same words, before it writes.

Layout, little-endian, name after name in their order: a byte for the name's length in UTF-8, the name, the number of the
plugin's bytes (uint32), the bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Final

from lightning.errors import DataError, StoreError

LARGEST: Final = 17 << 19
"""Bytes that one plugin may keep with one call, outcome or step: 8.5 MiB, so that every packed exchange fits."""
LONGEST_NAME: Final = 64
"""Bytes of a plugin's name in UTF-8."""
_SIZE: Final = struct.Struct("<I")


def pack(extras: Mapping[str, bytes], what: str) -> bytes | None:
    """The value to be kept; None where there are none. Raises `DataError`, which says `what` they are, for a name that no
    plugin has and for too many bytes."""
    for name, kept in extras.items():
        check(name, kept, what)
    return b"".join(_entry(name.encode(), extras[name]) for name in sorted(extras)) or None


def _entry(head: bytes, kept: bytes) -> bytes:
    return b"".join((bytes((len(head),)), head, _SIZE.pack(len(kept)), kept))


def check(name: str, kept: bytes, what: str) -> None:
    """Raise `DataError`, which says `what` it is, for an extra that no store takes."""
    if not name.isprintable() or not 0 < len(name.encode()) <= LONGEST_NAME:
        raise DataError(
            f"{what} are of a plugin {name[:80]!r}: give the plugin's name, printable text of 1 to {LONGEST_NAME} bytes"
        )
    if not isinstance(kept, bytes):
        raise DataError(f"{what} are a {type(kept).__name__} of plugin {name!r}: let the plugin give bytes")
    if len(kept) > LARGEST:
        raise DataError(
            f"{what} are too large: plugin {name!r} gives {len(kept)} bytes, and a plugin may keep {LARGEST} with one call, "
            "outcome or step. Let it keep the rest in a file of its own, and the file's name here"
        )


def unpack(value: bytes | None, what: str) -> dict[str, bytes]:
    """What `pack` packed. Raises `StoreError`, which says `what` it is, for a value that was damaged."""
    found: dict[str, bytes] = {}
    data, at = value or b"", 0
    try:
        while at < len(data):
            start = at + 1 + data[at]
            name = data[at + 1 : start].decode()
            (size,) = _SIZE.unpack_from(data, start)
            at = start + _SIZE.size + size
            found[name] = data[at - size : at]
    except (struct.error, UnicodeDecodeError):
        at = -1
    if at != len(data):
        raise StoreError(f"{what} are corrupt in the database. Restore the database from a backup")
    return found


def digest(packed: bytes | None) -> str:
    """What tells packed extras from others; empty where there are none."""
    return "" if packed is None else hashlib.sha256(packed).hexdigest()
