"""What there is in the cluster of one kind with our label, kept up to date by list and watch.

The invariant: once `ready` is set, `objects` is what the cluster had at the last list, with every change since in order. Each
watch begins with a list, and ends after minutes, so that whatever went wrong is right again by then.
"""

from __future__ import annotations

import asyncio
import logging

from lightning_k8s.cluster import Cluster, ClusterError, Object
from lightning_k8s.health import Pace

logger = logging.getLogger(__name__)


class Mirror:
    """Run `follow` in a task; `changed` is set whenever `objects` (by name) changed, for the reader to clear."""

    def __init__(self, cluster: Cluster, path: str, selector: str, changed: asyncio.Event, pace: Pace) -> None:
        self._cluster, self._path, self._selector, self._pace = cluster, path, selector, pace
        self._deleted: set[str] = set()  # since the last list
        self.objects: dict[str, Object] = {}
        self.changed, self.ready = changed, asyncio.Event()

    def note(self, body: Object) -> None:
        """An object that was just created, of which the watch may not have told yet, or have told already that it is gone."""
        name = body["metadata"]["name"]
        if name not in self._deleted:
            self.objects.setdefault(name, body)
            self.changed.set()

    async def follow(self) -> None:
        """Until cancelled. Raises `ClusterError` when the cluster refuses for good."""
        failures = 0
        while True:
            try:
                version = await self._list()
                async for kind, body in self._cluster.watch(self._path, self._selector, version):
                    self._heed(kind, body)
                    failures = 0
                await asyncio.sleep(self._pace.pause / 10)  # an API that ends each watch at once is not hurried
            except ClusterError as error:
                if not error.again:
                    raise
                failures += 1
                if failures == 2:
                    logger.warning("%s; asking again", error)
                await asyncio.sleep(min(self._pace.longest, self._pace.pause * 2 ** min(failures, 10)))

    async def _list(self) -> str:
        found, version = await self._cluster.list(self._path, self._selector)
        self.objects, self._deleted = {body["metadata"]["name"]: body for body in found}, set()
        self.ready.set()
        self.changed.set()
        return version

    def _heed(self, kind: str, body: Object) -> None:
        name = body["metadata"].get("name", "")
        if kind == "DELETED":
            self.objects.pop(name, None)
            self._deleted.add(name)
        elif kind in ("ADDED", "MODIFIED"):
            self.objects[name] = body
        else:
            return
        self.changed.set()
