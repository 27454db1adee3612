"""Translate tools of the Responses API that the client runs and that are not functions: `custom`, `local_shell`, `shell`,
`apply_patch`.

The invariant: the model sees each as a function of vLLM's chat, and the client sees the item type of its tool, in answers and
in the conversation that it sends back. A call whose arguments do not fit its tool stays a function call: nothing is made up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.gateway.dialects import refuse_parameter
from lightning.gateway.http import Body

from lightning_dialects.translated import items_of, object_field, text_field

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
LIST = {"type": "array", "items": TEXT}


def _schema(required: Sequence[str], **properties: Mapping[str, object]) -> Body:
    return {"type": "object", "properties": properties, "required": list(required)}


@dataclass(frozen=True, slots=True)
class ClientTool:
    """One kind of client tool: the function that the model sees, the `field` of the client's item that has the arguments, and
    the arguments that a call must have (`needs`), with their types."""

    kind: str
    description: str
    parameters: Body
    field: str
    needs: Mapping[str, type]

    @property
    def call(self) -> str:
        """The type of the item for a call of this tool."""
        return f"{self.kind}_tool_call" if self.kind == "custom" else f"{self.kind}_call"


KINDS = {
    tool.kind: tool
    for tool in (
        ClientTool("custom", "", _schema(["input"], input=TEXT), "input", {"input": str}),
        ClientTool(
            "local_shell",
            "Runs a command on the local machine.",
            _schema(["command"], command=LIST, working_directory=TEXT, timeout_ms=NUMBER),
            "action",
            {"command": list},
        ),
        ClientTool(
            "shell",
            "Runs shell commands, each in a shell of its own.",
            _schema(["commands"], commands=LIST, timeout_ms=NUMBER, max_output_length=NUMBER),
            "action",
            {"commands": list},
        ),
        ClientTool(
            "apply_patch",
            "Creates, updates or deletes a file: a diff in the V4A format (no diff to delete).",
            _schema(
                ["operation"],
                operation=_schema(
                    ["type", "path"],
                    type={"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
                    path=TEXT,
                    diff=TEXT,
                ),
            ),
            "operation",
            {"operation": dict},
        ),
    )
}
CALLS = {tool.call: tool for tool in KINDS.values()}
OUTPUTS = frozenset(f"{call}_output" for call in CALLS)
ON_THE_CLIENT = (None, "local")
"""The types of environment in which the client itself runs a `shell`."""


def is_of_the_client(tool: Body) -> bool:
    """Return whether a tool of a request is one of `KINDS` that the client runs."""
    kind = tool.get("type")
    return kind in KINDS and (kind != "shell" or (tool.get("environment") or {}).get("type") in ON_THE_CLIENT)


def function_of(tool: Body, where: str) -> Body:
    """Return the function that the model sees in place of a client tool. `where` is the tool's place, for errors."""
    known = KINDS[tool["type"]]
    if known.kind != "custom":
        return {"name": known.kind, "description": known.description, "parameters": known.parameters}
    description, form = str(tool.get("description") or ""), object_field(tool, "format")
    if form.get("type") == "grammar":
        description += f"\n\nThe input follows this grammar ({form.get('syntax')}):\n{form.get('definition')}"
    return {"name": text_field(tool, "name", where), "description": description.strip(), "parameters": known.parameters}


def client_tools(asked: Body) -> dict[str, ClientTool]:
    """Return the client tools of a request, by the name of the function that the model sees."""
    tools = [tool for tool in items_of(asked.get("tools") or [], "tools") if is_of_the_client(tool)]
    return {str(tool.get("name") if tool["type"] == "custom" else tool["type"]): KINDS[tool["type"]] for tool in tools}


def item_of(tool: ClientTool, name: str, arguments: str) -> Body | None:
    """Return the client's item for a call of a tool, without its ids; None if the arguments do not fit the tool."""
    try:
        said = json.loads(arguments)
    except ValueError:
        return None
    if not isinstance(said, dict) or not all(isinstance(said.get(key), kind) for key, kind in tool.needs.items()):
        return None
    if tool.kind == "custom":
        return {"type": tool.call, "name": name, "input": said["input"]}
    if tool.kind == "apply_patch":
        return {"type": tool.call, "operation": said["operation"]}
    action: dict[str, Any] = {key: said.get(key) for key in tool.parameters["properties"] if key in said}
    return {
        "type": tool.call,
        "action": {"type": "exec", "env": {}, **action} if tool.kind == "local_shell" else action,
    }


def function_call(item: Body, where: str) -> Body:
    """Return the function call that a client's item came from. Raises `RefusalError` (422) for an item of the wrong shape."""
    tool = CALLS[item["type"]]
    arguments: Body
    if tool.kind == "custom":
        name, arguments = text_field(item, "name", where), {"input": text_field(item, "input", where)}
    else:
        said, name = item.get(tool.field), tool.kind
        if not isinstance(said, dict):
            raise refuse_parameter(f"{where}.{tool.field}", f"must be an object, not {type(said).__name__}.")
        known = tool.parameters["properties"]
        arguments = (
            {"operation": said} if tool.kind == "apply_patch" else {key: said[key] for key in known if key in said}
        )
    call_id = item.get("call_id") or text_field(item, "id", where)
    return {"name": name, "call_id": call_id, "arguments": json.dumps(arguments, ensure_ascii=False)}


def output_of(item: Body, where: str) -> Body:
    """Return the result of a client tool as the output of a function: text as it is, anything else as JSON."""
    output, status = item.get("output"), item.get("status")
    if not isinstance(output, str):
        only_status = output is None and isinstance(status, str)
        output = status if only_status else json.dumps(output, ensure_ascii=False)
    call_id = item.get("call_id") or text_field(item, "id", where)
    return {"call_id": call_id, "output": output}
