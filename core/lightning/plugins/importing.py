"""Runs a function right after a module has been imported.

The invariant: once the last watch is undone, `sys.meta_path` and every module's loader are as they would have been without it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import cast

logger = logging.getLogger(__name__)

Callback = Callable[[ModuleType], None]


def on_import(module: str, callback: Callback) -> Callable[[], None]:
    """Call `callback(module)` once `module` has been imported, in the importing thread; at once when it has been already.

    Returns a function that ends the watch. What the callback raises is logged and does not reach the import.
    """
    undo = _finder.watch(module, callback)
    found = imported(module)
    if found is not None:
        undo()
        _call(callback, found)
    return undo


def imported(module: str) -> ModuleType | None:
    """Return a module that has been imported completely; None while its own code still runs, or before."""
    found = sys.modules.get(module)
    return None if found is None or getattr(found.__spec__, "_initializing", False) else found


def _call(callback: Callback, module: ModuleType) -> None:
    try:
        callback(module)
    except Exception:
        logger.exception("what waited for the import of %s failed", module.__name__)


class _Finder(importlib.abc.MetaPathFinder):
    """A finder that stands before the others while a module is watched. It finds modules through them."""

    def __init__(self) -> None:
        self._watched: dict[str, list[Callback]] = {}
        self._lock = threading.RLock()

    def watch(self, module: str, callback: Callback) -> Callable[[], None]:
        with self._lock:
            self._watched.setdefault(module, []).append(callback)
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)
        return functools.partial(self._unwatch, module, callback)

    def _unwatch(self, module: str, callback: Callback) -> None:
        with self._lock:
            callbacks = self._watched.get(module, [])
            if callback in callbacks:
                callbacks.remove(callback)
            if not callbacks:
                self._watched.pop(module, None)
            if not self._watched and self in sys.meta_path:
                sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._watched:
            return None
        for finder in [finder for finder in sys.meta_path if finder is not self]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(cast("importlib.abc.Loader", spec.loader), self)
                return spec
        return None

    def imported(self, module: ModuleType, name: str) -> None:
        """Call the callbacks of a module whose code has run."""
        with self._lock:
            callbacks = self._watched.get(name, []).copy()
        for callback in callbacks:
            _call(callback, module)


class _Loader(importlib.abc.Loader):
    """Gives a module its own loader back before the module's code runs, so that the code never sees this loader."""

    def __init__(self, real: importlib.abc.Loader, finder: _Finder) -> None:
        self._real, self._finder = real, finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        spec.loader = self._real
        module = self._real.create_module(spec)
        spec.loader = self
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._real
        module.__loader__ = self._real
        self._real.exec_module(module)
        self._finder.imported(module, module.__name__)


_finder = _Finder()
