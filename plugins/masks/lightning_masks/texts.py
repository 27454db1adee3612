"""The texts in answers that carry the codes of tokens: written in vLLM's API for each chunk of a choice, read in the gateway.

The invariant: the texts of a choice, read in order, give the code of each of its tokens; if one text is lost, those behind it
give none. Equal codes are sent once, compressed, and all codes of a request stay far below what the gateway takes.

A text has the size of the vocabulary, the number of codes in the texts before it, the number of the code of each of its tokens,
the lengths of its own codes, and these in base64: the next piece of one zlib stream. `SPENT` is sent instead of more than that.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MOST_CODES = 1 << 24
"""The most bytes of different codes for one request. Each may be an id, so four bytes in the trainer."""
MOST_SENT = 1 << 25
"""The most characters of texts for one request: half of the longest answer that the gateway takes (`LONGEST_ANSWER`)."""
SPENT = "spent"


@dataclass(slots=True)
class Budget:
    """What may still be sent for one request, whose choices share it."""

    codes: int = MOST_CODES
    sent: int = MOST_SENT


class Texts:
    """Writes the texts of one choice."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._packing = zlib.compressobj(1)
        self._numbers: dict[bytes, int] = {}
        """Each code's number, by the code itself or, if it is long, by its hash."""
        self._pieces: list[bytes] = []
        self._lengths: list[int] = []
        self._size = 0

    def note(self, size: int, code: bytes) -> int | None:
        """Take the code of a token and return its number; None if no text can carry it."""
        if self._budget.codes < 0 or self._size not in (0, size):
            return None
        self._size = size
        key = code if len(code) < 32 else hashlib.sha256(code).digest()
        if key not in self._numbers:
            self._budget.codes -= len(code)
            self._numbers[key] = len(self._numbers)
            self._lengths.append(len(code))
            self._pieces.append(self._packing.compress(code))
        return self._numbers[key]

    def text(self, numbers: Sequence[int | None]) -> str:
        """Return the text for the tokens whose codes have these numbers; empty if one has none."""
        if min(self._budget.codes, self._budget.sent) < 0:
            return SPENT
        known = [str(number) for number in numbers if number is not None]
        if not known or len(known) != len(numbers):
            return ""
        own = [str(length) for length in self._lengths]
        piece = b"".join((*self._pieces, self._packing.flush(zlib.Z_SYNC_FLUSH))) if own else b""
        base = len(self._numbers) - len(own)
        found = f"{self._size}:{base}:{','.join(known)}:{','.join(own)}:{base64.b64encode(piece).decode()}"
        self._budget.sent -= len(found)
        if self._budget.sent < 0:
            return SPENT
        self._pieces, self._lengths = [], []
        return found


def joined(texts: Sequence[str]) -> tuple[int, list[bytes]] | None:
    """Return the vocabulary's size and each token's code from the texts of all chunks of a choice, of which there is at least
    one; None if they were more than may be sent. Behind a text that is missing no code is found. Raises `ValueError` for other
    texts, and for texts of several vocabularies."""
    if SPENT in texts:
        return None
    sizes, found, codes, stream = set[int](), list[bytes](), list[bytes](), zlib.decompressobj()
    size_of_codes = 0
    for text in texts:
        size, base, numbers, lengths, piece = text.split(":")
        sizes.add(int(size))
        if not int(base):
            codes, stream = [], zlib.decompressobj()
        elif int(base) != len(codes):
            break
        own = [int(length) for length in lengths.split(",") if length]
        if (size_of_codes := size_of_codes + sum(own)) > 2 * MOST_CODES:  # the writer may overstep by its last code
            raise ValueError(f"its codes are of {size_of_codes} bytes")
        try:
            codes += _cut(stream, base64.b64decode(piece, validate=True), own)
            found += [codes[int(number)] for number in numbers.split(",")]
        except (IndexError, zlib.error) as error:
            raise ValueError(f"its codes cannot be read: {error}") from error
    if len(sizes) != 1:
        raise ValueError("the masks are of several vocabularies")
    return sizes.pop(), found


def _cut(stream: zlib._Decompress, piece: bytes, lengths: Sequence[int]) -> Iterable[bytes]:
    whole = sum(lengths)
    if lengths and (min(lengths) < 1 or whole > MOST_CODES):
        raise ValueError(f"its codes are of {whole} bytes")
    data = stream.decompress(piece, whole) if whole else b""
    if len(data) != whole:
        raise ValueError("its codes end early")
    at = 0
    for length in lengths:
        yield data[at : at + length]
        at += length
