"""The methods of smolagents that run agents, tools, code and models, wrapped while the adapter is installed.

The invariant: a wrapped method does what it did, with the same arguments. A method that a user's own class overrides is wrapped
when an agent that holds an object of the class runs.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import lightning
from lightning.instrument import ActiveScope, Installations, ReplacedMethods, Scopes, in_words, tool_slot
from smolagents import MultiStepAgent, Tool, ToolCallingAgent

scopes = Scopes("smolagents")

ANSWER = "final_answer"
"""The tool by which an agent answers; it is no tool of the user."""
CODE = "python_interpreter"
"""The name of a run of a `CodeAgent`'s code, as in smolagents."""


replaced = ReplacedMethods()


def _attach() -> Callable[[], None]:
    _watch(MultiStepAgent, "run", _run)
    _watch(MultiStepAgent, "__call__", _call_agent)
    _watch(Tool, "__call__", _call_tool)
    _watch(ToolCallingAgent, "process_tool_calls", _process_tool_calls)
    _watch(ToolCallingAgent, "execute_tool_call", _execute_tool_call)
    return replaced.put_back


installations = Installations(_attach)


def _watch_agent(agent: Any) -> None:
    """Wrap the methods of this agent's model, tools and interpreter."""
    _watch(type(agent.model), "generate", _generate)
    _watch(type(agent.model), "generate_stream", _generate_stream)
    for tool in agent.tools.values():
        _watch(type(tool), "__call__", _call_tool)
    if interpreter := getattr(agent, "python_executor", None):
        _watch(type(interpreter), "__call__", _run_code)


def _watch(kind: type, name: str, instead: Callable[..., Any]) -> None:
    """Wrap the method `name` on the class that defines it: `kind` or the nearest of its bases. Do nothing if none of them
    defines the method."""
    owner = next((base for base in kind.__mro__ if name in vars(base)), None)
    if owner is not None:
        replaced.replace(owner, name, instead)


def _name(agent: Any) -> str:
    return str(agent.name or type(agent).__name__)


# agents and their model calls -------------------------------------------------------------------------------------------
def _run(original: Callable[..., Any], agent: Any, /, *args: Any, **more: Any) -> Any:
    _watch_agent(agent)
    with scopes.inside("agent", _name(agent), agent):
        result: Any = original(agent, *args, **more)
    streams = inspect.isgenerator(result)
    return scopes.each(result, "agent", _name(agent), agent) if streams else result


def _generate(original: Callable[..., Any], model: Any, /, *args: Any, **more: Any) -> Any:
    if _runs_already(model):  # by `super().generate`
        return original(model, *args, **more)
    with scopes.inside("call", subject=model):
        return original(model, *args, **more)


def _generate_stream(original: Callable[..., Any], model: Any, /, *args: Any, **more: Any) -> Any:
    parts = original(model, *args, **more)
    return parts if _runs_already(model) else scopes.each(parts, "call", subject=model)


def _runs_already(subject: object) -> bool:
    """Whether the innermost scope belongs to this object."""
    here = scopes.here()
    return here is not None and here.subject is subject


# tools ------------------------------------------------------------------------------------------------------------------
_asked: WeakKeyDictionary[ActiveScope, list[tuple[str, str, Any]]] = WeakKeyDictionary()
"""For each agent's run the tools that the model asked for and that have not begun: id, name and arguments."""
_asked_lock = threading.Lock()


def _process_tool_calls(original: Callable[..., Any], agent: Any, /, chat_message: Any, *args: Any, **more: Any) -> Any:
    if (here := scopes.here()) is not None:
        _asked[here] = [
            (call.id, call.function.name, call.function.arguments or {}) for call in chat_message.tool_calls
        ]
    return original(agent, chat_message, *args, **more)


def _call_id(name: str, arguments: Any) -> str:
    """Return the id of a tool call of the running agent, which smolagents does not pass to the method that runs it; empty if
    unknown."""
    here = scopes.here()
    with _asked_lock:
        asked = _asked.get(here, []) if here is not None else []
        for index, (call_id, *call) in enumerate(asked):
            if call == [name, arguments]:
                del asked[index]
                return call_id
    return ""


def _execute_tool_call(original: Callable[..., Any], agent: Any, /, tool_name: str, arguments: Any) -> Any:
    tool = {**agent.tools, **agent.managed_agents}.get(tool_name)
    run = functools.partial(original, agent, tool_name, arguments)
    if tool is None:
        return run()  # which tells the model that there is no such tool
    return _run_tool(tool, tool_name, arguments, run, _call_id(tool_name, arguments))


def _call_tool(original: Callable[..., Any], tool: Any, /, *args: Any, **more: Any) -> Any:
    asked = {name: value for name, value in more.items() if name != "sanitize_inputs_outputs"}
    run = functools.partial(original, tool, *args, **more)
    return _run_tool(tool, tool.name, _by_name(tool.inputs, args, asked), run)


def _call_agent(original: Callable[..., Any], agent: Any, /, *args: Any, **more: Any) -> Any:
    run = functools.partial(original, agent, *args, **more)
    return _run_tool(agent, _name(agent), _by_name(("task",), args, more), run)


def _by_name(names: Iterable[str], args: tuple[Any, ...], more: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **more}


def _run_tool(tool: Any, name: str, arguments: Any, run: Callable[[], Any], call_id: str = "") -> Any:
    """Run a tool, or an agent used as a tool, in a scope of its own, and report the run.

    If no agent is running, or the tool already has its scope, or the tool is `ANSWER`, it is only run.
    """
    if scopes.here() is None or _runs_already(tool) or name == ANSWER:
        return run()
    event = lightning.ToolEvent(name, "unknown", call_id, arguments, caller=scopes.caller())
    with scopes.inside("tool", name, tool), tool_slot(name), installations.reported(event, _error_text) as ended:
        result = run()
        ended(result)
        return result


def _run_code(original: Callable[..., Any], interpreter: Any, /, code: str, *args: Any, **more: Any) -> Any:
    event = lightning.ToolEvent(CODE, "unknown", arguments={"code": code}, caller=scopes.caller())
    run = functools.partial(original, interpreter, code, *args, **more)
    if event.caller is None:
        return run()
    with installations.reported(event, _error_text) as ended:
        result = run()
        ended(f"{result.logs}{in_words(result.output)}")
        return result


def _error_text(error: Exception) -> str:
    return repr(error.__cause__ or error)
