"""The methods of DSPy that run modules, language models and tools, and those of the HTTP client that it brings along, replaced
while the adapter is installed; and what a user calls a module: the attribute that holds it, else its signature or its class.

The invariant: a method does what it did, with the arguments that it got. DSPy shows the model the traceback of a tool's error:
no frame of ours stands in it. A request that is not for the gateway of an active rollout goes out as it was; calls that go
through LiteLLM are tapped as all others. A name has no slash, which separates the names of a path.
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
"""Where the functions come from by which DSPy's modules end their loops, such as `finish`; they are no tools of the user's."""
LM_CALLS = "dspy.clients.lm"
"""How DSPy's cache calls what it keeps of language models; it also keeps embeddings."""
UNNAMED_SIGNATURE = "StringSignature"
"""What DSPy calls a signature that is written as a text, `question -> answer`."""
NO_PARTS = ("history", "callbacks", "demos", "traces", "train")
"""Attributes of modules in which DSPy keeps what it has seen."""
OURS = (__name__, ReplacedMethods.__module__)
"""The modules of the frames that stand for a method which was replaced."""

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
"""Told the result of what ran inside."""
Inside = Callable[[Any, dict[str, Any]], AbstractContextManager[Ended]]
"""From an object and the arguments of its call to what goes around the call."""


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
    """A turn for a tool that has a limit (`runner.tool_limits`)."""
    return tool_slot(str(subject.name)) if isinstance(subject, dspy.Tool) else nullcontext()


def _ignore(result: object) -> None:
    """Nobody asks for the result."""


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
    """Take our frames out of the traceback of an error, and of those behind it."""
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
    """The name of a module that is called inside others, given from the innermost; empty where it has none.

    A program has none: its parts have. Nor has a `part` of one of DSPy's own modules, such as the predictor in a
    `ChainOfThought`; a module that is called by a tool is no part.
    """
    for program in around:
        for name, held in _parts(program):
            if held is module:
                return name
    if part and _is_dspys(around[0]):
        return ""
    return own_name(module) if _is_dspys(module) else ""


def own_name(module: object) -> str:
    """What a module is called by itself."""
    kind = type(module)
    if not kind.__module__.startswith("dspy."):
        return kind.__name__
    name = str(getattr(getattr(module, "signature", None), "__name__", UNNAMED_SIGNATURE))
    return kind.__name__ if name == UNNAMED_SIGNATURE else name


def _is_dspys(module: object) -> bool:
    """Whether a module is one of those that DSPy brings, or derived from one: it calls its parts as DSPy does."""
    kinds = [kind for kind in type(module).__mro__ if kind not in (Module, BaseModule)]
    return any(kind.__module__.startswith("dspy.") for kind in kinds)


def _parts(program: object) -> Iterator[tuple[str, object]]:
    """The modules that a user's program holds: `writer`, `writers.0`, `writers.draft`."""
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
