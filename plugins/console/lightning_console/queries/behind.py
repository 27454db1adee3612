"""Find the rollouts of a run that begin behind rollouts of earlier steps or of another run (`trainer.sampling = prefix`).

The invariant: a rollout of a run is read once, however many pages ask. Settings are read again, because a resume may change
them. Branches in the group of their parent are found with their group, not here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

from lightning.errors import LightningError, UnavailableError
from lightning.store.protocol import Store
from lightning.trainer.context import is_over, read_epochs
from lightning.types import Rollout, Run
from lightning_branching.config import PREFIX

from lightning_console.queries.memo import Memo, stamp_of

LOOKED: Final = 500
"""Most runs of a store, from the newest, that are searched for branches of another run."""
SETTLED: Final = 60.0
"""Seconds for which the settings of another run are not read again."""


@dataclass(slots=True)
class _Behind:
    """The ids of a run's rollouts by the id of their parent, as far as they were read: up to the page at the `cursor`, which is
    read again, because the last page grows. The ids are the keys of the inner mappings."""

    by_parent: dict[str, dict[str, None]] = field(default_factory=dict)
    cursor: str = ""

    async def extend(self, store: Store, run: str) -> bool:
        """Read the rollouts that are new; return True."""
        while True:
            page = await store.list_rollouts(run, cursor=self.cursor)
            for each in page.items:
                if each.parent is not None:
                    self.by_parent.setdefault(each.parent[0], {})[each.id] = None
            if not page.cursor:
                return True
            self.cursor = page.cursor


_known: WeakKeyDictionary[Store, dict[tuple[str, float], _Behind]] = WeakKeyDictionary()
_read: Memo[bool] = Memo()
_lenders: WeakKeyDictionary[Store, dict[tuple[str, float], tuple[float, frozenset[str]]]] = WeakKeyDictionary()
"""By run, when its settings were read (of the monotonic clock), and the runs behind whose rollouts its groups may begin."""


async def samples_prefixes(store: Store, run: Run) -> bool:
    """Return whether groups of a run may begin behind rollouts of its earlier steps, since its beginning or since a resume."""
    return any(epoch.setting("trainer", "sampling") == PREFIX for epoch in await read_epochs(store, run))


async def borrowers_of(store: Store, run: Run, patience: float | None) -> tuple[list[Run], bool]:
    """Return the other runs of a run's project whose groups may begin behind its rollouts, the newest first, and whether some
    are still unread: one call reads settings for at most `patience` seconds (None: no limit). A borrower may be older than the
    run, because a resume may have changed its settings."""
    found: list[Run] = []
    more, until = False, math.inf if patience is None else time.monotonic() + patience
    known = _lenders.setdefault(store, {})
    for other in await store.list_runs(run.project, limit=LOOKED, brief=True):
        if other.id == run.id:
            continue
        about, now = (other.id, other.created_at), time.monotonic()
        if now < until and (about not in known or now - known[about][0] >= SETTLED):
            known[about] = (now, await _lenders_of(store, other.id))
        more = more or about not in known
        if about in known and run.id in known[about][1]:
            found.append(other)
    return found, more


async def _lenders_of(store: Store, name: str) -> frozenset[str]:
    """Return the other runs behind whose rollouts groups of a run may begin, since its beginning or since a resume."""
    try:
        run = await store.get_run(name)
        epochs = await read_epochs(store, run) if run is not None else []
    except UnavailableError:
        raise
    except LightningError:  # its own page says so; it must not hide branches of other runs
        return frozenset()
    named = [
        epoch.setting("trainer", "prefix_run") for epoch in epochs if epoch.setting("trainer", "sampling") == PREFIX
    ]
    return frozenset(str(lender) for lender in named if lender)


async def begun_behind(
    store: Store, run: Run, parents: Collection[str], most: int, patience: float | None
) -> tuple[list[Rollout], bool]:
    """Return at most `most` rollouts of a run that begin behind these parents, by parent in the order of their creation, and
    whether there may be more. Rollouts that were not read within `patience` seconds (None: no limit) are left for the next
    call."""
    about = (run.id, run.created_at)
    behind = _known.setdefault(store, {}).setdefault(about, _Behind())
    stamp = await stamp_of(store, run.id)
    whole = await _read.soon(store, about, stamp, lambda: behind.extend(store, run.id), patience)
    names = [name for parent in parents for name in behind.by_parent.get(parent, ())]
    found = [await store.get_rollout(name) for name in names[:most]]
    return [each for each in found if each is not None], not whole or not await is_over(store, run.id)
