"""The names of OpenTelemetry's conventions for generative AI that are read here.

They are marked "Development" and may change with any release of the conventions: this is the one place that knows them.
"""

OPERATION = "gen_ai.operation.name"
AGENT = "gen_ai.agent.name"
TOOL = "gen_ai.tool.name"
TOOL_CALL = "gen_ai.tool.call.id"
TOOL_ARGUMENTS = "gen_ai.tool.call.arguments"
TOOL_RESULT = "gen_ai.tool.call.result"

AGENT_OPERATIONS = ("invoke_agent", "create_agent")
TOOL_OPERATION = "execute_tool"
MODEL_OPERATIONS = ("chat", "generate_content", "text_completion")

MERGED_TOOLS = "(merged tools)"
"""The tool's name on a span that stands for no run: Google ADK's, for the joined answers of tools that ran at once."""
NO_CALL_ID = "<not specified>"
"""Google ADK's call id of a tool that raised."""

EXCEPTION_EVENT = "exception"
EXCEPTION_TYPE = "exception.type"
EXCEPTION_MESSAGE = "exception.message"
