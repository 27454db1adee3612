"""The two ways in which clients come to be in a cluster: a pool of pods, and one Job for each rollout.

The invariant: neither counts on its own memory; how many clients are missing follows from the cluster (and for Jobs from the
store) as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lightning.types import Status

from lightning_k8s.cluster import Cluster, Object
from lightning_k8s.manifests import Manifests
from lightning_k8s.mirror import Mirror
from lightning_k8s.pods import PodView, job_ended, job_problem

logger = logging.getLogger(__name__)

BURST = 20
"""Clients made in one look: a cluster is not to be flooded."""


class Pool:
    """`runner.k8s.pods` pods, each of which works on its share of `runner.concurrency` rollouts at once."""

    def __init__(self, cluster: Cluster, manifests: Manifests, pods: Mirror) -> None:
        self._cluster, self._manifests, self._pods = cluster, manifests, pods
        self._size = manifests.config.k8s.pods
        self._each = -(-manifests.config.concurrency // self._size)
        self._secret: Object = {}
        self._deleted: set[str] = set()

    @property
    def mirrors(self) -> Sequence[Mirror]:
        """See `Kind.mirrors`."""
        return ()

    def prepare(self, secret: Object) -> None:
        """See `Kind.prepare`."""
        self._secret = secret

    async def missing(self, pods: Sequence[PodView]) -> int:
        """See `Kind.missing`."""
        return min(BURST, self._size - sum(pod.living for pod in pods))

    async def make(self) -> None:
        """See `Kind.make`."""
        self._pods.note(await self._cluster.create("pods", self._manifests.pod(self._secret, self._each)))

    async def tidy(self, pods: Sequence[PodView]) -> None:
        """Delete pods that have ended, and what a node that came back, or a lost answer, made too many."""
        self._deleted &= {pod.name for pod in pods}
        living = sorted((pod for pod in pods if pod.living), key=lambda pod: not pod.running)
        over = [pod for pod in pods if pod.ended and not pod.leaving] + living[self._size :]
        for pod in over:
            if pod.name not in self._deleted:
                await self._cluster.delete("pods", pod.name)
                self._deleted.add(pod.name)


class Jobs:
    """A Job for each rollout that is neither done nor given up, at most `runner.concurrency` at once.

    A Job leases what it runs, as every client does, so it is not made for a certain rollout; the lease's worker names the pod.
    """

    def __init__(self, cluster: Cluster, manifests: Manifests, jobs: Mirror) -> None:
        self._cluster, self._manifests, self._jobs = cluster, manifests, jobs
        self._limit = manifests.config.concurrency
        self._secret: Object = {}
        self._told: set[str] = set()

    @property
    def mirrors(self) -> Sequence[Mirror]:
        """See `Kind.mirrors`."""
        return (self._jobs,)

    def prepare(self, secret: Object) -> None:
        """See `Kind.prepare`."""
        self._secret = secret

    async def missing(self, pods: Sequence[PodView]) -> int:
        """See `Kind.missing`."""
        living = sum(not job_ended(job) for job in self._jobs.objects.values())
        return max(0, min(BURST, await self._unfinished() - living))

    async def make(self) -> None:
        """See `Kind.make`."""
        self._jobs.note(await self._cluster.create("jobs", self._manifests.job(self._secret)))

    async def tidy(self, pods: Sequence[PodView]) -> None:
        """Nothing is deleted: the cluster removes a Job some time after its end. Tell of those that failed without a pod."""
        self._told &= self._jobs.objects.keys()
        for name, job in self._jobs.objects.items():
            problem = job_problem(job)
            if (
                problem and name not in self._told and "BackoffLimitExceeded" not in problem
            ):  # of that one its pod tells
                self._told.add(name)
                logger.warning("the Job %s failed: %s", name, problem)

    async def _unfinished(self) -> int:
        """Rollouts of the run that wait or run, counted up to the limit."""
        site, found = self._manifests.site, set[str]()  # by id: one may be leased between the two questions
        for status in (Status.PENDING, Status.RUNNING):
            page = await site.store.list_rollouts(site.run, status=status, limit=self._limit)
            found |= {rollout.id for rollout in page.items}
        return min(len(found), self._limit)
