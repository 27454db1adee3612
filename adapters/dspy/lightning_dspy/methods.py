"""The methods of DSPy that run modules, language models and tools, and those of its own HTTP client, wrapped while the adapter
is installed; and the names of modules: the attribute that holds a module, else its signature or its class.

The invariant: a wrapped method does what it did, with the same arguments. DSPy shows the model the traceback of a tool's error,
which has no frame of ours. A request that is not for the gateway of an active rollout is sent unchanged; calls through LiteLLM
are tapped like all others. A name has no slash, which separates the names of a path.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any

import dspy
import lightning
from dspy import Module
from dspy._vendor.lm15.transports import StdlibAsyncTransport, StdlibTransport
from dspy.clients.cache import Cache
from dspy.predict import react, react_v2
from dspy.primitives.base_module import BaseModule
from lightning.instrument import (
    Installations,
    MarkedRequest,
    ReplacedMethods,
    Scopes,
    ToolSlot,
    current_attempt,
    mark_request,
    tool_slot,
)

logger = logging.getLogger(__name__)

scopes = Scopes("dspy")

OWN_TOOLS = "dspy.predict."
"""Module of the functions by which DSPy's modules end their loops, such as `finish`; they are no tools of the user."""
LM_CALLS = "dspy.clients.lm"
"""Module prefix that DSPy's cache gives the calls of language models; it also caches embeddings."""
UNNAMED_SIGNATURE = "StringSignature"
"""DSPy's name of a signature that is written as text, `question -> answer`."""
NO_PARTS = ("history", "callbacks", "demos", "traces", "train")
"""Attributes of modules in which DSPy keeps what it has seen."""
OURS = (__name__, ReplacedMethods.__module__)
"""Modules of the frames of wrapped methods."""

replaced = ReplacedMethods()


def _attach() -> Callable[[], None]:
    for kind, around in ((dspy.Module, _in_module), (dspy.BaseLM, _in_lm), (dspy.Tool, _in_tool)):
        replaced.replace(kind, "__call__", functools.partial(_around, around))
        replaced.replace(kind, "acall", functools.partial(_around_async, around))
    replaced.replace(Cache, "get", _get)
    for module in (react, react_v2):
        replaced.replace(module, "format_error_for_lm", _format_error)
    replaced.replace(StdlibTransport, "stream", _stream)
    replaced.replace(StdlibAsyncTransport, "_do_stream", _do_stream)
    return replaced.put_back


installations = Installations(_attach)

Ended = Callable[[object], object]
"""Takes the result of a call."""
Inside = Callable[[Any, dict[str, Any]], AbstractContextManager[Ended]]
"""Makes the context around a call, from the object and the call's arguments."""


def _around(inside: Inside, original: Callable[..., Any], subject: Any, /, *args: Any, **more: Any) -> Any:
    with _slot(subject), inside(subject, more) as ended:
        result = original(subject, *args, **more)
        ended(result)
        return result


async def _around_async(
    inside: Inside, original: Callable[..., Awaitable[Any]], subject: Any, /, *args: Any, **more: Any
) -> Any:
    async with _slot(subject):
        with inside(subject, more) as ended:
            result = await original(subject, *args, **more)
            ended(result)
            return result


def _slot(subject: Any) -> ToolSlot:
    """Return the slot of a tool with a limit (`runner.tool_limits`)."""
    return tool_slot(str(subject.name)) if isinstance(subject, dspy.Tool) else nullcontext()


def _ignore(result: object) -> None:
    """Do nothing with the result."""


@contextmanager
def _in_module(module: Any, _: dict[str, Any]) -> Iterator[Ended]:
    here = scopes.here()
    around = [scope.subject for scope in here.outwards() if scope.kind == "agent"] if here else []
    in_module = here is not None and here.kind == "agent"
    with scopes.inside("agent", name_of(module, around, part=in_module), module):
        yield _ignore


@contextmanager
def _in_lm(lm: Any, _: dict[str, Any]) -> Iterator[Ended]:
    here = scopes.here()
    with ExitStack() as inside:
        if here is not None and not here.path:  # a program that calls its LM itself
            inside.enter_context(scopes.inside("agent", own_name(here.subject), here.subject))
        if here is None or here.subject is not lm:  # else by `super().__call__`
            inside.enter_context(scopes.inside("call", subject=lm))
        yield _ignore


@contextmanager
def _in_tool(tool: Any, arguments: dict[str, Any]) -> Iterator[Ended]:
    if scopes.here() is None or str(getattr(tool.func, "__module__", "")).startswith(OWN_TOOLS):
        yield _ignore
        return
    run = lightning.ToolEvent(tool.name, "unknown", arguments=arguments, caller=scopes.caller())
    with installations.reported(run) as ended, scopes.inside("tool", tool.name, tool):
        yield ended


def _get(original: Callable[..., Any], cache: Any, /, request: dict[str, Any], *args: Any, **more: Any) -> Any:
    found = original(cache, request, *args, **more)
    is_lms = str(request.get("_fn_identifier", "")).startswith(LM_CALLS)
    if found is not None and is_lms and current_attempt() is not None:
        _warn_of_cache()
    return found


@functools.cache
def _warn_of_cache() -> None:
    logger.warning(
        "DSPy answered a model call of a rollout from its cache: the policy was not asked, so nothing of the call is recorded "
        "or trained, and the answer may be that of other weights or another model. Make the LM with dspy.LM(..., cache=False)"
    )


def _format_error(original: Callable[..., str], /, error: BaseException, **more: Any) -> str:
    _leave_tracebacks(error)
    return original(error, **more)


def _leave_tracebacks(error: BaseException) -> None:
    """Remove our frames from the traceback of an error, and of the errors that caused it."""
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = _without_our_frames(each.__traceback__)
            waiting += [behind for behind in (each.__cause__, each.__context__) if behind is not None]
            waiting += each.exceptions if isinstance(each, BaseExceptionGroup) else ()


def _without_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    first = _next_of_others(traceback)
    frame = first
    while frame is not None:
        frame.tb_next = _next_of_others(frame.tb_next)
        frame = frame.tb_next
    return first


def _next_of_others(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__") in OURS:
        traceback = traceback.tb_next
    return traceback


# DSPy's own HTTP client ------------------------------------------------------------------------------------------------
def _marked(request: Any) -> tuple[MarkedRequest, Any]:
    marked = mark_request(request.url, request.headers)
    kept = [(name, value) for name, value in request.headers if name.lower() not in marked.added]
    return marked, replace(request, headers=[*kept, *marked.added.items()]) if marked.added else request


def _stream(original: Callable[..., Any], transport: Any, /, request: Any) -> Any:
    marked, request = _marked(request)
    reply = original(transport, request)
    marked.answered(reply.status, reply.headers)
    return reply


async def _do_stream(original: Callable[..., Awaitable[Any]], transport: Any, /, request: Any) -> Any:
    marked, request = _marked(request)
    reply = await original(transport, request)
    marked.answered(reply.status, reply.headers)
    return reply


# the names of modules ---------------------------------------------------------------------------------------------------
def name_of(module: Module, around: Sequence[object], *, part: bool) -> str:
    """Return the name of a module that is called inside others (`around`, the innermost first); empty where it has none.

    A user's program has no name, but its parts have. A `part` of one of DSPy's own modules, such as the predictor in a
    `ChainOfThought`, has none either; a module that a tool calls is no part.
    """
    for program in around:
        for name, held in _parts(program):
            if held is module:
                return name
    if part and _is_dspys(around[0]):
        return ""
    return own_name(module) if _is_dspys(module) else ""


def own_name(module: object) -> str:
    """Return a module's name from its signature or its class."""
    kind = type(module)
    if not kind.__module__.startswith("dspy."):
        return kind.__name__
    name = str(getattr(getattr(module, "signature", None), "__name__", UNNAMED_SIGNATURE))
    return kind.__name__ if name == UNNAMED_SIGNATURE else name


def _is_dspys(module: object) -> bool:
    """Whether a module is one of DSPy's or derived from one, so that it calls its parts as DSPy does."""
    kinds = [kind for kind in type(module).__mro__ if kind not in (Module, BaseModule)]
    return any(kind.__module__.startswith("dspy.") for kind in kinds)


def _parts(program: object) -> Iterator[tuple[str, object]]:
    """Yield the modules that a user's program holds, by name: `writer`, `writers.0`, `writers.draft`."""
    if _is_dspys(program):
        return
    for name, value in list(vars(program).items()):
        if name in NO_PARTS:
            continue
        if isinstance(value, list | tuple):
            items: Iterable[tuple[object, object]] = enumerate(value)
        else:
            items = list(value.items()) if isinstance(value, dict) else ()
            yield name, value
        for key, item in items:
            yield f"{name}.{key}".replace("/", "."), item
