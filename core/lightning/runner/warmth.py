"""Certificate stores, pydantic models and caches that the first rollout had to build, built in advance for later processes.

The invariant: a rollout gets what it would have built, and nothing that another rollout has touched. The first rollout reports
what it needed; the fork server builds that without using it, and each process that it forks has its own copy. The caches are
filled from fixed text, never from a rollout's.
"""

from __future__ import annotations

import importlib
import os
import ssl
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from lightning.instrument.frames import know_origin
from lightning.plugins import plugins

MOST_CONTEXTS: Final = 8
"""Most contexts of the same certificate files that are made in advance."""
SAME_FOR_ALL: Final = ssl.Purpose.SERVER_AUTH


@dataclass(frozen=True, slots=True)
class Stores:
    """The certificate files of an `ssl` context, each with the time of its last change, so that a changed one is read again."""

    cafile: str = ""
    capath: str = ""
    changed: int = 0

    @classmethod
    def of(cls, purpose: ssl.Purpose, cafile: object, capath: object, cadata: object) -> Stores | None:
        """Return the files that these arguments of `ssl.create_default_context` name; None if no context can be made in
        advance."""
        if purpose is not SAME_FOR_ALL or cadata is not None or os.environ.get("SSLKEYLOGFILE"):
            return None
        if not isinstance(cafile, str | None) or not isinstance(capath, str | None) or not (cafile or capath):
            return None
        try:
            return cls(cafile or "", capath or "", Path(cafile or capath or "").stat().st_mtime_ns)
        except OSError:
            return None


class Contexts:
    """Replaces `ssl.create_default_context`. Hands out each context made in advance once, makes the others, and counts all."""

    def __init__(self) -> None:
        self.asked: Counter[Stores] = Counter()
        self._make = self._made_by = ssl.create_default_context
        self._kind = ssl.SSLContext
        self._made: dict[Stores, list[ssl.SSLContext]] = {}

    def make(self, stores: Stores, count: int) -> None:
        """Make up to `count` contexts in advance."""
        made = [
            self._make(cafile=stores.cafile or None, capath=stores.capath or None)
            for _ in range(min(count, MOST_CONTEXTS))
        ]
        self._made[stores] = made

    def install(self) -> None:
        """Replace `ssl.create_default_context` by this object, in this process."""
        self._make = ssl.create_default_context  # a library may have put its own in its place since
        ssl.create_default_context = self  # what libraries call by its module's name

    def __call__(
        self,
        purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH,
        *,
        cafile: Any = None,
        capath: Any = None,
        cadata: Any = None,
    ) -> ssl.SSLContext:
        """Return a context for these arguments of `ssl.create_default_context`."""
        stores = Stores.of(purpose, cafile, capath, cadata)
        if stores is not None:
            self.asked[stores] += 1
            replaced = self._make is not self._made_by or ssl.SSLContext is not self._kind  # as `truststore` does
            if not replaced and (made := self._made.get(stores)):
                return made.pop()
        return self._make(purpose, cafile=cafile, capath=capath, cadata=cadata)

    def told(self) -> list[dict[str, Any]]:
        """Return which certificate files were asked for and how often, as JSON."""
        return [{"stores": asdict(stores), "count": count} for stores, count in self.asked.items()]


def built_models() -> list[list[str]]:
    """The module and name of each pydantic model that defers its building to its first use and has been built."""
    return [
        [model.__module__, model.__qualname__]
        for model in _models()
        if model.model_config.get("defer_build") and model.__dict__.get("__pydantic_complete__")
    ]


def build_model(module: str, name: str) -> None:
    """Build the pydantic model `name` of a module. Raises what its building raises."""
    model = getattr(importlib.import_module(module), name)
    model.model_rebuild()


def fill_caches() -> None:
    """Fill the caches that any call of a model fills: the origins of the imported modules, and those of clients, which adapters
    know (`lightning_warm`)."""
    for module in list(sys.modules.values()):
        if isinstance(file := getattr(module, "__file__", None), str):
            know_origin(file)
    plugins().hook.lightning_warm()


def _models() -> Iterator[Any]:
    base = getattr(sys.modules.get("pydantic"), "BaseModel", None)
    found, todo = set(), [] if base is None else [base]
    while todo:
        for model in todo.pop().__subclasses__():
            if model not in found:
                found.add(model)
                todo.append(model)
                yield model
