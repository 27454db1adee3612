"""The meaning of LangChain's callbacks: which runs are under way, inside which others, and how each tool run ended.

The invariant: a run is known from its start to its end. Runs whose end LangChain never reports (a cancelled tool) are dropped
with the outermost run around them; `MAX_RUNS` limits what is left even then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, cast
from uuid import UUID

import lightning
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage, ToolMessage
from langchain_core.runnables.config import ensure_config
from langchain_core.tracers.context import register_configure_hook
from lightning.instrument import Installations, ask, component_path, hold_slots
from lightning.instrument import emit as to_rollout

CREATE_AGENT = ("langchain_create_agent", "deepagents")
"""Names of the graphs of `create_agent` and `create_deep_agent` in their metadata."""
INNER_NODES = (
    "model",  # of `create_agent`
    "agent",  # of `create_react_agent`, as are those that follow
    "pre_model_hook",
    "post_model_hook",
    "generate_structured_response",
    "tools",  # of both
)
"""Nodes of these agents' graphs; their names are not the user's."""
AROUND_AGENT = "call_agent"
"""The link in which `langgraph-supervisor` runs an agent, inside a node that has the agent's name."""
UNNAMED = ("Runnable", "map:key:")
"""Beginnings of names of links that nobody named."""
MAX_RUNS = 50_000


class _Run(NamedTuple):
    root: UUID
    parent: UUID | None
    path: tuple[str, ...]
    components: tuple[str, ...]
    """The `lightning.component`s around its start; those entered later are added to the path."""
    agent: bool = False
    """Whether it is the graph of an agent, whose nodes are internal."""
    tool: lightning.ToolEvent | None = None


_runs: dict[UUID, _Run] = {}
_lock = threading.Lock()
_model_call: ContextVar[UUID | None] = ContextVar("lightning_langchain_model_call", default=None)


def _path(run: _Run | None, name: str = "") -> tuple[str, ...]:
    now = component_path()
    if run is None:
        path = now
    else:
        known = len(run.components)
        path = run.path + (now[known:] if now[:known] == run.components else ())
    return path if not name or path[-1:] == (name,) else (*path, name)


def _open(said: dict[str, Any], name: str, **more: Any) -> None:
    with _lock:
        run_id, parent_id = said["run_id"], said["parent_run_id"]
        parent = _runs.get(parent_id)
        root = parent.root if parent else run_id
        _runs[run_id] = _Run(root, parent_id, _path(parent, name), component_path(), **more)
        if len(_runs) > MAX_RUNS:
            del _runs[next(iter(_runs))]


def _close(run_id: UUID, status: str = "unknown", output: str = "", error: str = "") -> None:
    with _lock:
        run = _runs.pop(run_id, None)
        ended = [run] if run else []
        if run and run.root == run_id:
            ended += [_runs.pop(left) for left in [key for key, one in _runs.items() if one.root == run_id]]
    for one in ended:
        if one.tool:
            event = replace(one.tool, status=status if one is run else "unknown", output=output, error=error)
            installations.tell(event)


def _rename(run_id: UUID, run: _Run, last: tuple[str, ...]) -> None:
    """Replace a run's own name in its path by `last`."""
    with _lock:
        if run_id in _runs:
            _runs[run_id] = run._replace(path=run.path[:-1] + last)


def _is_react(run_id: UUID, node: _Run) -> None:
    """Mark the graph of `create_react_agent` as an agent's; only a node `agent` that runs `call_model` shows what it is."""
    graph = _runs.get(node.parent) if node.parent else None
    if graph is None or node.parent is None:
        return
    with _lock:
        _runs[node.parent] = graph._replace(agent=True)
    if graph.path:
        _rename(run_id, node, ())


def _is_in_node(said: dict[str, Any], parent: _Run | None) -> bool:
    return parent is not None and parent.path[-1:] == (said.get("langgraph_node"),)


def _caller(run_id: UUID | None) -> lightning.Caller | None:
    run = _runs.get(run_id) if run_id else None
    path = _path(run)
    if run is None or not path:
        return None
    return lightning.Caller(path[-1], path, str(run_id), str(run.parent or ""), "langchain")


def caller_now() -> lightning.Caller | None:
    """Return the caller of a request from this thread or task: the present model call, else the run of LangChain around this
    code."""
    call = _model_call.get()
    if call in _runs:
        return _caller(call)
    around = _caller(getattr(ensure_config().get("callbacks"), "parent_run_id", None))
    return around and replace(around, span_id="", parent_id=around.span_id)  # no call of LangChain's


def _caller_by_hand() -> lightning.Caller | None:
    return None if installations else caller_now()


def _message(output: Any, call_id: str) -> Any:
    """Return the `ToolMessage` for the call in a `Command` (or a list with one), else the tool's output itself."""
    for item in output if isinstance(output, list) else [output]:
        update = getattr(item, "update", None)
        said = update.get("messages") if isinstance(update, dict) else None
        for message in said if isinstance(said, list) else [said]:
            if isinstance(message, ToolMessage) and message.tool_call_id == call_id:
                return message
    return output


def _state(inputs: Any) -> Any:
    """Return a node's input as a state. Of lists of messages, which the next call has, it has only the length. None where there
    is nothing else."""
    if not isinstance(inputs, dict):
        dump = getattr(inputs, "model_dump", None)
        inputs = dump() if callable(dump) else getattr(inputs, "__dict__", None)
    if not isinstance(inputs, dict):
        return None
    told = {name: f"{len(value)} messages" if _are_messages(value) else value for name, value in inputs.items()}
    return told if any(told[name] is inputs[name] for name in told) else None


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, BaseMessage) for item in value)


class LightningCallback(BaseCallbackHandler):
    """Names callers and reports tool runs. Several of them, also beside the installed adapter, report a run once."""

    run_inline = True  # in the caller's own thread and task, where the request finds what is set here

    def __init__(self) -> None:
        ask(_caller_by_hand)

    def on_chain_start(self, serialized: Any, inputs: Any, **run: Any) -> None:
        """Begin a graph, a node, or a link of a chain; names that nobody gave do not count. A node's input is reported as a
        state."""
        name, said, parent = run.get("name") or "", run.get("metadata") or {}, _runs.get(run["parent_run_id"])
        unnamed = name == "LangGraph"
        created = said.get("lc_agent_name") == name or (unnamed and said.get("ls_integration") in CREATE_AGENT)
        if name == "call_model" and said.get("langgraph_node") == "agent" and parent and parent.path[-1:] == ("agent",):
            _is_react(run["parent_run_id"], parent)
            name = ""
        if created and unnamed and not _path(parent):
            name = "agent"
        elif parent and parent.agent and name in INNER_NODES:
            name = "" if _path(parent) else "agent"
        elif unnamed or name.startswith(UNNAMED) or (name == AROUND_AGENT and _is_in_node(said, parent)):
            name = ""
        new = run["run_id"] not in _runs
        _open(run, name, agent=created)
        node = said.get("langgraph_node")
        if new and node and run.get("name") == node and (values := _state(inputs)):
            path = "/".join(_path(_runs.get(run["run_id"]))) or str(node)
            installations.tell(lightning.StepState(values, path))

    def on_chat_model_start(self, serialized: Any, messages: Any, **run: Any) -> None:
        """Begin a model call: the next request from here is its request, and so are retries. A link named like the model's
        class is unnamed."""
        parent = _runs.get(run["parent_run_id"])
        kind = ((serialized or {}).get("id") or [""])[-1]
        if parent and parent.path[-1:] == (kind,) and (run.get("metadata") or {}).get("langgraph_node") != kind:
            _rename(run["parent_run_id"], parent, ())  # `model.with_retry()`
        _open(run, run.get("name") or "")
        _model_call.set(run["run_id"])

    def on_retriever_start(self, serialized: Any, query: str, **run: Any) -> None:
        """Begin a retriever; model calls in it belong to the run around it, since its name is mostly its class's."""
        _open(run, "")

    def on_tool_start(self, serialized: Any, input_str: str, **run: Any) -> None:
        """Begin a tool; calls inside belong to it."""
        name = (serialized or {}).get("name") or run.get("name") or "tool"
        call_id, inputs = run.get("tool_call_id") or "", run.get("inputs")
        arguments = input_str if inputs is None else inputs
        caller = _caller(run["parent_run_id"])
        _open(run, name, tool=lightning.ToolEvent(name, "unknown", call_id, arguments, caller=caller))

    def on_tool_end(self, output: Any, **run: Any) -> None:
        """End a tool that returned. A handled failure is a message with that status; a `Command` contains the message."""
        known = _runs.get(run["run_id"])
        output = _message(output, known.tool.call_id if known and known.tool else "")
        text = str(getattr(output, "content", output))
        failed = getattr(output, "status", "") == "error"
        _close(run["run_id"], "error" if failed else "ok", text, text if failed else "")

    def on_tool_error(self, error: BaseException, **run: Any) -> None:
        """End a tool that raised. LangGraph's interrupts also come here and are no failures."""
        interrupted = any(kind.__name__ == "GraphBubbleUp" for kind in type(error).__mro__)
        _close(run["run_id"], "unknown" if interrupted else "error", error="" if interrupted else repr(error))

    def on_chain_end(self, outputs: Any, **run: Any) -> None:
        """End a run, whether it succeeded or failed."""
        _close(run["run_id"])

    on_chain_error = on_llm_end = on_llm_error = on_chain_end  # type: ignore[assignment]  # what came out is not looked at
    on_retriever_end = on_retriever_error = on_chain_end  # type: ignore[assignment]
    on_llm_start = on_chat_model_start  # type: ignore[assignment]  # nor what went in


class _Always:
    """Stands where LangChain expects a context variable, and has the same value in every thread and task."""

    handler: LightningCallback | None = None

    def get(self) -> LightningCallback | None:
        return self.handler


_always = _Always()


@cache
def _register() -> None:
    """Register the hook, once: LangChain cannot remove it, so it returns None while the adapter is not installed."""
    register_configure_hook(cast("ContextVar[Any]", _always), inheritable=True, handle_class=LightningCallback)


def _attach() -> Callable[[], None]:
    _register()
    _always.handler = LightningCallback()
    free_tools = hold_slots("langchain_core.tools.base", "BaseTool", ("run", "arun"))

    def detach() -> None:
        free_tools()
        _always.handler = None

    return detach


installations = Installations(_attach, otherwise=to_rollout)
"""The receivers of tools and states; without any, the rollout that the code runs for."""
