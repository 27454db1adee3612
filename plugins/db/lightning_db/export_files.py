"""Writes rows to files: JSON lines, or Parquet with the extra `parquet`.

The invariant: a file appears whole or not at all, and no file is overwritten. Memory holds one row, or one group of rows of
bounded size, for a table of any length.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import orjson
from lightning.errors import MissingExtraError, StoreError
from lightning.safe_text import plain_json

from lightning_db.export import Cell, ColumnKind, Record

if TYPE_CHECKING:
    import pyarrow as pa

GROUP_ROWS: Final = 10_000
GROUP_BYTES: Final = 16 << 20
"""A group of rows of a Parquet file ends at one of these bounds. Bytes are those of token arrays, texts and JSON."""


class Format(StrEnum):
    """The file format of an export."""

    JSONL = "jsonl"
    PARQUET = "parquet"


async def write_table(
    rows: AsyncIterator[Record], columns: Mapping[str, ColumnKind], kind: Format, target: Path
) -> int:
    """Write rows to the new file `target`; return how many. Raises `StoreError` for a file that exists or cannot be
    written, `MissingExtraError` when there is no pyarrow for Parquet."""
    with new_file(target) as unfinished:
        sink = JsonLines(unfinished.open("wb")) if kind is Format.JSONL else Parquet(unfinished, columns)
        with closing(sink):
            return await _write(rows, sink)


async def write_lines(rows: AsyncIterator[Record], stream: BinaryIO) -> int:
    """Write rows as JSON lines to an open stream; return how many."""
    return await _write(rows, JsonLines(stream))


async def _write(rows: AsyncIterator[Record], sink: JsonLines | Parquet) -> int:
    count = 0
    async for record in rows:
        sink.write(record)
        count += 1
    return count


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """A context with a path to write to; the file becomes `target` if the block ends without an exception. Raises `StoreError`
    if `target` exists."""
    if target.exists():
        raise StoreError(f"{target} exists already: name another file, nothing is written over")
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield unfinished
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        unfinished.rename(target)
    except OSError as error:
        raise StoreError(f"cannot write {target}: {error}. Free some space, or choose another place") from error
    finally:
        if unfinished.exists():
            unfinished.unlink()


class JsonLines:
    """A file with one JSON object a line. Numbers that JSON does not have (NaN, infinity) become null."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, record: Record) -> None:
        """Add a row."""
        self._stream.write(json_line(record))

    def close(self) -> None:
        """Flush and close."""
        self._stream.close()


def json_line(record: Record) -> bytes:
    """Return a row as JSON with a line feed."""
    try:
        return orjson.dumps(record, default=_listed, option=orjson.OPT_APPEND_NEWLINE)
    except (
        TypeError
    ):  # a lone surrogate, or an integer of more than 64 bits: both are JSON, which orjson does not write
        return json.dumps(plain_json(record), separators=(",", ":")).encode() + b"\n"


class Parquet:
    """A Parquet file of typed columns, compressed with zstd. Raises `MissingExtraError` without pyarrow."""

    def __init__(self, path: Path, columns: Mapping[str, ColumnKind]) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise MissingExtraError("parquet", "pyarrow") from error
        self._arrow, self._columns = pa, columns
        self._schema = pa.schema([pa.field(name, _arrow_type(pa, kind)) for name, kind in columns.items()])
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")
        self._rows: list[list[Any]] = []
        self._bytes = 0

    def write(self, record: Record) -> None:
        """Add a row, and write the present group of rows if it is full."""
        row = [_arrow_value(record[name], kind) for name, kind in self._columns.items()]
        self._rows.append(row)
        self._bytes += sum(_size(value) for value in row)
        if len(self._rows) >= GROUP_ROWS or self._bytes >= GROUP_BYTES:
            self._flush()

    def close(self) -> None:
        """Write the remaining rows and the end of the file."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            columns = [
                self._arrow.array(list(values), type=field.type)
                for values, field in zip(zip(*self._rows, strict=True), self._schema, strict=True)
            ]
            self._writer.write_batch(self._arrow.record_batch(columns, schema=self._schema))
        self._rows, self._bytes = [], 0


def _arrow_type(arrow: Any, kind: ColumnKind) -> pa.DataType:
    types = {
        ColumnKind.TEXT: arrow.string(),
        ColumnKind.INTEGER: arrow.int64(),
        ColumnKind.NUMBER: arrow.float64(),
        ColumnKind.TRUTH: arrow.bool_(),
        ColumnKind.JSON: arrow.string(),
        ColumnKind.TEXTS: arrow.list_(arrow.string()),
        ColumnKind.IDS: arrow.list_(arrow.int32()),
        ColumnKind.LOGPROBS: arrow.list_(arrow.float32()),
    }
    found: pa.DataType = types[kind]
    return found


def _arrow_value(value: Cell, kind: ColumnKind) -> Any:
    """Return a cell as pyarrow takes it: token arrays as numpy arrays, JSON as text, other texts without lone surrogates."""
    if isinstance(value, memoryview):
        import numpy as np

        return np.array(value, dtype=np.int32 if value.format == "i" else np.float32)
    if kind is ColumnKind.JSON:
        return None if value is None else json.dumps(plain_json(value), separators=(",", ":"))
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if kind is ColumnKind.TEXTS and isinstance(value, Sequence):
        return [str(text).encode("utf-8", "backslashreplace").decode() for text in value]
    return value


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    return int(getattr(value, "nbytes", 8))


def _listed(value: object) -> object:
    """Return a list for a token array, which orjson cannot write."""
    if isinstance(value, memoryview):
        return value.tolist()
    raise TypeError(f"{type(value).__qualname__} is not JSON")
