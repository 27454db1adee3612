"""What the SDK's spans do not say of a tool run: its call's id, a timeout, a guardrail's refusal, an MCP server's `isError`.

The invariant: the SDK's functions get and return what they did; the last `stop` puts back the very ones that were there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agents.exceptions import ToolTimeoutError
from agents.mcp import MCPUtil
from agents.tool_context import ToolContext
from agents.tool_guardrails import ToolInputGuardrail, ToolOutputGuardrail

if TYPE_CHECKING:
    from lightning_openai_agents.steps import Step

_where: list[Callable[[], Step | None]] = []
"""Who knows the innermost step here."""


def tool_step() -> Step | None:
    """The step of the tool run that this code belongs to."""
    step = next((found for here in _where if (found := here()) is not None), None)
    return step if step is not None and step.data.type == "function" else None


class Outcomes:
    """The process's one watch over the functions that know."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def start(self, here: Callable[[], Step | None]) -> None:
        """Watch for the steps that `here` finds. Again: does nothing."""
        if here in _where:
            return
        _where.append(here)
        if len(_where) == 1:
            self._replace(ToolContext, "from_agent_context", _knows_its_call)
            self._replace(ToolTimeoutError, "__init__", _timed_out)
            self._replace(ToolInputGuardrail, "run", _may_block)
            self._replace(ToolOutputGuardrail, "run", _may_block)
            self._replace(MCPUtil, "invoke_mcp_tool", _may_fail)

    def stop(self, here: Callable[[], Step | None]) -> None:
        """Put the functions back once nobody watches."""
        _where.remove(here)
        while not _where and self._undo:
            self._undo.pop()()

    def _replace(self, owner: type, name: str, wrap: Callable[[Any], Callable[..., Any]]) -> None:
        original = vars(owner)[name]
        if isinstance(original, classmethod):
            ours: Any = classmethod(functools.wraps(original.__func__)(wrap(original.__func__)))
        else:
            ours = functools.wraps(original)(wrap(original))
        setattr(owner, name, ours)

        def undo() -> None:
            if vars(owner)[name] is ours:  # else somebody else stands before it now
                setattr(owner, name, original)

        self._undo.append(undo)


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
    async def invoke_mcp_tool(cls: Any, server: Any, *args: Any, **more: Any) -> Any:
        step = tool_step()
        return await original(cls, server if step is None else _Server(server, step), *args, **more)

    return invoke_mcp_tool


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


outcomes = Outcomes()
