"""How the Ray runner keeps its actors, with actors that a test scripts: nobody waits for ever, and no place is lost."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
from lightning.config.plugin_settings import Config, RunnerConfig
from lightning.errors import MissingExtraError, RunnerError
from lightning.installation import install_command
from lightning.plugins import plugins
from lightning.runner.outcomes import encode_outcome
from lightning.types import LLM, Fault, Lease, Outcome, Task
from lightning_k8s.config import KubernetesConfig
from lightning_ray import runner as module
from lightning_ray.cluster import ActorLostError, actors_for
from lightning_ray.config import RayConfig
from lightning_ray.runner import RayRunner

Leases = Callable[..., Lease]
ANYWHERE = LLM("http://gateway.example/v1", "key", "policy")


def agent(task: Task, llm: LLM) -> float:
    return 1.0


class Method:
    def __init__(self, actor: Actor, name: str) -> None:
        self.actor, self.name = actor, name

    def remote(self, *arguments: object) -> asyncio.Future[Any]:
        self.actor.asked.append(self.name)
        return self.actor.answer(self.name)


class Actor:
    """Answers `start` and `run` with what its cluster's script says."""

    def __init__(self, script: Callable[[Actor, str], Any]) -> None:
        self.script, self.asked, self.killed = script, list[str](), False
        self.start, self.run = Method(self, "start"), Method(self, "run")

    def answer(self, name: str) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        found = self.script(self, name)
        if isinstance(found, Exception):
            future.set_exception(found)
            future.exception()
        elif found is not None:
            future.set_result(found)
        return future


class Cluster:
    """Stands for `RayCluster`."""

    def __init__(self) -> None:
        self.actors: list[Actor] = []
        self.script: Callable[[Actor, str], Any] = self.good
        self.many, self.closed = False, 0

    @staticmethod
    def good(actor: Actor, name: str) -> Any:
        return "" if name == "start" else encode_outcome(Outcome(reward=1.0))

    def spans_machines(self) -> bool:
        return self.many

    def host(self, shipped: bytes) -> Actor:
        self.actors.append(Actor(lambda actor, name: self.script(actor, name)))
        return self.actors[-1]

    async def answer(self, reference: asyncio.Future[Any], seconds: float) -> Any:
        async with asyncio.timeout(seconds):
            return await asyncio.shield(reference)

    def cancel(self, reference: asyncio.Future[Any]) -> None:
        reference.set_exception(ActorLostError("cancelled"))

    def kill(self, actor: Actor) -> None:
        actor.killed = True

    async def close(self) -> None:
        self.closed += 1

    @property
    def living(self) -> list[Actor]:
        return [actor for actor in self.actors if not actor.killed]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()

    async def connect(config: RunnerConfig) -> Cluster:
        return cluster

    monkeypatch.setattr(module, "connect", connect)
    monkeypatch.setattr(module, "GRACE", 0.05)
    monkeypatch.setattr(module, "CANCEL_SECONDS", 0.05)
    monkeypatch.setattr(module, "LONGEST_PAUSE", 0.01)
    return cluster


def runner_of(**settings: Any) -> RayRunner:
    ray = RayConfig(**settings.pop("ray", {}))
    return RayRunner(agent, RunnerConfig(**{"concurrency": 2, "timeout": 0.05, **settings}, ray=ray))


async def test_there_are_as_many_actors_as_the_agents_need(ray: Cluster, lease: Leases) -> None:
    runner = runner_of(concurrency=5, ray={"agents_per_actor": 2})
    await runner.start()
    outcomes = await asyncio.gather(*(runner.run(lease(i), ANYWHERE) for i in range(12)))
    assert [outcome.reward for outcome in outcomes] == [1.0] * 12
    assert len(ray.actors) == actors_for(RunnerConfig(concurrency=5, ray=RayConfig(agents_per_actor=2))) == 3
    await runner.close()
    await runner.close()
    assert (ray.living, ray.closed) == ([], 1)


async def test_no_more_agents_run_in_an_actor_than_it_has_places(ray: Cluster, lease: Leases) -> None:
    ray.script = lambda actor, name: "" if name == "start" else None  # never an answer
    runner = runner_of(timeout=60.0, concurrency=2, ray={"agents_per_actor": 2})
    await runner.start()
    running = [asyncio.create_task(runner.run(lease(i), ANYWHERE)) for i in range(3)]
    await asyncio.sleep(0.05)
    assert ray.actors[0].asked == ["start", "run", "run"]
    running[0].cancel()
    await asyncio.sleep(0.05)
    assert ray.actors[0].asked == ["start", "run", "run", "run"]  # the third has the first one's place
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await runner.close()


async def test_an_actor_that_does_not_answer_is_replaced(ray: Cluster, lease: Leases) -> None:
    ray.script = lambda actor, name: "" if name == "start" else None
    runner = runner_of(concurrency=1)
    await runner.start()
    outcome = await runner.run(lease("x"), ANYWHERE)
    assert outcome.fault is Fault.INFRASTRUCTURE
    assert "it did not answer in 0.1 s" in outcome.error
    assert ray.actors[0].killed
    ray.script = ray.good
    assert (await runner.run(lease("x"), ANYWHERE)).reward == 1.0
    assert len(ray.living) == 1
    await runner.close()


async def test_an_agent_that_cannot_be_ended_takes_its_actor_along(
    ray: Cluster, lease: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.script = lambda actor, name: "" if name == "start" else None
    monkeypatch.setattr(Cluster, "cancel", lambda self, reference: None)
    runner = runner_of(concurrency=1, timeout=60.0)
    await runner.start()
    task = asyncio.create_task(runner.run(lease("x"), ANYWHERE))
    await asyncio.sleep(0.02)
    task.cancel()
    ray.script = ray.good
    assert (await runner.run(lease("y"), ANYWHERE)).reward == 1.0
    assert ray.actors[0].killed
    assert len(ray.living) == 1
    await runner.close()


async def test_an_answer_that_is_no_outcome_is_the_agents_fault(ray: Cluster, lease: Leases) -> None:
    ray.script = lambda actor, name: "" if name == "start" else b'{"reward": NaN}'
    runner = runner_of()
    await runner.start()
    outcome = await runner.run(lease("x"), ANYWHERE)
    assert (outcome.fault, outcome.reward) == (Fault.AGENT, None)
    await runner.close()


async def test_actors_that_die_in_their_start_are_tried_again_then_given_up(
    ray: Cluster, lease: Leases, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = asyncio.sleep
    monkeypatch.setattr(module.asyncio, "sleep", lambda seconds: real(0))
    runner = runner_of(concurrency=1)
    ray.script = lambda actor, name: ActorLostError("the node is out of memory")
    with pytest.raises(RunnerError, match=r"no agent can be run in the Ray cluster.*the node is out of memory"):
        await runner.start()
    assert len(ray.actors) == module.MAX_FAILED_STARTS
    assert (ray.living, ray.closed) == ([], 1)

    ray.script = lambda actor, name: ActorLostError("busy") if len(ray.actors) < 8 else ray.good(actor, name)
    await runner.start()  # and a closed one may be started again
    ray.script = lambda actor, name: "" if name == "start" else ActorLostError("the node is gone")
    with caplog.at_level(logging.WARNING):
        assert (await runner.run(lease("x"), ANYWHERE)).fault is Fault.INFRASTRUCTURE
    ray.script = lambda actor, name: ActorLostError("no node is left")
    running = [asyncio.create_task(runner.run(lease(i), ANYWHERE)) for i in range(3)]
    ended = await asyncio.gather(*running, return_exceptions=True)
    assert any(isinstance(one, RunnerError) and "no node is left" in str(one) for one in ended)
    assert all(isinstance(one, RunnerError | Outcome) for one in ended)  # nobody waits for ever
    await runner.close()


async def test_room_that_comes_late_is_waited_for_while_others_run(
    ray: Cluster, lease: Leases, caplog: pytest.LogCaptureFixture
) -> None:
    late: list[asyncio.Future[Any]] = []

    def script(actor: Actor, name: str) -> Any:
        return None if name == "start" and actor is not ray.actors[0] else ray.good(actor, name)

    answer = Actor.answer
    ray.script = script
    runner = runner_of(concurrency=2, ray={"start_timeout": 0.05})
    with caplog.at_level(logging.WARNING):
        Actor.answer = lambda self, name: late.append(answer(self, name)) or late[-1]  # type: ignore[assignment,method-assign,func-returns-value]
        try:
            await runner.start()
            await asyncio.sleep(0.12)
        finally:
            Actor.answer = answer  # type: ignore[method-assign]
    assert "Ray has had no room for an actor for 0.05 s" in caplog.text
    assert (await runner.run(lease("x"), ANYWHERE)).reward == 1.0
    (waiting,) = [future for future in late if not future.done()]
    waiting.set_result("")
    await asyncio.sleep(0.05)
    assert len(ray.living) == 2  # the same that were asked for at the start
    await asyncio.gather(*(runner.run(lease(i), ANYWHERE) for i in range(4)))
    assert "run" in ray.actors[1].asked
    await runner.close()


async def test_a_gateway_on_this_machine_is_refused_to_other_machines(ray: Cluster, lease: Leases) -> None:
    ray.many = True
    runner = runner_of()
    await runner.start()
    with pytest.raises(RunnerError, match=r"cannot reach the model at http://127.0.0.1:8000/v1: set gateway.host"):
        await runner.run(lease("x"), LLM("http://127.0.0.1:8000/v1", "key", "policy"))
    assert (await runner.run(lease("x"), ANYWHERE)).reward == 1.0
    await runner.close()


async def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=re.escape(install_command("ray"))):
        await runner_of().start()
    for name in ("kubernetes_asyncio", "kubernetes_asyncio.client"):
        monkeypatch.setitem(sys.modules, name, None)
    config = Config(runner=RunnerConfig(k8s=KubernetesConfig(agent="a:b")))
    with pytest.raises(MissingExtraError, match=re.escape(install_command("k8s"))):
        await plugins().runner("k8s")(agent, config).start()
