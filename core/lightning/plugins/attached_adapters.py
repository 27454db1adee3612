"""Attaches adapters to their frameworks and asks them which agent is calling the model.

The invariant: an adapter that fails costs its own knowledge and nothing else: no agent's call, no other adapter. If a call has
no caller's name because an adapter failed, its transition says so.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import pluggy

from lightning.bounded import Once
from lightning.plugins.discovery import PluginInfo
from lightning.types import UNNAMED, Caller, StepState, ToolEvent

logger = logging.getLogger(__name__)

FAILED = "adapter-failed:"
"""The beginning of `Caller.framework`, before the adapter's name, in a call whose caller is unknown because the adapter
failed."""


def failed_adapter(caller: Caller) -> str:
    """Return the adapter whose failure left a call without its caller's name; "" for any other call."""
    return caller.framework.removeprefix(FAILED) if caller.framework.startswith(FAILED) else ""


class Identifier(NamedTuple):
    """One adapter's `lightning_identify`. A `fallback` (pluggy's `trylast`) names callers that no framework's adapter named."""

    name: str
    ask: Callable[[], object]
    fallback: bool


class Installation:
    """One call of `install_adapters`: the adapters that it is for (`names`; None means all), and the functions that undo it
    (`undos`)."""

    def __init__(self, emit: Callable[[ToolEvent | StepState], None], names: frozenset[str] | None) -> None:
        self.emit, self.names = emit, names
        self.undos: list[Callable[[], None]] = []
        self.done: set[str] = set()
        self.failed: set[str] = set()

    def wants(self, name: str) -> bool:
        """Whether the adapter was asked for."""
        return self.names is None or name in self.names

    def asks(self, name: str) -> bool:
        """Whether the adapter may be asked who is calling: it was asked for, and its installation has not failed."""
        return self.wants(name) and name not in self.failed


class Adapters:
    """All installations of adapters in this process, and the adapters to ask who is calling. What changes them is called with
    the lock of `Plugins` held; `identify` is called without it."""

    def __init__(self, manager: pluggy.PluginManager, infos: Mapping[str, PluginInfo]) -> None:
        self._manager, self._infos = manager, infos
        self._installations: list[Installation] = []
        self._identifiers: tuple[Identifier, ...] = ()
        self._absent: tuple[str, ...] = ()
        self._said = Once()

    def begin(self, emit: Callable[[ToolEvent | StepState], None], names: frozenset[str] | None) -> Installation:
        """A new installation with no adapter attached yet."""
        installation = Installation(functools.partial(self._pass_on, emit), names)
        self._installations.append(installation)
        self.find_identifiers()
        return installation

    def attach_everywhere(self, name: str) -> None:
        """Attach a loaded adapter to every installation that wants it."""
        for installation in self._installations:
            self.attach(installation, name)
        self.find_identifiers()

    def attach(self, installation: Installation, name: str) -> None:
        """Call the `lightning_install` of one loaded plugin for this installation, unless the installation does not want the
        plugin or has called it already."""
        if name in installation.done or not installation.wants(name):
            return
        installation.done.add(name)
        plugin = self._manager.get_plugin(name)
        for implementation in self._manager.hook.lightning_install.get_hookimpls():
            if implementation.plugin is plugin:
                self._attach_one(installation, name, implementation)
        if name in installation.failed:
            self.find_identifiers()

    def _attach_one(self, installation: Installation, name: str, implementation: pluggy.HookImpl) -> None:
        try:
            undo = implementation.function(*[installation.emit for _ in implementation.argnames])
        except Exception as error:  # noqa: BLE001 — one adapter must not stop the others
            installation.failed.add(name)
            logger.warning(
                "the adapter %s is not installed, its lightning_install failed: %r", self._infos[name], error
            )
            return
        if callable(undo):
            installation.undos.append(functools.partial(self._undo, name, undo))
        else:
            logger.warning("the adapter %s cannot be undone: lightning_install returned %r", self._infos[name], undo)

    def _undo(self, name: str, undo: Callable[[], object]) -> None:
        try:
            undo()
        except Exception as error:  # noqa: BLE001 — the others still have to be undone
            logger.warning("the adapter %s was not undone, it failed: %r", self._infos[name], error)

    def end(self, installation: Installation) -> None:
        """Undo everything in reverse order. A second call does nothing."""
        if installation in self._installations:
            self._installations.remove(installation)
        while installation.undos:
            installation.undos.pop()()
        self.find_identifiers()

    def attached(self) -> set[str]:
        """The adapters that any installation has attached."""
        return {name for one in self._installations for name in one.done - one.failed}

    def identify(self) -> Caller | None:
        """Ask the adapters, in pluggy's order, who is calling. Return the first answer of a framework's adapter that knows the
        model call itself (its `span_id`), else the first answer; None without an answer.

        So if one framework's agent runs inside a node or tool of another framework, the agent that is about to call is named.
        While there is an installation, only installed adapters are asked.

        If an adapter failed, now or when it was installed, and no framework's adapter knows the caller, the answer is marked:
        its `framework` is `FAILED` and the failed adapter's name. The marked answer is a fallback's, or `UNNAMED` if there is
        none.
        """
        failed = self._absent
        around: Caller | None = None
        for name, ask, fallback in self._identifiers:
            try:
                caller = ask()
            except Exception as error:  # noqa: BLE001 — a stranger's code must not cost the agent its call
                self._complain(name, f"its lightning_identify failed: {error!r}")
                failed = (name, *failed)
                continue
            if isinstance(caller, Caller):
                if caller.span_id and not fallback:
                    return caller
                around = around or (_marked(caller, failed) if fallback else caller)
                continue
            if caller is not None:
                self._complain(name, f"its lightning_identify returned {caller!r}, not a lightning.Caller")
                failed = (name, *failed)
        return around or (_marked(UNNAMED, failed) if failed else None)

    def find_identifiers(self) -> None:
        """Find the adapters to ask, in order, and those that cannot be asked, because their installation failed."""
        implementations = reversed(self._manager.hook.lightning_identify.get_hookimpls())
        self._identifiers = tuple(
            Identifier(item.plugin_name, item.function, item.trylast)
            for item in implementations
            if not self._installations or any(one.asks(item.plugin_name) for one in self._installations)
        )
        asked = {item.name for item in self._identifiers}
        self._absent = tuple(sorted({name for one in self._installations for name in one.failed} - asked))

    def _pass_on(self, emit: Callable[[ToolEvent | StepState], None], event: ToolEvent | StepState) -> None:
        try:
            emit(event)
        except Exception as error:  # noqa: BLE001 — recording must not change what the agent does
            if self._said.first():
                logger.warning("a tool event was lost, its receiver failed: %r", error)

    def _complain(self, name: str, problem: str) -> None:
        if self._said.first(name):
            logger.warning("the adapter %s: %s (said once)", self._infos[name], problem)


def _marked(caller: Caller, failed: tuple[str, ...]) -> Caller:
    return replace(caller, framework=FAILED + failed[0]) if failed else caller
