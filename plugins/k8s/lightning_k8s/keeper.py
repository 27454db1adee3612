"""Keeps clients running in a cluster for one run: as many as there should be, each that died replaced, none left behind.

The invariant: what should be there is compared with what is there, over and over, so that whatever was missed (an answer, an
event, a node) is put right by the next look; when keeping ends, so does everything of the run in the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from lightning.errors import RunnerError

from lightning_k8s.cluster import Cluster, ClusterError, Object
from lightning_k8s.health import Health, Pace
from lightning_k8s.manifests import Manifests
from lightning_k8s.mirror import Mirror
from lightning_k8s.pods import PodView, view

logger = logging.getLogger(__name__)
T = TypeVar("T")

KINDS = ("jobs", "pods")
"""What there may be of a run in the cluster besides its Secret, in the order it is deleted."""

CLOSE_SECONDS = 30.0
"""How long the end of a run waits for the cluster to take the deletions."""


class Kind(Protocol):
    """How clients come to be: pods of a pool, or Jobs."""

    @property
    def mirrors(self) -> Sequence[Mirror]:
        """What it looks at besides the pods."""

    def prepare(self, secret: Object) -> None:
        """Learn the owner of what will be made."""

    async def missing(self, pods: Sequence[PodView]) -> int:
        """How many clients should be made now."""

    async def make(self) -> None:
        """Make one."""

    async def tidy(self, pods: Sequence[PodView]) -> None:
        """Delete what has served its time, or is too much."""


class Keeper:
    """One run's clients in one cluster. `changed` is set by whatever makes another look worth while."""

    def __init__(
        self, cluster: Cluster, manifests: Manifests, kind: Kind, pods: Mirror, changed: asyncio.Event, pace: Pace
    ) -> None:
        self._cluster, self._manifests, self._kind, self._pods, self._pace = cluster, manifests, kind, pods, pace
        self._changed, self._health = changed, Health(pace)
        self._patience = manifests.config.k8s.start_timeout
        self._followers: list[asyncio.Task[None]] = []
        self._began = 0.0
        self._wanted: float | None = None

    async def run(self, owner: Object | None) -> None:
        """Until cancelled. Raises `RunnerError` when there can be no client; everything is deleted in either case."""
        self._began = _now()
        try:
            await self._insist(self._clear)
            self._kind.prepare(await self._insist(lambda: self._create_secret(owner)))
            logger.info("starting runner pods in namespace %s of %s", self._cluster.namespace, self._cluster.host)
            self._followers = [self._follow(mirror) for mirror in (self._pods, *self._kind.mirrors)]
            while True:
                await self._look()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pace.look):  # `wait_for` may lose a cancellation on Python 3.11
                        await self._changed.wait()
                self._changed.clear()
        finally:
            ending = asyncio.create_task(self._end())
            while not ending.done():  # it takes seconds, and who cancels twice would leave pods behind
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({ending})
            ending.result()

    async def _look(self) -> None:
        for task in self._followers:
            if task.done():
                task.result()  # the cluster refused to be watched
        ready = all(mirror.ready.is_set() for mirror in (self._pods, *self._kind.mirrors))
        if ready:
            pods = [view(pod) for pod in self._pods.objects.values()]
            self._health.look(pods, _now())
            try:
                await self._put_right(pods)
            except ClusterError as error:
                if not error.again:
                    raise
                self._health.tell(str(error), _now())
                self._health.pause(self._pace.pause * 5, _now())
        since = self._wanted if ready else self._began
        if not self._health.ever_ran and since is not None and _now() - since > self._patience:
            raise RunnerError(
                f"no runner pod was running after {self._patience:g} s (runner.k8s.start_timeout): "
                f"{self._health.last_problem}"
            )

    async def _put_right(self, pods: Sequence[PodView]) -> None:
        """Delete what is too much, make what is missing. Raises `ClusterError`."""
        await self._kind.tidy(pods)
        if _now() < self._health.not_before:
            return
        missing = await self._kind.missing(pods)
        if missing > 0 and self._wanted is None:
            self._wanted = _now()
        for _ in range(missing):
            await self._kind.make()

    def _follow(self, mirror: Mirror) -> asyncio.Task[None]:
        task = asyncio.create_task(mirror.follow())
        task.add_done_callback(lambda _: self._changed.set())
        return task

    async def _insist(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer, asked for again until `runner.k8s.start_timeout` while the cluster may yet give it."""
        pause = self._pace.pause
        while True:
            try:
                return await ask()
            except ClusterError as error:
                if not error.again or _now() - self._began > self._patience:
                    raise
                self._health.tell(str(error), _now())
            await asyncio.sleep(pause)
            pause = min(pause * 2, self._pace.longest)

    async def _create_secret(self, owner: Object | None) -> Object:
        return await self._cluster.create("secrets", self._manifests.secret(owner))

    async def _clear(self) -> None:
        """Delete everything of the run: what an earlier trainer left behind, or what was made here."""
        await self._cluster.delete("secrets", self._manifests.secret_name)
        for path in KINDS:
            found, _ = await self._cluster.list(path, self._manifests.selector)
            names = [body["metadata"]["name"] for body in found if "deletionTimestamp" not in body["metadata"]]
            grace = self._manifests.grace
            await asyncio.gather(*(self._cluster.delete(path, name, grace=grace) for name in names))

    async def _end(self) -> None:
        for task in self._followers:
            task.cancel()
        await asyncio.gather(*self._followers, return_exceptions=True)
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._clear()
        except (ClusterError, TimeoutError) as error:
            logger.warning(
                "the clients of this run may still be in the cluster (%s). They go with their Secret: "
                "kubectl -n %s delete secret %s",
                error or "it did not answer in time",
                self._cluster.namespace,
                self._manifests.secret_name,
            )


def _now() -> float:
    return asyncio.get_running_loop().time()
