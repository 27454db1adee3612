"""Agents whose `on_messages` or `on_messages_stream` is called directly: AutoGen opens no span for these calls.

The invariant: the methods do what they did; the last undo puts the very ones back. A name is known while the method runs, and
for a stream only while its next item is made.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any, NamedTuple
from uuid import uuid4

from lightning.instrument import ReplacedMethods
from opentelemetry import trace


class Direct(NamedTuple):
    """A call of an agent without a span of its own."""

    around: tuple[int, int]
    """The span in which it was made: trace and span id."""
    path: tuple[str, ...]
    """From the outermost name to the agent's."""
    span_id: str


direct: ContextVar[Direct | None] = ContextVar("lightning_autogen_direct", default=None)


class DirectCalls:
    """Wraps the methods of every kind of agent, as they are found."""

    def __init__(self, path_here: Callable[[], tuple[str, ...]]) -> None:
        self._path_here = path_here
        self.replaced = ReplacedMethods()

    def start(self, module: ModuleType) -> None:
        """Watch `BaseChatAgent` of a module, and what derives from it, now or later."""
        self.replaced.replace(module.BaseChatAgent, "__init__", self._wrap_init)
        kinds = [module.BaseChatAgent]
        while kinds:
            kind = kinds.pop()
            self._wrap_kind(kind)
            kinds += kind.__subclasses__()

    def _wrap_kind(self, kind: type) -> None:
        for name, wrap in (("on_messages", self._wrap_call), ("on_messages_stream", self._wrap_stream)):
            if callable(vars(kind).get(name)):
                self.replaced.replace(kind, name, wrap)

    def _wrap_init(self, original: Any) -> Callable[..., None]:
        def init(agent: Any, *args: Any, **more: Any) -> None:
            for kind in type(agent).__mro__:
                self._wrap_kind(kind)
            original(agent, *args, **more)

        return init

    @contextmanager
    def _named(self, known: Direct | None) -> Iterator[None]:
        token = direct.set(known)
        try:
            yield
        finally:
            direct.reset(token)

    def _of(self, agent: Any) -> Direct | None:
        """What to know in a call of an agent: nothing new where its span, or a call of its own, says so already."""
        path, here = self._path_here(), trace.get_current_span().get_span_context()
        if path[-1:] == (agent.name,):
            return direct.get()
        return Direct((here.trace_id, here.span_id), (*path, agent.name), uuid4().hex[:16])

    def _wrap_call(self, original: Any) -> Callable[..., Awaitable[Any]]:
        async def on_messages(agent: Any, *args: Any, **more: Any) -> Any:
            with self._named(self._of(agent)):
                return await original(agent, *args, **more)

        return on_messages

    def _wrap_stream(self, original: Any) -> Callable[..., AsyncGenerator[Any, None]]:
        async def on_messages_stream(agent: Any, *args: Any, **more: Any) -> AsyncGenerator[Any, None]:
            known = self._of(agent)
            stream = original(agent, *args, **more)
            try:
                while True:
                    with self._named(known):
                        try:
                            item = await anext(stream)
                        except StopAsyncIteration:
                            return
                    yield item
            finally:
                await stream.aclose()

        return on_messages_stream
