"""What values are made of: JSON, and token arrays; and how much two of them begin with together.

The invariant: token arrays are `array.array` buffers that numpy and torch can read without a copy, and whoever holds one must
treat it as read-only.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from lightning.errors import ConfigError

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
TokenIds: TypeAlias = "array[int]"
"""`array('i')`: 32-bit token ids, exactly as the policy server returned them."""
LogProbs: TypeAlias = "array[float]"
"""`array('f')`: 32-bit log-probabilities (nats), one per response token; empty when the engine gave none."""

MAX_DEPTH = 100
"""Lists and mappings inside one another in a task or a resource."""


def as_texts(given: Iterable[str], what: str) -> tuple[str, ...]:
    """What somebody gave as several texts: each place where a sequence of texts is taken asks here.

    Raises `ConfigError`, naming `what` it is, for one text, whose letters nobody means, and for what is no text.
    """
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise ConfigError(f"{what} is {given!r:.200}, not a list of texts: write {what}=[...]")
    texts = tuple(given)
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise ConfigError(f"{what}[{place}] is {text!r:.200}, not a text: give a list of texts")
    return texts


def token_ids(values: Sequence[int] = ()) -> TokenIds:
    """Pack integers into the project's token array."""
    return array("i", values)


def logprobs(values: Sequence[float] = ()) -> LogProbs:
    """Pack floats into the project's log-probability array."""
    return array("f", values)


def shared_prefix(one: bytes, other: bytes, item: int = 1) -> int:
    """How many items of `item` bytes each both begin with."""
    limit = min(len(one), len(other)) // item
    if one[: limit * item] == other[: limit * item]:
        return limit
    if one[:item] != other[:item]:
        return 0
    low, high = 1, limit  # one[:low] is shared, one[:high] is not: bytes compare far faster than Python counts
    while high - low > 1:
        middle = (low + high) // 2
        if one[low * item : middle * item] == other[low * item : middle * item]:
            low = middle
        else:
            high = middle
    return low


def not_json(value: object, depth: int = 0) -> tuple[str, str] | None:
    """Where inside `value` something is not JSON (as `['key'][0]`) and what it is; None when all of it is JSON."""
    if value is None or isinstance(value, (str, int)):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else ("", f"is {value}, not a finite number")
    if not isinstance(value, (list, tuple, dict)):
        return "", f"is a {type(value).__qualname__}"
    if depth == MAX_DEPTH:
        return "", f"is nested more than {MAX_DEPTH} deep, or contains itself"
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(value, dict) and not isinstance(key, str):
            return "", f"has the key {key!r}, which is no string"
        if found := not_json(item, depth + 1):
            return f"[{key!r}]{found[0]}", found[1]
    return None
