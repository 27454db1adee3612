"""Nouns as JSON, for the control API: one codec for each type, derived from the type itself.

The invariant: `decode(read(write(encode(x)))) == x`, and whatever else arrives is a `DataError` that names the field. A field
that is added to a noun travels at once, and is in the API's description at once.

Token arrays travel as base64 of little-endian int32 (ids) or float32 (log-probabilities), which keeps every bit. Numbers that
JSON does not have travel as the text `NaN`, `Infinity` or `-Infinity`, as in protobuf's JSON. The standard library reads and
writes, not orjson: that would turn integers beyond 64 bits into floats and NaN into null without a word, and refuse the lone
surrogates that agents send.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, Final, Generic, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from lightning.config.other_words import did_you_mean
from lightning.errors import DataError
from lightning.store import codec as arrays
from lightning.store.protocol import Page
from lightning.types import Json

T = TypeVar("T")
Schema = dict[str, Any]
NUMBERS: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Numbers that JSON does not have."""
INT_LIMIT: Final = 2**63
WORDS_IN_BASE64: Final = "^([A-Za-z0-9+/]{16})*([A-Za-z0-9+/]{6}==|[A-Za-z0-9+/]{11}=)?$"
"""Any number of words of four bytes: three of them fill sixteen characters."""
REF: Final = "#/components/schemas/"


@dataclass(frozen=True, slots=True)
class Codec(Generic[T]):
    """How one type travels as JSON. `decode(value, where, strict)` raises `DataError` that names `where`. With `strict` it
    refuses fields that the type does not have; without, it ignores them (a newer server may send more). `encode` raises
    `DataError` for a value of another type."""

    encode: Callable[[T], Json]
    decode: Callable[[object, str, bool], T]
    schema: Schema
    uses: tuple[type, ...] = ()
    """The classes that `schema` refers to by name."""


class _Ids:
    """Stands for `TokenIds` while hints are resolved."""


class _LogProbs:
    """Stands for `LogProbs` while hints are resolved."""


class AnyJson:
    """Stands for `Json` where a type is needed at run time."""


LOCAL: Final = {"TokenIds": _Ids, "LogProbs": _LogProbs, "Json": AnyJson}
"""What these names stand for while the type hints of nouns are resolved."""


def write(value: Json) -> bytes:
    """Return JSON text. Raises `DataError` for a value that is not JSON."""
    try:
        try:
            return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
        except ValueError:
            return json.dumps(_with_named_numbers(value), allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"a value is not JSON ({error}): use only None, bool, numbers, text, lists and dicts"
        ) from error


def read(payload: bytes, what: str) -> object:
    """Parse JSON. Raises `DataError` naming `what`."""
    try:
        return cast("object", json.loads(payload, parse_constant=_no_constant))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} is not JSON: {error}") from None


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no number of JSON: send it as the text {name!r} where a number may be one")


def _with_named_numbers(value: Json) -> Json:
    if isinstance(value, float) and not math.isfinite(value):
        return _number_to_json(value)
    if isinstance(value, Mapping):
        return {key: _with_named_numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_named_numbers(item) for item in value]
    return value


def to_bytes(value: object, hint: object = None) -> bytes:
    """Return a value as JSON text, encoded as the type `hint` (None: its own type). Raises `DataError` for a value of another
    type."""
    return write(codec_of(type(value) if hint is None else hint).encode(value))


def from_bytes(hint: object, payload: bytes, what: str, strict: bool = False) -> Any:
    """Read JSON text as a value of a type. Raises `DataError` that names `what` and the field."""
    return codec_of(hint).decode(read(payload, what), what, strict)


# scalars --------------------------------------------------------------------------------------------------------


def _number_to_json(value: float) -> Json:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _is_number(value: object, *kinds: type) -> bool:
    """Whether a value is of one of these types of numbers; booleans are not."""
    return isinstance(value, kinds) and not isinstance(value, bool)


def _double(value: object) -> float:
    if isinstance(value, str) and value in NUMBERS:
        return NUMBERS[value]
    if not _is_number(value, int, float):
        raise ValueError
    return float(cast("float", value))


def _int64(value: object) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not -INT_LIMIT <= value < INT_LIMIT:
        raise ValueError
    return value


def _from_base64(value: object) -> bytes:
    return base64.b64decode(value if isinstance(value, str) else "?", validate=True)


def _only(kind: type) -> Callable[[object], Any]:
    def same(value: object) -> object:
        if not isinstance(value, kind):
            raise TypeError
        return value

    return same


def _scalar(
    expected: str,
    schema: Schema,
    read: Callable[[object], Any],
    is_one: Callable[[object], bool],
    write: Callable[[Any], Json],
    kind: str = "",
) -> Codec[Any]:
    """Make the codec of a scalar type. `read` turns the JSON value into the type's, or raises `TypeError` or `ValueError`; the
    error then says what was `expected`. `is_one` tells whether a value to be encoded is of the type, which an error calls
    `kind`; `write` encodes it."""

    def encode(value: Any) -> Json:
        if not is_one(value):
            raise DataError(f"{value!r:.80} is not {kind or expected}")
        return write(value)

    def decode(value: object, where: str, strict: bool) -> Any:
        try:
            return read(value)
        except (TypeError, ValueError, OverflowError):  # binascii's own error among them
            raise wrong(value, where, expected) from None

    return Codec(encode, decode, schema)


def _array(unpack: Callable[[bytes], Any], code: str, of: str) -> Codec[Any]:
    expected = f"base64 of little-endian {of}"
    schema = {
        "type": "string",
        "contentEncoding": "base64",
        "pattern": WORDS_IN_BASE64,
        "description": f"{expected}, four bytes each",
    }
    return _scalar(
        expected,
        schema,
        lambda value: unpack(_from_base64(value)),
        lambda value: arrays.is_packable(value, code),
        lambda value: base64.b64encode(arrays.pack(value)).decode(),
        f"a memoryview of format {code!r}, as lightning.types.token_ids() and logprobs() build",
    )


TEXT: Final = _scalar("a text", {"type": "string"}, _only(str), lambda value: isinstance(value, str), str)
_SCALARS: Final[Mapping[object, Codec[Any]]] = {
    str: TEXT,
    bool: _scalar("true or false", {"type": "boolean"}, _only(bool), lambda value: True, bool),
    int: _scalar(
        "an integer of 64 bits",
        {"type": "integer", "format": "int64", "minimum": -INT_LIMIT, "maximum": INT_LIMIT - 1},
        _int64,
        lambda value: _is_number(value, int),
        lambda value: value,
        "an integer",
    ),
    float: _scalar(
        "a number that a double can hold",
        {"anyOf": [{"type": "number"}, {"enum": list(NUMBERS)}]},
        _double,
        lambda value: _is_number(value, int, float),
        _number_to_json,
        "a number",
    ),
    bytes: _scalar(
        "base64",
        {"type": "string", "contentEncoding": "base64", "description": "base64"},
        _from_base64,
        lambda value: isinstance(value, bytes),
        lambda value: base64.b64encode(value).decode(),
        "bytes",
    ),
    _Ids: _array(arrays.unpack_ids, "i", "int32"),
    _LogProbs: _array(arrays.unpack_logprobs, "f", "float32"),
    AnyJson: Codec(lambda value: value, lambda value, where, strict: cast("Any", value), {"description": "any JSON"}),
}


# what is made of others -----------------------------------------------------------------------------------------


def codec_of(hint: object) -> Codec[Any]:
    """Return the codec of a type: a scalar, an enumeration, a dataclass, or a sequence, mapping or optional of these. Raises
    `TypeError` for other types."""
    return _codec_of(cast("Any", hint))


@cache
def _codec_of(hint: Any) -> Codec[Any]:
    if hint in _SCALARS:
        return _SCALARS[hint]
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType) and len(parts) == 2 and type(None) in parts:
        return _optional(codec_of(next(part for part in parts if part is not type(None))))
    if origin is Page:
        return _page(codec_of(parts[0]))
    if origin is tuple:
        return _list(codec_of(parts[0])) if parts[-1] is ... else _fixed([codec_of(part) for part in parts])
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return _list(codec_of(parts[0]), list if origin is list else tuple)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(codec_of(parts[1]))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enumeration(hint)
    if dataclasses.is_dataclass(hint):
        return _record(cast("type", hint))
    raise TypeError(f"{hint!r} has no form on the wire")


def _optional(inner: Codec[Any]) -> Codec[Any]:
    return Codec(
        lambda value: None if value is None else inner.encode(value),
        lambda value, where, strict: None if value is None else inner.decode(value, where, strict),
        {"anyOf": [inner.schema, {"type": "null"}]},
        inner.uses,
    )


def _list(inner: Codec[Any], kind: type[Sequence[Any]] = tuple) -> Codec[Any]:
    make = cast("Callable[[Iterable[Any]], Sequence[Any]]", kind)

    def decode(value: object, where: str, strict: bool) -> Sequence[Any]:
        if not isinstance(value, list):
            raise wrong(value, where, "a list")
        return make(inner.decode(item, f"{where}[{i}]", strict) for i, item in enumerate(value))

    def encode(value: Sequence[Any]) -> Json:
        return [inner.encode(item) for item in value]

    return Codec(encode, decode, {"type": "array", "items": inner.schema}, inner.uses)


def _page(inner: Codec[Any]) -> Codec[Any]:
    items = _list(inner)

    def decode(value: object, where: str, strict: bool) -> Page[Any]:
        if not isinstance(value, dict):
            raise wrong(value, where, "a page")
        cursor = TEXT.decode(value.get("cursor", ""), f"{where}.cursor", strict)
        return Page(items.decode(value.get("items"), f"{where}.items", strict), cursor)

    cursor = {"type": "string", "description": "Asks for the next page; empty when this is the last."}
    schema = {
        "type": "object",
        "properties": {"items": items.schema, "cursor": cursor},
        "required": ["items", "cursor"],
    }
    return Codec(lambda page: {"items": items.encode(page.items), "cursor": page.cursor}, decode, schema, inner.uses)


def _fixed(inner: Sequence[Codec[Any]]) -> Codec[Any]:
    def decode(value: object, where: str, strict: bool) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(inner):
            raise wrong(value, where, f"a list of {len(inner)}")
        return tuple(
            part.decode(item, f"{where}[{i}]", strict) for i, (part, item) in enumerate(zip(inner, value, strict=True))
        )

    def encode(value: Sequence[Any]) -> Json:
        return [part.encode(item) for part, item in zip(inner, value, strict=True)]

    schema = {"type": "array", "prefixItems": [part.schema for part in inner], "items": False, "minItems": len(inner)}
    return Codec(encode, decode, schema, tuple(use for part in inner for use in part.uses))


def _mapping(inner: Codec[Any]) -> Codec[Any]:
    def decode(value: object, where: str, strict: bool) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise wrong(value, where, "an object")
        return {key: inner.decode(item, f"{where}[{key[:40]!r}]", strict) for key, item in value.items()}

    def encode(value: Mapping[str, Any]) -> Json:
        return {cast("str", TEXT.encode(key)): inner.encode(item) for key, item in value.items()}

    return Codec(encode, decode, {"type": "object", "additionalProperties": inner.schema}, inner.uses)


def _enumeration(cls: type[Enum]) -> Codec[Any]:
    known = [str(member.value) for member in cls]

    def decode(value: object, where: str, strict: bool) -> Enum:
        if not isinstance(value, str) or value not in known:
            raise wrong(value, where, f"one of {', '.join(known)}")
        return cls(value)

    def encode(value: Enum) -> Json:
        return decode(value, cls.__name__, True).value  # type: ignore[no-any-return]

    return Codec(encode, decode, {"$ref": REF + cls.__name__}, (cls,))


def _record(cls: type) -> Codec[Any]:
    """Make the codec of a dataclass: an object with its fields. Fields that have a default may be left out when it is
    decoded."""
    fields = {field.name: codec_of(hint) for field, hint in _fields(cls)}
    required = frozenset(_required(cls))

    def encode(value: Any) -> Json:
        if not isinstance(value, cls):
            raise DataError(f"{value!r} is no {cls.__name__}")
        return {name: part.encode(getattr(value, name)) for name, part in fields.items()}

    def decode(value: object, where: str, strict: bool) -> Any:
        if not isinstance(value, dict):
            raise wrong(value, where, f"an object, a {cls.__name__}")
        if strict:
            check_names(value, fields, where)
        if missing := required - value.keys():
            raise DataError(f"{where} lacks {', '.join(map(repr, sorted(missing)))}, which a {cls.__name__} must have")
        return cls(
            **{
                name: part.decode(value[name], f"{where}.{name}", strict)
                for name, part in fields.items()
                if name in value
            }
        )

    return Codec(encode, decode, {"$ref": REF + cls.__name__}, (cls,))


def _fields(cls: type) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = get_type_hints(cls, localns=LOCAL)
    return [(field, hints[field.name]) for field in dataclasses.fields(cls)]


def _required(cls: type) -> list[str]:
    missing = dataclasses.MISSING
    return [
        field.name for field in dataclasses.fields(cls) if field.default is missing and field.default_factory is missing
    ]


def describe(cls: type) -> tuple[Schema, tuple[type, ...]]:
    """Return the JSON schema of a class that codecs refer to by name, and the classes that this schema refers to.

    A field's `metadata` is added to its schema.
    """
    description = " ".join((cls.__doc__ or "").split())
    if issubclass(cls, Enum):
        return {"type": "string", "enum": [str(member.value) for member in cls], "description": description}, ()
    codecs = [(field, codec_of(hint)) for field, hint in _fields(cls)]
    schema: Schema = {
        "type": "object",
        "description": description,
        "properties": {field.name: part.schema | dict(field.metadata) for field, part in codecs},
        "additionalProperties": False,
    }
    if required := _required(cls):
        schema["required"] = required
    return schema, tuple(dict.fromkeys(use for _, part in codecs for use in part.uses))


def check_names(given: Mapping[str, object], known: Mapping[str, object], where: str) -> None:
    """Raise `DataError` for the first name that is not known, with the nearest known one."""
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known).removeprefix("; ") or f"known: {', '.join(known) or 'none'}"
            raise DataError(f"{where} has no field {name[:80]!r}: {hint}")


def wrong(value: object, where: str, expected: str) -> DataError:
    """Return the error for a value of another type than `expected`."""
    return DataError(f"{where} is {_shown(value)}; it must be {expected}")


def _shown(value: object) -> str:
    if isinstance(value, int) and not -INT_LIMIT <= value < INT_LIMIT:
        return "a very large integer"  # whose digits take Python long, or are refused
    text = json.dumps(value) if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__
    return text if len(text) <= 80 else f"{text[:80]}…"
