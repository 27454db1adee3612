"""The names of spans' attributes in the GenAI semantic conventions, which are still in development.

The invariant: no other module contains such a name, so that a renamed one is changed in one place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from lightning.types import Json

MAX_NAME = 256
"""The most characters of a name."""


def text(attributes: Mapping[str, Json], key: str) -> str:
    """Return an attribute as text; empty when it is missing."""
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
AGENT_OPERATIONS: Final = (INVOKE_AGENT, "create_agent")
MODEL_OPERATIONS: Final = (CHAT, "generate_content", "text_completion")

EXCEPTION_EVENT: Final = "exception"
MERGED_TOOLS: Final = "(merged tools)"
"""The tool's name on a span that is no run: Google ADK uses it for the joined answers of parallel tools."""
NO_CALL_ID: Final = "<not specified>"
"""Google ADK's call id for a tool that raised."""

UNKNOWN_TOOL: Final = "unknown_tool"
"""The error type, and the kind of the tool event, of a tool that the model invented."""
