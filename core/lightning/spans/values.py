"""Attributes of spans as bounded JSON.

The invariant: whatever a sender puts into an attribute, what is kept is JSON of at most `MAX_TEXT` characters a value.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Mapping

from lightning.instrument.texts import clip
from lightning.types import Json

MAX_TEXT = 4096
"""Characters of one attribute's value, as of everything that is reported about a tool."""
MAX_ATTRIBUTES = 128
"""Attributes of one span, OpenTelemetry's own default; more are left out."""
MAX_NAME = 256
"""Characters of a name."""


def bounded(pairs: Iterable[tuple[str, Json]]) -> dict[str, Json]:
    """Attributes within the limits; the first of those with one key stays."""
    kept: dict[str, Json] = {}
    for key, value in pairs:
        if len(kept) == MAX_ATTRIBUTES:
            break
        kept.setdefault(key[:MAX_NAME], _value(value))
    return kept


def _value(value: Json) -> Json:
    if isinstance(value, str):
        return clip(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if not isinstance(value, list | dict):
        return value
    with contextlib.suppress(ValueError):  # not-a-number somewhere inside, which only a text can hold
        if len(json.dumps(value, allow_nan=False)) <= MAX_TEXT:
            return value
    return clip(json.dumps(value))


def text(attributes: Mapping[str, Json], key: str) -> str:
    """An attribute as text; empty when it is missing."""
    value = attributes.get(key)
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)
