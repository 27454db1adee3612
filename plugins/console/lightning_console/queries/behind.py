"""Find the rollouts of a run that begin behind rollouts of earlier steps or of another run (`trainer.sampling = prefix`).

The invariant: a rollout of a run is read once, however many pages ask. Branches in the group of their parent are found with
their group, not here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from lightning.store.protocol import Store
from lightning.trainer.context import is_over, read_epochs
from lightning.types import Json, Rollout, Run
from lightning_branching.config import PREFIX

from lightning_console.queries.memo import Memo, stamp_of


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


async def samples_prefixes(store: Store, run: Run) -> bool:
    """Return whether groups of a run may begin behind rollouts of its earlier steps, since its beginning or since a resume."""
    return any(epoch.setting("trainer", "sampling") == PREFIX for epoch in await read_epochs(store, run))


def borrows_of(config: Mapping[str, Json]) -> str:
    """Return the other run behind whose rollouts the groups of a run with this configuration may begin; empty for none."""
    settings = config.get("config")
    trainer = settings.get("trainer") if isinstance(settings, Mapping) else None
    if not isinstance(trainer, Mapping) or trainer.get("sampling") != PREFIX:
        return ""
    return str(trainer.get("prefix_run") or "")


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
