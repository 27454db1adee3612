"""What is random in an agent's process: `random`, numpy, torch and `uuid.uuid4`, seeded anew for each rollout.

The invariant: nothing that keeps secrets is touched (`os.urandom`, `secrets`, `random.SystemRandom`). An attempt with a seed
draws the same numbers each time it is run, as far as its threads come in the same order, and its siblings draw others.
"""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, Final

from lightning.plugins.importing import on_import


def _numpy(module: ModuleType, seed: int | None) -> None:
    module.seed(seed if seed is None else seed % 2**32)


def _torch(module: ModuleType, seed: int | None) -> None:
    if seed is None:
        module.seed()
    else:
        module.manual_seed(seed)


LATER: Final[dict[str, Callable[[Any, int | None], None]]] = {"numpy.random": _numpy, "torch": _torch}
"""Modules that an agent may import at any time, and how to seed them."""


class _Seeded:
    """Stands where the module `uuid` looks for `os`: its random bytes follow from the seed.

    Replacing `uuid.uuid4` itself would miss who has imported that function before.
    """

    def __init__(self) -> None:
        self.generator: random.Random | None = None

    def urandom(self, size: int) -> bytes:
        """Bytes for the next id."""
        return os.urandom(size) if self.generator is None else self.generator.randbytes(size)

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)


_ids = _Seeded()
_seed: int | None = None


def seed_process(seed: int | None) -> None:
    """Begin a rollout: with this seed, or with one that nobody knows. Forks share the generators' state, and the siblings of a
    group must not all explore the same way."""
    global _seed
    _seed = seed
    random.seed(seed)
    _ids.generator = None if seed is None else random.Random(f"uuid4 {seed}")  # noqa: S311 — ids, not secrets
    if seed is not None:
        uuid.os = _ids  # type: ignore[attr-defined]  # what `uuid4` takes its bytes from
    _seed_later()
    for name, again in LATER.items():
        if (module := _imported.get(name)) is not None:
            again(module, seed)


_imported: dict[str, ModuleType] = {}


@cache
def _seed_later() -> None:
    """Seed what is imported from now on, too."""
    for name in LATER:
        on_import(name, lambda module, name=name: _found(name, module))  # type: ignore[misc]


def _found(name: str, module: ModuleType) -> None:
    if name not in _imported:
        _imported[name] = module
        LATER[name](module, _seed)
