"""Which stores a test of the contract runs against: all of them in the end, the quick ones at once."""

from __future__ import annotations

import pytest

QUICK = ("memory", "sqlite")
SERVED = ("http", "redis")
"""Not slow, but hundreds of tests that each open a store on a server are: the fast tests ask these what `everywhere` marks."""
SLOW = ("postgres",)


def _slow(*names: str) -> list[object]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


BACKENDS = [*QUICK, *_slow(*SERVED, *SLOW)]
everywhere = pytest.mark.parametrize("make_store", [*QUICK, *SERVED, *_slow(*SLOW)], indirect=True)
"""For tests that together call each method of a store: they are fast tests over HTTP and Redis, too."""
