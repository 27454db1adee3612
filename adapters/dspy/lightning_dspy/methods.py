"""The methods of DSPy that run modules, language models and tools, replaced while the adapter is installed.

The invariant: a method does what it did, with the arguments that it got. DSPy shows the model the traceback of a tool's error:
no frame of ours stands in it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import dspy
import lightning
from dspy.clients.cache import Cache
from dspy.predict import react, react_v2
from lightning.instrument import Installations, ReplacedMethods, Scopes, ToolSlot, current_attempt, tool_slot

from lightning_dspy.client import watch_client
from lightning_dspy.names import name_of, own_name

logger = logging.getLogger(__name__)

scopes = Scopes("dspy")

OWN_TOOLS = "dspy.predict."
"""Where the functions come from by which DSPy's modules end their loops, such as `finish`; they are no tools of the user's."""
LM_CALLS = "dspy.clients.lm"
"""How DSPy's cache calls what it keeps of language models; it also keeps embeddings."""


replaced = ReplacedMethods()


def _attach() -> Callable[[], None]:
    for kind, around in ((dspy.Module, _in_module), (dspy.BaseLM, _in_lm), (dspy.Tool, _in_tool)):
        replaced.replace(kind, "__call__", functools.partial(_around, around))
        replaced.replace(kind, "acall", functools.partial(_around_async, around))
    replaced.replace(Cache, "get", _get)
    for module in (react, react_v2):
        replaced.replace(module, "format_error_for_lm", _format_error)
    watch_client(replaced)
    return replaced.put_back


installations = Installations(_attach)

Ended = Callable[[object], object]
"""Told the result of what ran inside."""
Inside = Callable[[Any, dict[str, Any]], AbstractContextManager[Ended]]
"""From an object and the arguments of its call to what goes around the call."""


def _around(inside: Inside, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(subject: Any, *args: Any, **more: Any) -> Any:
        with _slot(subject), inside(subject, more) as ended:
            result = original(subject, *args, **more)
            ended(result)
            return result

    return call


def _around_async(inside: Inside, original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def acall(subject: Any, *args: Any, **more: Any) -> Any:
        async with _slot(subject):
            with inside(subject, more) as ended:
                result = await original(subject, *args, **more)
                ended(result)
                return result

    return acall


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


def _get(original: Callable[..., Any]) -> Callable[..., Any]:
    def get(cache: Any, request: dict[str, Any], *args: Any, **more: Any) -> Any:
        found = original(cache, request, *args, **more)
        is_lms = str(request.get("_fn_identifier", "")).startswith(LM_CALLS)
        if found is not None and is_lms and current_attempt() is not None:
            _warn_of_cache()
        return found

    return get


@functools.cache
def _warn_of_cache() -> None:
    logger.warning(
        "DSPy answered a model call of a rollout from its cache: the policy was not asked, so nothing of the call is recorded "
        "or trained, and the answer may be that of other weights or another model. Make the LM with dspy.LM(..., cache=False)"
    )


def _format_error(original: Callable[..., str]) -> Callable[..., str]:
    def format_error_for_lm(error: BaseException, **more: Any) -> str:
        _leave_tracebacks(error)
        return original(error, **more)

    return format_error_for_lm


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
    while traceback is not None and str(traceback.tb_frame.f_globals.get("__name__")) == __name__:
        traceback = traceback.tb_next
    return traceback
