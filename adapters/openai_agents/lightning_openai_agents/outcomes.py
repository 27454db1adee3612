"""What the SDK's spans do not say of a tool run: its call's id, a timeout, a guardrail's refusal, an MCP server's `isError`;
all of the run of a tool that is no function: a shell, a patch, a computer, a custom tool.

The invariant: the SDK's functions get and return what they did; the last undo puts back the very ones that were there.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import lightning
from agents.exceptions import ToolTimeoutError
from agents.items import ToolApprovalItem
from agents.mcp import MCPUtil
from agents.run_internal import tool_actions, turn_resolution
from agents.run_internal.tool_execution import get_trace_tool_error
from agents.tool_context import ToolContext
from agents.tool_guardrails import ToolInputGuardrail, ToolOutputGuardrail
from lightning.instrument import Attachment, ReplacedMethods
from pydantic_core import to_jsonable_python

if TYPE_CHECKING:
    from lightning_openai_agents.steps import Step

_run: ContextVar[ToolRun | None] = ContextVar("lightning_openai_agents_tool_run", default=None)
ACTIONS = {
    tool_actions.ComputerAction: "computer_tool",
    tool_actions.LocalShellAction: "local_shell_tool",
    tool_actions.ShellAction: "shell_tool",
    tool_actions.CustomToolAction: "custom_tool",
    tool_actions.ApplyPatchAction: "apply_patch_tool",
}
"""Who runs a tool that is no function, and where the call that it gets has the tool."""
ASKED = ("actions", "action", "operations", "operation", "input")
"""Where the model's item has what it asks of such a tool."""


def _innermost() -> Step | None:
    return next((found for here in watching.users if (found := here()) is not None), None)


def tool_step() -> Step | None:
    """The step of the tool run that this code belongs to."""
    step = _innermost()
    return step if step is not None and step.data.type == "function" else None


def told_by_run(step: Step) -> bool:
    """Whether a step that begins is that of a `ToolRun`, which reports itself."""
    run = _run.get()
    return run is not None and run.takes(step)


class ToolRun:
    """The run of a tool that is no function. It may have a span of its own or none: so it reports itself, once."""

    def __init__(self, around: Step, name: str, call: Any, config: Any) -> None:
        said = call.get if isinstance(call, Mapping) else functools.partial(getattr, call)
        asked = next((value for field in ASKED if (value := said(field, None)) is not None), None)
        self.name, self.failure, self.refused, self._awaits_span = name, "", False, True
        self._around, self._caller = around, around.caller()
        self._call_id = str(said("call_id", None) or "")
        self._texts: bool = config.trace_include_sensitive_data
        self._arguments = _plain(asked) if self._texts else None

    def takes(self, step: Step) -> bool:
        """Whether this is its own span, which the SDK begins before all others; a tool that runs inside has another parent."""
        own = self._awaits_span and step.parent is self._around and getattr(step.data, "name", "") == self.name
        self._awaits_span = self._awaits_span and not own
        return own

    def inside(self) -> contextlib.AbstractContextManager[object]:
        """Its name in the paths of those who call inside, with a span and without."""
        return lightning.component(self.name) if self.name and "/" not in self.name else contextlib.nullcontext()

    def end(self, item: Any, raised: BaseException | None) -> None:
        """Report how it ended; nothing where it waits for an approval."""
        self._awaits_span = False
        output = "" if item is None or isinstance(item, ToolApprovalItem) else str(item.output)
        if raised is not None and not isinstance(raised, Exception):  # cancelled
            self.report("unknown", output)
        elif self.refused:
            self.report("blocked", output)
        elif raised is not None or self.failure:
            self.report("error", output, self.failure or str(raised) or type(raised).__name__)
        elif not isinstance(item, ToolApprovalItem):
            failed = isinstance(item.raw_item, Mapping) and item.raw_item.get("status") == "failed"
            self.report("error" if failed else "ok", output, output if failed else "")

    def report(self, status: str, output: str, error: str = "") -> None:
        """Texts only where the SDK may show them."""
        event = lightning.ToolEvent(
            self.name,
            status,
            call_id=self._call_id,
            arguments=self._arguments,
            output=output if self._texts else "",
            error=error and get_trace_tool_error(trace_include_sensitive_data=self._texts, error_message=error),
            caller=self._caller,
            at=time.time(),
        )
        self._around.report(event)


def _plain(asked: Any) -> Any:
    return to_jsonable_python(asked, exclude_none=True, serialize_unknown=True)


def _attach() -> Callable[[], None]:
    replaced = ReplacedMethods()
    replaced.replace(ToolContext, "from_agent_context", _knows_its_call)
    replaced.replace(ToolTimeoutError, "__init__", _timed_out)
    replaced.replace(ToolInputGuardrail, "run", _may_block)
    replaced.replace(ToolOutputGuardrail, "run", _may_block)
    replaced.replace(MCPUtil, "invoke_mcp_tool", _may_fail)
    replaced.replace(tool_actions, "format_shell_error", _says_what_failed)
    replaced.replace(tool_actions, "resolve_approval_rejection_message", _is_refused)
    replaced.replace(turn_resolution, "resolve_approval_rejection_message", _never_runs)
    for action, tool in ACTIONS.items():
        replaced.replace(action, "execute", functools.partial(_is_a_run, action, tool))
    return replaced.put_back


watching = Attachment["Callable[[], Step | None]"](_attach)
"""The process's one watch over the functions that know; its users know the innermost step."""


def _knows_its_call(original: Any) -> Callable[..., Any]:
    def from_agent_context(*args: Any, **more: Any) -> Any:
        context, step = original(*args, **more), tool_step()
        if step is not None:
            step.context = context
        return context

    return from_agent_context


def _timed_out(original: Any) -> Callable[..., Any]:
    def init(self: Any, *args: Any, **more: Any) -> None:
        original(self, *args, **more)
        if (step := tool_step()) is not None:
            step.outcome = "error", str(self)

    return init


def _may_block(original: Any) -> Callable[..., Any]:
    async def run(self: Any, *args: Any, **more: Any) -> Any:
        said = await original(self, *args, **more)
        step = tool_step()
        if step is not None and said.behavior["type"] != "allow":
            step.outcome = (
                "blocked",
                str(said.behavior.get("message") or f"the guardrail {self.get_name()!r} stopped it"),
            )
        return said

    return run


def _may_fail(original: Any) -> Callable[..., Any]:
    async def invoke_mcp_tool(server: Any, *args: Any, **more: Any) -> Any:
        step = tool_step()
        return await original(server if step is None else _Server(server, step), *args, **more)

    return invoke_mcp_tool


def _says_what_failed(original: Any) -> Callable[..., Any]:
    """The SDK catches what a tool raises that is no function, and makes a text of it."""

    def format_shell_error(error: Any) -> Any:
        text = original(error)
        if (run := _run.get()) is not None:
            run.failure = text
        return text

    return format_shell_error


def _is_refused(original: Any) -> Callable[..., Any]:
    async def resolve_approval_rejection_message(**more: Any) -> Any:
        if (run := _run.get()) is not None:
            run.refused = True
        return await original(**more)

    return resolve_approval_rejection_message


def _never_runs(original: Any) -> Callable[..., Any]:
    """A run that waited and is refused is not executed again: the SDK makes its answer while it goes on."""

    async def resolve_approval_rejection_message(**more: Any) -> Any:
        message, around = await original(**more), _innermost()
        if around is not None and more["tool_type"] != "function":
            ToolRun(around, more["tool_name"], more["tool_call"], more["run_config"]).report("blocked", str(message))
        return message

    return resolve_approval_rejection_message


def _is_a_run(action: type, tool_field: str, original: Any) -> Callable[..., Any]:
    async def execute(**more: Any) -> Any:
        around = _innermost()
        if around is None:
            return await original(**more)
        asked, outer = more.get("call") or more["action"], _run.get()
        tool = getattr(asked, tool_field)
        name = getattr(action, "TRACE_TOOL_NAME", tool.name)
        run = ToolRun(around, name, asked.tool_call, more["config"])
        _run.set(run)
        try:
            with run.inside():
                item = await original(**more)
        except BaseException as error:
            run.end(None, error)
            raise
        finally:
            _run.set(outer)  # by hand: a coroutine may be closed in another context
        run.end(item, None)
        return item

    return execute


class _Server:
    """An MCP server as it is, whose answer to a tool call is looked at."""

    def __init__(self, real: Any, step: Step) -> None:
        self._real, self._step = real, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    async def call_tool(self, *args: Any, **more: Any) -> Any:
        """As the server does."""
        result = await self._real.call_tool(*args, **more)
        if getattr(result, "is_error", None) or getattr(result, "isError", None):  # of mcp 2, and of mcp 1
            texts = [text for item in result.content or () if (text := getattr(item, "text", ""))]
            self._step.outcome = "error", "\n".join(texts) or "the MCP server answered that the tool failed"
        return result
