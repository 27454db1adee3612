"""Attributes of spans: the names of the GenAI semantic conventions, which are still in development there, and values as
bounded JSON.

The invariant: no other module spells out such a name, so that a renamed one is changed in one place; and whatever a sender
puts into an attribute, what is kept is JSON of at most `MAX_TEXT` characters a value.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Final

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


OPERATION: Final = "gen_ai.operation.name"
AGENT_NAME: Final = "gen_ai.agent.name"
TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_CALL_ID: Final = "gen_ai.tool.call.id"
TOOL_ARGUMENTS: Final = "gen_ai.tool.call.arguments"
TOOL_RESULT: Final = "gen_ai.tool.call.result"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
RESPONSE_ID: Final = "gen_ai.response.id"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
ERROR_TYPE: Final = "error.type"
SERVICE_NAME: Final = "service.name"
EXCEPTION_MESSAGE: Final = "exception.message"
EXCEPTION_TYPE: Final = "exception.type"

INVOKE_AGENT: Final = "invoke_agent"
EXECUTE_TOOL: Final = "execute_tool"
CHAT: Final = "chat"

UNKNOWN_TOOL: Final = "unknown_tool"
"""The type of error, and the kind of the tool event, of a tool that the model has invented."""
