"""What a run's record says of functions and objects that JSON has no word for: which they are, and whether they were edited.

The invariant: the same source gives the same words, in every process and every Python. Only the function itself is looked at,
not what it calls, closes over or reads from its module, nor the state of an object that is no dataclass.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import textwrap
from collections.abc import Mapping
from functools import partial
from tokenize import TokenError
from types import CodeType

import numpy as np

from lightning.types import Json


def type_name(value: object) -> str:
    """The type of an argument as a run's record says it."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def recorded(value: object) -> object:
    """What stands for a value in JSON, as the `default` of `json.dumps`.

    A function: `{"function": its name, "sha256": of its source}` · a `functools.partial`: its parts · a dataclass: its `type`
    and fields · a scalar of numpy: its value · any other object: its type as `object`, and its `repr` unless that holds an
    address. An object that is called has the `sha256` of its class in its place, unless that is ours: it changes with a
    release, and what it did is found by the digests of the steps.
    """
    if isinstance(value, partial):
        return {"partial": value.func, "args": list(value.args), "keywords": value.keywords}
    if isinstance(value, type) or inspect.isroutine(value):
        name = f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', repr(type(value)))}"
        return {"function": name} | _edition(value)
    is_ours = type_name(value).startswith(("lightning.", "lightning_"))
    edition = _edition(type(value)) if callable(value) and not is_ours else {}
    if dataclasses.is_dataclass(value):
        fields = {item.name: getattr(value, item.name) for item in dataclasses.fields(value) if item.init}
        return {"type": type_name(value)} | fields | edition
    if isinstance(value, np.generic) and not isinstance(plain := value.item(), np.generic):
        return plain
    return {"object": type_name(value)} | (edition if callable(value) else _repr(value))


def _repr(value: object) -> dict[str, object]:
    """The `repr` of an object, of a set in an order that does not differ between processes; nothing where it has an address."""
    text = f"{{{', '.join(sorted(map(repr, value)))}}}" if isinstance(value, (set, frozenset)) else repr(value)
    return {} if " at 0x" in text else {"repr": text}


def holds_code(value: Json) -> bool:
    """Whether something of a record stands for a function or an object, which only the user's code can make again."""
    if isinstance(value, Mapping):
        named = isinstance(value.get("function"), str) or isinstance(value.get("object"), str)
        return named or any(map(holds_code, value.values()))
    return isinstance(value, (list, tuple)) and any(map(holds_code, value))


def _edition(function: object) -> dict[str, object]:
    """The SHA-256 of a function's or a class's source, of its bytecode where there is none; nothing where it is built in."""
    text = _source(function)
    if text is None:
        code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
        if not isinstance(code, CodeType):
            return {}
        text = _compiled(code)
    return {"sha256": hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()}


def _source(function: object) -> str | None:
    try:
        if getattr(function, "__name__", "") == "<lambda>":
            return _lambda_source(function)
        return textwrap.dedent(inspect.getsource(function))  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError, TokenError):  # typed in, made by exec, built in, or its file is gone
        return None


def _lambda_source(function: object) -> str | None:
    """The lambda alone: what else stands on its lines (`resume=True`) is no part of it."""
    code: CodeType = function.__code__  # type: ignore[attr-defined]
    lines, _ = inspect.findsource(code)
    text = "".join(lines)
    places = [place for place in code.co_positions() if None not in place and place[0::2] != place[1::2]]
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Lambda) or node.lineno != code.co_firstlineno:
            continue
        body = node.body
        first, last = (body.lineno, body.col_offset), (body.end_lineno, body.end_col_offset)
        if all(first <= (line, column) and (end, stop) <= last for line, end, column, stop in places):
            segment = ast.get_source_segment(text, node) or ""
            found.append((len(segment), segment))
    return min(found)[1] if found else None


def _compiled(code: CodeType) -> str:
    """The bytecode with its names and constants. It is another in the next Python, but not in the next process."""
    constants = [_constant(value) for value in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


def _constant(value: object) -> str:
    if isinstance(value, CodeType):
        return _compiled(value)
    if isinstance(value, frozenset):  # in an order that differs between processes
        return str(sorted(map(_constant, value)))
    return str([_constant(item) for item in value]) if isinstance(value, tuple) else repr(value)
