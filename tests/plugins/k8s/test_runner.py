"""Clients in a cluster whose API refuses, forgets and breaks off: as many as there should be, and none at the end."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from lightning.config.plugin_settings import RunnerConfig
from lightning.errors import ConfigError, RunnerError
from lightning.plugins import plugins
from lightning.runner.agent_serialization import name_of
from lightning.store.protocol import Store
from lightning.types import LLM, Outcome, Rollout, Run, Task
from lightning_k8s import cluster as cluster_module
from lightning_k8s.cluster import ClusterError
from lightning_k8s.config import KubernetesConfig
from lightning_k8s.health import Pace
from lightning_k8s.runner import KubernetesRunner, reference_to
from lightning_server.protocol import ClientRunner, Site

FakeCluster = Any
PACE = Pace(look=0.02, pause=0.005, longest=0.05, settled=0.1, crashes=3)


def agent(task: Task, llm: LLM) -> float:
    return 1.0


def config_for(cluster: FakeCluster, folder: Path, runner: dict[str, Any] | None = None, **k8s: object) -> RunnerConfig:
    settings: dict[str, Any] = {"image": "agents:1", "agent": "my_app:agent", "kubeconfig": cluster.kubeconfig(folder)}
    k8s = {**settings, "start_timeout": 5.0, **k8s}
    return RunnerConfig(concurrency=4, **(runner or {}), k8s=KubernetesConfig(**k8s))  # type: ignore[arg-type]


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    store = plugins().store("memory://")
    await store.open()
    await store.put_run(Run("run-1", "run-1"))
    yield store
    await store.close()


@pytest.fixture
def site(store: Store) -> Site:
    return Site("http://lightning.example:8000", "lt_1_secret", "run-1", store)


@asynccontextmanager
async def attending(config: RunnerConfig, site: Site) -> AsyncIterator[asyncio.Task[None]]:
    runner = KubernetesRunner(agent, config, PACE)
    await runner.start()
    task = asyncio.create_task(runner.attend(site))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await runner.close()


async def until(true: Callable[[], object], task: asyncio.Task[None] | None = None) -> None:
    for _ in range(6000):
        if true():
            return
        if task is not None and task.done():
            task.result()
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to that")


def names(cluster: FakeCluster) -> set[str]:
    return {pod["metadata"]["name"] for pod in cluster.pods()}


# the pool ----------------------------------------------------------------------------------------------------------
async def test_a_pool_has_its_size_and_goes_with_the_run(cluster: FakeCluster, site: Site, tmp_path: Path) -> None:
    async with attending(config_for(cluster, tmp_path, pods=3), site) as task:
        await until(lambda: len(cluster.pods()) == 3, task)
        await asyncio.sleep(0.1)
        assert len(cluster.pods()) == 3  # and not more
        (secret,) = cluster.objects["secrets"].values()
        assert base64.b64decode(secret["data"]["token"]) == b"lt_1_secret"
        for pod in cluster.pods():
            (owner,) = pod["metadata"]["ownerReferences"]
            assert (owner["kind"], owner["uid"]) == ("Secret", secret["metadata"]["uid"])
            (container,) = pod["spec"]["containers"]
            assert container["command"][:4] == ["lightning", "runner", "--server", "http://lightning.example:8000"]
            assert container["command"][-3:] == ["--concurrency", "2", "my_app:agent"]  # a share, rounded up
            assert "lt_1_secret" not in str(pod)
    assert not any(cluster.objects.values())


async def test_a_run_that_is_cancelled_twice_leaves_nothing(cluster: FakeCluster, site: Site, tmp_path: Path) -> None:
    async with attending(config_for(cluster, tmp_path, pods=2), site) as task:
        await until(lambda: len(cluster.pods()) == 2, task)
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not any(cluster.objects.values())


async def test_a_pod_that_goes_is_replaced(cluster: FakeCluster, site: Site, tmp_path: Path) -> None:
    async with attending(config_for(cluster, tmp_path, pods=2), site) as task:
        await until(lambda: len(cluster.pods()) == 2, task)
        first, second = names(cluster)
        cluster.remove("pods", first)  # its node was drained
        await until(lambda: len(cluster.pods()) == 2 and first not in names(cluster), task)
        cluster.say(second, {"phase": "Failed", "reason": "Evicted", "message": "the node was low on memory"})
        await until(lambda: len(cluster.pods()) == 2 and second not in names(cluster), task)
        assert second in cluster.deletions
        third = next(iter(names(cluster)))
        cluster.say(third, {"phase": "Unknown"})  # the node does not answer any more
        await until(lambda: len(cluster.pods()) == 3, task)
        cluster.say(third, cluster.RUNNING)  # and now it does
        await until(lambda: len(cluster.pods()) == 2, task)


async def test_a_second_trainer_of_the_run_removes_what_the_first_left(
    cluster: FakeCluster, site: Site, tmp_path: Path
) -> None:
    config = config_for(cluster, tmp_path, pods=2)
    async with attending(config, site) as task:
        await until(lambda: len(cluster.pods()) == 2, task)
        cluster.token = "another"  # what is deleted now is not, as after a kill
        old = names(cluster)
    assert names(cluster) == old
    cluster.add("pods", {"metadata": {"name": "not-ours", "labels": {"lightning/run": "run-2"}}, "spec": {}})
    (pod, _) = [pod for pod in cluster.pods() if pod["metadata"]["name"] in old]
    unowned = {"name": "unowned", "labels": pod["metadata"]["labels"]}
    cluster.add("pods", {"metadata": unowned, "spec": {}})
    old |= {"unowned"}
    async with attending(config_for(cluster, tmp_path, pods=1), site) as task:
        await until(lambda: len(names(cluster) - old) == 2, task)
        assert not names(cluster) & old
    assert names(cluster) == {"not-ours"}
    given = [grace for grace in cluster.graces if grace is not None]
    assert given, "the one that goes with no Secret is deleted by its name"
    assert set(given) == {pod["spec"]["terminationGracePeriodSeconds"]}, "time to give its leases back"


async def test_an_answer_that_was_lost_makes_no_pod_twice(cluster: FakeCluster, site: Site, tmp_path: Path) -> None:
    cluster.lose_answers = 2  # of the Secret's creation, and the first pod's
    async with attending(config_for(cluster, tmp_path, pods=2), site) as task:
        await until(lambda: len(cluster.pods()) >= 2, task)
        await asyncio.sleep(0.1)
        assert len(cluster.pods()) == 2


# the watch ---------------------------------------------------------------------------------------------------------
async def test_a_watch_that_breaks_or_is_too_old_is_begun_again(
    cluster: FakeCluster, site: Site, tmp_path: Path
) -> None:
    cluster.too_old = 2
    async with attending(config_for(cluster, tmp_path), site) as task:
        for _ in range(3):
            await until(lambda: cluster.watchers and cluster.pods(), task)
            cluster.cut()
            (name,) = names(cluster)
            cluster.remove("pods", name)  # nobody hears of it
            cluster.too_old = 1
            await until(lambda name=name: cluster.pods() and name not in names(cluster), task)
    assert cluster.requests.count(("GET", "pods")) > 6


async def test_a_pod_that_is_gone_before_its_creation_was_answered_is_replaced(
    cluster: FakeCluster, site: Site, tmp_path: Path
) -> None:
    cluster.vanish = 3  # as many pods are deleted, and that is told, before the answer to their creation
    async with attending(config_for(cluster, tmp_path), site) as task:
        await until(cluster.pods, task)
        await until(lambda: len(cluster.made) == 1 + 3 + 1, task)  # the Secret, those, and one that stayed


async def test_an_api_that_is_away_for_a_while_ends_nothing(
    cluster: FakeCluster, site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.refusals = [("DELETE", "secrets", 503, "not yet"), ("POST", "secrets", 500, "etcd has no leader")]
    async with attending(config_for(cluster, tmp_path), site) as task:
        await until(cluster.pods, task)
        for verb, kind in (("GET", "pods"), ("POST", "pods")):
            cluster.always_refuse.append((verb, kind, 503, "the API server is restarting"))
        (name,) = names(cluster)
        cluster.remove("pods", name)
        cluster.cut()
        await asyncio.sleep(0.3)
        assert not cluster.pods()
        cluster.always_refuse.clear()
        await until(cluster.pods, task)
    said = [record.getMessage() for record in caplog.records]
    assert sum("the API server is restarting" in text for text in said) <= 4  # told, not flooded
    assert any("etcd has no leader" in text for text in said)


async def test_credentials_that_expired_are_read_again(cluster: FakeCluster, site: Site, tmp_path: Path) -> None:
    config = config_for(cluster, tmp_path)
    async with attending(config, site) as task:
        await until(cluster.pods, task)
        cluster.token = "renewed"
        cluster.kubeconfig(tmp_path)
        (name,) = names(cluster)
        cluster.remove("pods", name)
        await until(cluster.pods, task)
    assert not any(cluster.objects.values())


# what is refused ---------------------------------------------------------------------------------------------------
async def fails_with(cluster: FakeCluster, config: RunnerConfig, site: Site) -> str:
    async with attending(config, site) as task:
        with pytest.raises(RunnerError) as caught:
            await asyncio.wait_for(asyncio.shield(task), 60)
    assert not cluster.objects["pods"]
    assert not cluster.objects["jobs"]
    return str(caught.value)


FORBIDDEN = 'pods is forbidden: User "me" cannot {} resource "pods" in API group "" in the namespace "agents"'


@pytest.mark.parametrize(
    ("refusal", "says"),
    [
        (("POST", "pods", 403, FORBIDDEN.format("create")), "docs/runners.md has the Role"),
        (("GET", "pods", 403, FORBIDDEN.format("list")), "listing pods in namespace 'agents': the cluster said 403"),
        (("POST", "secrets", 403, 'secrets is forbidden: User "me" cannot create'), "the Role that the trainer needs"),
        (("POST", "pods", 403, 'pods "x" is forbidden: violates PodSecurity "restricted"'), "admits the pod"),
        (("POST", "pods", 422, "Pod is invalid: spec.containers[0].image: Required value"), "Change runner.k8s"),
        (("POST", "secrets", 404, 'namespaces "agents" not found'), "runner.k8s.namespace"),
    ],
)
async def test_what_the_cluster_refuses_for_good_ends_the_run(
    cluster: FakeCluster, site: Site, tmp_path: Path, refusal: tuple[str, str, int, str], says: str
) -> None:
    if refusal[0] == "GET":
        cluster.refusals = [refusal]  # the first list, with which it clears up
    else:
        cluster.always_refuse = [refusal]
    text = await fails_with(cluster, config_for(cluster, tmp_path), site)
    assert says in text
    assert refusal[3] in text


async def test_a_quota_is_waited_for_but_not_for_ever(
    cluster: FakeCluster, site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quota = ("POST", "pods", 403, 'pods "x" is forbidden: exceeded quota: compute, requested: pods=1, used: pods=9')
    cluster.refusals = [quota] * 3
    async with attending(config_for(cluster, tmp_path, pods=2), site) as task:
        await until(lambda: len(cluster.pods()) == 2, task)
    assert sum("exceeded quota" in record.getMessage() for record in caplog.records) == 1
    cluster.always_refuse = [quota]
    text = await fails_with(cluster, config_for(cluster, tmp_path, start_timeout=1.5), site)
    assert "no runner pod was running after 1.5 s (runner.k8s.start_timeout)" in text
    assert "Raise the namespace's quota" in text


# pods that do not run ----------------------------------------------------------------------------------------------
async def test_an_image_that_cannot_be_pulled_is_told_at_once_and_ends_the_run_in_time(
    cluster: FakeCluster, site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.kubelet = lambda _: cluster.waiting("ImagePullBackOff", 'Back-off pulling image "agents:1"')
    config = config_for(cluster, tmp_path, start_timeout=1.0, pods=2)
    async with attending(config, site) as task:
        await until(lambda: "Back-off pulling" in caplog.text, task)
        assert not task.done()
        with pytest.raises(RunnerError, match=r"(?s)after 1 s.*ImagePullBackOff.*Check runner.k8s.image"):
            await task
    assert caplog.text.count("Back-off pulling") == 1  # two pods, one problem
    cluster.kubelet = lambda _: cluster.waiting("InvalidImageName", 'couldn\'t parse image "Agents:1"')
    assert "no runner pod can start" in await fails_with(cluster, config_for(cluster, tmp_path), site)


async def test_a_pod_that_no_node_takes_says_why(cluster: FakeCluster, site: Site, tmp_path: Path) -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: cpu"}
    cluster.kubelet = lambda _: {"phase": "Pending", "conditions": [condition]}
    text = await fails_with(cluster, config_for(cluster, tmp_path, start_timeout=0.5), site)
    assert "no node takes it: 0/3 nodes: cpu" in text


async def test_clients_that_die_as_soon_as_they_start_are_tried_more_and_more_slowly_then_given_up(
    cluster: FakeCluster, site: Site, tmp_path: Path
) -> None:
    cluster.kubelet = lambda _: cluster.ended(1, "no module named {my_app}")
    text = await fails_with(cluster, config_for(cluster, tmp_path, pods=2), site)
    assert "end as soon as they start" in text
    assert "no module named {my_app}" in text
    assert len([body for body in cluster.made if body["kind"] == "Pod"]) == 2 * PACE.crashes


async def test_a_client_that_crashes_now_and_then_is_replaced_for_ever(
    cluster: FakeCluster, site: Site, tmp_path: Path
) -> None:
    async with attending(config_for(cluster, tmp_path), site) as task:
        for _ in range(PACE.crashes + 2):
            await until(cluster.pods, task)
            (name,) = names(cluster)
            await asyncio.sleep(PACE.settled + 0.05)
            cluster.say(name, cluster.ended(137, reason="OOMKilled"))
            await until(lambda name=name: name not in names(cluster), task)
        await until(cluster.pods, task)


# jobs --------------------------------------------------------------------------------------------------------------
async def test_there_is_a_job_for_each_rollout_that_is_not_done(
    cluster: FakeCluster, store: Store, site: Site, tmp_path: Path
) -> None:
    def jobs() -> list[dict[str, Any]]:
        return list(cluster.objects["jobs"].values())

    async def create(first: int, count: int) -> None:
        ids = range(first, first + count)
        await store.create_rollouts([Rollout(f"run-1/{i}", "run-1", Task(i), f"g{i}") for i in ids])

    async def finish(job: dict[str, Any]) -> None:
        """What the client of a Job does."""
        (lease,) = await store.lease("run-1", "pod")
        await store.complete(lease.rollout.id, lease.attempt, Outcome(reward=1.0))
        cluster.say(f"{job['metadata']['name']}-x", cluster.ended(0))

    async with attending(config_for(cluster, tmp_path, mode="job"), site) as task:
        await asyncio.sleep(0.1)
        assert not jobs()  # there is nothing to do
        await create(0, 2)
        await until(lambda: len(jobs()) == 2, task)
        await asyncio.sleep(0.1)
        assert len(jobs()) == 2
        spec = jobs()[0]["spec"]
        assert spec["backoffLimit"] == 0
        assert "--rollouts" in spec["template"]["spec"]["containers"][0]["command"]
        await create(2, 5)
        await until(lambda: len(jobs()) == 4, task)  # runner.concurrency
        for _ in range(7):
            await until(lambda: any("status" not in job for job in jobs()), task)
            await finish(next(job for job in jobs() if "status" not in job))
            await asyncio.sleep(0.03)
        assert len(jobs()) == 7
        await create(7, 1)
        await until(lambda: len(jobs()) == 8, task)
        cluster.say(f"{jobs()[-1]['metadata']['name']}-x", cluster.ended(1, "killed"))
        await until(lambda: len(jobs()) == 9, task)  # the rollout is still to be done
    assert not cluster.objects["jobs"]
    assert not cluster.objects["pods"]


async def test_jobs_that_are_not_wanted_are_not_missed(
    cluster: FakeCluster, store: Store, site: Site, tmp_path: Path
) -> None:
    async with attending(config_for(cluster, tmp_path, mode="job", start_timeout=0.3), site) as task:
        await asyncio.sleep(0.5)  # the trainer loads its model, or trains
        assert not task.done()


# settings ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("server", ["http://127.0.0.1:8000", "http://good.example:1,http://localhost:2"])
async def test_a_server_that_pods_cannot_reach_is_refused(
    cluster: FakeCluster, site: Site, tmp_path: Path, server: str
) -> None:
    runner = KubernetesRunner(agent, config_for(cluster, tmp_path), PACE)
    await runner.start()
    with pytest.raises(ConfigError, match=r"set server.host to 0.0.0.0 and server.public_url"):
        await runner.attend(Site(server, "t", "run-1", site.store))
    await runner.close()
    assert not cluster.requests


async def test_without_a_cluster_it_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    missing = RunnerConfig(k8s=KubernetesConfig(agent="a:b", kubeconfig=str(tmp_path / "none")))
    with pytest.raises(
        ConfigError, match=r"no Kubernetes cluster to run agents in: there is no kubeconfig at .*none\. "
    ):
        await KubernetesRunner(agent, missing).start()


async def test_in_a_pod_everything_belongs_to_the_trainers_pod(
    cluster: FakeCluster, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = cluster.add("pods", {"metadata": {"name": "trainer-0", "labels": {}}, "spec": {}})
    config = config_for(cluster, tmp_path)
    monkeypatch.setenv("POD_NAME", "trainer-0")
    monkeypatch.setattr("lightning_k8s.runner.inside", lambda _: True)
    async with attending(config, site) as task:
        await until(lambda: len(cluster.pods()) == 2, task)
        (secret,) = cluster.objects["secrets"].values()
        assert secret["metadata"]["ownerReferences"][0]["uid"] == trainer["metadata"]["uid"]
        cluster.remove("pods", "trainer-0")
        assert not cluster.objects["secrets"]


def test_the_agents_name_is_one_that_an_import_finds() -> None:
    assert reference_to(name_of) == "lightning.runner.agent_serialization:name_of"  # type: ignore[arg-type]
    assert reference_to(Outcome.__init__) == "lightning.types:Outcome.__init__"
    for nameless in (lambda task, llm: 1.0, contextlib.nullcontext()):
        with pytest.raises(RunnerError, match=r"no name that a pod could import.*runner.k8s.agent"):
            reference_to(nameless)  # type: ignore[arg-type]


def test_an_agent_that_pods_could_not_call_is_refused() -> None:
    with pytest.raises(RunnerError, match=r"name_of, which takes \(agent\), cannot be called with \(task, llm\)"):
        KubernetesRunner(name_of, RunnerConfig(k8s=KubernetesConfig()))  # type: ignore[arg-type]
    KubernetesRunner(name_of, RunnerConfig(k8s=KubernetesConfig(agent="a:b")))  # type: ignore[arg-type]


def test_it_is_a_runner_of_clients(tmp_path: Path) -> None:
    config = RunnerConfig(k8s=KubernetesConfig(agent="a:b"))
    runner = KubernetesRunner(agent, config)
    assert isinstance(runner, ClientRunner)
    assert runner.concurrency == 0


def test_a_cluster_error_says_whether_to_ask_again() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(ClusterError("text", 503, True)))
    assert (str(error), error.status, error.again) == ("text", 503, True)
    assert cluster_module.WATCH_SECONDS < 600  # a load balancer's idle limit
