"""Keeps the clients of one run in a cluster: as many as there should be, each dead one replaced, none left behind.

The invariant: the wanted clients are compared with the existing ones again and again, so that the next comparison repairs
whatever was missed (an answer, an event, a node). No count is kept in memory: how many clients are missing follows from the
cluster (and for Jobs from the store). When keeping ends, all objects of the run in the cluster are deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from lightning.asyncio_utils import cancel, is_set_within
from lightning.errors import RunnerError
from lightning.types import Status

from lightning_k8s.cluster import Cluster, ClusterError, Object
from lightning_k8s.config import KubernetesConfig
from lightning_k8s.health import Health, Pace, PodView, job_ended, job_problem, view
from lightning_k8s.manifests import Manifests

logger = logging.getLogger(__name__)


class Mirror:
    """A copy of the cluster's objects of one kind with our label, kept up to date by list and watch. Once `ready` is set,
    `objects` has the last list with every change since, in order. Each watch begins with a list and ends after minutes, so that
    no error lasts longer.

    Run `follow` in a task. `changed` is set whenever `objects` (by name) has changed; the reader clears it.
    """

    def __init__(self, cluster: Cluster, path: str, selector: str, changed: asyncio.Event, pace: Pace) -> None:
        self._cluster, self._path, self._selector, self._pace = cluster, path, selector, pace
        self._deleted: set[str] = set()  # since the last list
        self.objects: dict[str, Object] = {}
        self.changed, self.ready = changed, asyncio.Event()

    def note(self, body: Object) -> None:
        """Add an object that was just created and that the watch may not have reported yet, unless it has already reported its
        deletion."""
        name = body["metadata"]["name"]
        if name not in self._deleted:
            self.objects.setdefault(name, body)
            self.changed.set()

    async def follow(self) -> None:
        """Keep `objects` up to date until cancelled. Raises `ClusterError` when the cluster refuses for good."""
        failures = 0
        while True:
            try:
                version = await self._list()
                async for kind, body in self._cluster.watch(self._path, self._selector, version):
                    self._heed(kind, body)
                    failures = 0
                await asyncio.sleep(self._pace.pause / 10)  # so that an API that ends each watch at once is not flooded
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


BURST = 20
"""The most clients that are created at one look, so that the cluster is not flooded."""


class Pool:
    """`runner.k8s.pods` pods, each of which works on its share of `runner.concurrency` rollouts at once."""

    def __init__(self, cluster: Cluster, manifests: Manifests, pods: Mirror) -> None:
        self._cluster, self._manifests, self._pods = cluster, manifests, pods
        self._size = KubernetesConfig.of(manifests.config).pods
        self._each = -(-manifests.config.concurrency // self._size)
        self._deleted: set[str] = set()

    async def missing(self, pods: Sequence[PodView]) -> int:
        """Return how many pods are missing, `BURST` at most."""
        return min(BURST, self._size - sum(pod.living for pod in pods))

    async def make(self, secret: Object) -> None:
        """Create a pod."""
        self._pods.note(await self._cluster.create("pods", self._manifests.pod(secret, self._each)))

    async def tidy(self, pods: Sequence[PodView]) -> None:
        """Delete pods that have ended, and pods beyond the wanted number, as after a lost answer or when a lost node comes
        back."""
        self._deleted &= {pod.name for pod in pods}
        living = sorted((pod for pod in pods if pod.living), key=lambda pod: not pod.running)
        over = [pod for pod in pods if pod.ended and not pod.leaving] + living[self._size :]
        for pod in over:
            if pod.name not in self._deleted:
                await self._cluster.delete("pods", pod.name)
                self._deleted.add(pod.name)


class Jobs:
    """Clients as Jobs: one for each rollout that is pending or running, at most `runner.concurrency` at once.

    A Job leases its rollout, as every client does, so it is not made for a certain rollout; the lease's worker names the pod.
    """

    def __init__(self, cluster: Cluster, manifests: Manifests, jobs: Mirror) -> None:
        self._cluster, self._manifests, self._jobs = cluster, manifests, jobs
        self._limit = manifests.config.concurrency
        self._told: set[str] = set()

    async def missing(self, pods: Sequence[PodView]) -> int:
        """Return how many Jobs are missing, `BURST` at most."""
        living = sum(not job_ended(job) for job in self._jobs.objects.values())
        return max(0, min(BURST, await self._unfinished() - living))

    async def make(self, secret: Object) -> None:
        """Create a Job."""
        self._jobs.note(await self._cluster.create("jobs", self._manifests.job(secret)))

    async def tidy(self, pods: Sequence[PodView]) -> None:
        """Log the Jobs that failed without a pod. None is deleted: the cluster does that some time after a Job's end."""
        self._told &= self._jobs.objects.keys()
        for name, job in self._jobs.objects.items():
            problem = job_problem(job)
            if (
                problem and name not in self._told and "BackoffLimitExceeded" not in problem
            ):  # then its pod's problem is logged
                self._told.add(name)
                logger.warning("the Job %s failed: %s", name, problem)

    async def _unfinished(self) -> int:
        """Return how many rollouts of the run are pending or running, counted up to the limit."""
        site, found = self._manifests.site, set[str]()  # by id: one may be leased between the two questions
        for status in (Status.PENDING, Status.RUNNING):
            page = await site.store.list_rollouts(site.run, status=status, limit=self._limit)
            found |= {rollout.id for rollout in page.items}
        return min(len(found), self._limit)


T = TypeVar("T")

KINDS = ("jobs", "pods")
"""Kinds of a run's objects in the cluster besides its Secret, in the order in which they are deleted."""

CLOSE_SECONDS = 30.0
"""Seconds that the end of a run waits for the cluster to accept the deletions."""


class Kind(Protocol):
    """How clients are created: as pods of a pool, or as Jobs."""

    async def missing(self, pods: Sequence[PodView]) -> int:
        """Return how many clients should be created now; 0 or less for none."""

    async def make(self, secret: Object) -> None:
        """Create one client, which the run's Secret owns."""

    async def tidy(self, pods: Sequence[PodView]) -> None:
        """Delete clients that have ended or are too many."""


class Keeper:
    """Keeps one run's clients in one cluster. `mirrors` show what exists, the pods first. `changed` is set when another look is
    useful."""

    def __init__(
        self,
        cluster: Cluster,
        manifests: Manifests,
        kind: Kind,
        mirrors: Sequence[Mirror],
        changed: asyncio.Event,
        pace: Pace,
    ) -> None:
        self._cluster, self._manifests, self._kind, self._mirrors, self._pace = cluster, manifests, kind, mirrors, pace
        self._changed, self._health = changed, Health(pace)
        self._patience = KubernetesConfig.of(manifests.config).start_timeout
        self._followers: list[asyncio.Task[None]] = []
        self._began = 0.0
        self._wanted: float | None = None

    async def run(self, owner: Object | None) -> None:
        """Keep clients until cancelled. Raises `RunnerError` when no client can run. All objects are deleted in either case."""
        self._began = _now()
        try:
            await self._insist(self._clear)
            body = self._manifests.secret(owner)
            secret = await self._insist(lambda: self._cluster.create("secrets", body))
            logger.info("starting runner pods in namespace %s of %s", self._cluster.namespace, self._cluster.host)
            self._followers = [self._follow(mirror) for mirror in self._mirrors]
            while True:
                await self._look(secret)
                await is_set_within(self._changed, self._pace.look)
                self._changed.clear()
        finally:
            ending = asyncio.create_task(self._end())
            while not ending.done():  # it takes seconds, and a second cancellation must not leave pods behind
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({ending})
            ending.result()

    async def _look(self, secret: Object) -> None:
        for task in self._followers:
            if task.done():
                task.result()  # the cluster refused to be watched
        ready = all(mirror.ready.is_set() for mirror in self._mirrors)
        if ready:
            pods = [view(pod) for pod in self._mirrors[0].objects.values()]
            self._health.look(pods, _now())
            try:
                await self._put_right(pods, secret)
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

    async def _put_right(self, pods: Sequence[PodView], secret: Object) -> None:
        """Delete clients that are too many, and create missing ones. Raises `ClusterError`."""
        await self._kind.tidy(pods)
        if _now() < self._health.not_before:
            return
        missing = await self._kind.missing(pods)
        if missing > 0 and self._wanted is None:
            self._wanted = _now()
        for _ in range(missing):
            await self._kind.make(secret)

    def _follow(self, mirror: Mirror) -> asyncio.Task[None]:
        task = asyncio.create_task(mirror.follow())
        task.add_done_callback(lambda _: self._changed.set())
        return task

    async def _insist(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the answer to a request, which is repeated until `runner.k8s.start_timeout` while it may still succeed."""
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

    async def _clear(self) -> None:
        """Delete all objects of the run, including those of an earlier trainer."""
        await self._cluster.delete("secrets", self._manifests.secret_name)
        for path in KINDS:
            found, _ = await self._cluster.list(path, self._manifests.selector)
            names = [body["metadata"]["name"] for body in found if "deletionTimestamp" not in body["metadata"]]
            grace = self._manifests.grace
            await asyncio.gather(*(self._cluster.delete(path, name, grace=grace) for name in names))

    async def _end(self) -> None:
        await cancel(*self._followers)
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
