"""What happens inside each span of LlamaIndex, and which of it is around the code that calls the model.

The invariant: a step is known as long as its span is open, and keeps nothing alive but the steps around it.
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncGenerator, Generator, Iterator
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import lightning
from lightning.instrument import ActiveScope, Scopes


class SpanScope(ActiveScope):
    """What happens inside one span: the work of an agent or a component, of a tool or of a model."""

    def __init__(
        self, kind: Literal["agent", "tool", "call"], name: str = "", around: ActiveScope | None = None
    ) -> None:
        super().__init__(kind, name, None, around)
        self.tool: lightning.ToolEvent | None = None
        """To be reported when it ends, if the tool has begun: there is none of the name that a model has invented."""
        self.begun = False
        self.before: ActiveScope | None = None
        """What this context knew when it began."""
        self.inside: tuple[LazyResult, ...] = ()
        """What was making an item then: this step is its affair."""


class WorkflowScope(SpanScope):
    """A run of a workflow; an agent is one, and so is a team of agents that hand over to each other."""

    def __init__(self, name: str, around: ActiveScope | None, *, of_agents: bool) -> None:
        super().__init__("agent", name, around)
        self.of_agents = of_agents
        """Whether its steps are an agent's own affair."""
        self.agent = ""
        """The agent whose turn it is."""
        self.asked: frozenset[str] = frozenset()
        """The ids under which the model has called tools; a ReAct agent's are made up after it has answered."""


class LazyResult(NamedTuple):
    """What a span returned to be iterated: it asks the model when an item is wanted, and its span has ended by then."""

    items: weakref.ref[Any]
    step: SpanScope

    def is_made(self) -> bool:
        """Whether an item is being made right now."""
        items = self.items()
        return bool(getattr(items, "gi_running", False) or getattr(items, "ag_running", False))

    def is_over(self) -> bool:
        """Whether no more items will come."""
        items = self.items()
        return getattr(items, "gi_frame", None) is None and getattr(items, "ag_frame", None) is None


_lazy_results: ContextVar[tuple[LazyResult, ...]] = ContextVar("lightning_llama_index_lazy", default=())
"""The newest first."""


class SpanScopes(Scopes):
    """The steps that are open, by the ids of their spans."""

    def __init__(self) -> None:
        super().__init__("llama-index")
        self.open: weakref.WeakValueDictionary[str, SpanScope] = weakref.WeakValueDictionary()

    def begin(self, span_id: str, step: SpanScope) -> None:
        """A span has been entered, here."""
        self.open[span_id] = step
        step.before, step.inside = self._innermost.get(), tuple(_made())
        self._innermost.set(step)

    def end(self, span_id: str, result: object = None) -> SpanScope | None:
        """A span has ended, maybe in another context than it began in."""
        step = self.open.pop(span_id, None)
        if step is not None:
            step.is_open = False
            if self._innermost.get() is step:
                self._innermost.set(step.before)
            if isinstance(result, Generator | AsyncGenerator):
                others = tuple(lazy for lazy in _lazy_results.get() if not lazy.is_over())
                _lazy_results.set((LazyResult(weakref.ref(result), step), *others))
        return step

    def here(self) -> ActiveScope | None:
        """The innermost step that this code runs in, which may be one that makes an item of what it has returned."""
        inner = super().here()
        inside = inner.inside if isinstance(inner, SpanScope) else ()
        named = next((scope for scope in inner.outwards() if scope.name), None) if inner else None
        for lazy in _made():
            if lazy not in inside and (named is None or named in lazy.step.outwards()):
                return lazy.step
        return inner


def _made() -> Iterator[LazyResult]:
    """What makes an item in this context right now, the newest first."""
    return (lazy for lazy in _lazy_results.get() if lazy.is_made())


steps = SpanScopes()
