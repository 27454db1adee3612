"""An audit finds every single change to what was trained."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.errors import StoreError
from lightning.store.memory import MemoryStore
from lightning.trainer.plan import tasks_of_step, train_rollouts
from lightning.trainer.runs import describe_algorithm
from lightning.trainer.training_data import all_rollouts, load_groups, record_step
from lightning.types import (
    Outcome,
    Rollout,
    Run,
    StepRecord,
    Task,
    Transition,
    VersionRun,
    logprobs,
    token_ids,
)
from lightning_proof.audit import audit

STEPS, TASKS, GROUP = 2, 3, 4
ALGORITHM = LightningRL("grpo", group_size=GROUP)


async def _trained_store() -> MemoryStore:
    """A run of two steps whose rollouts have two calls each, committed as the loop commits them."""
    rng = random.Random(7)
    store = MemoryStore()
    await store.open()
    await store.put_run(Run("run", "run", {"algorithm": describe_algorithm(ALGORITHM), "train_agents": []}))
    tasks = [Task(f"question {number}") for number in range(TASKS)]
    for step in range(1, STEPS + 1):
        await store.create_rollouts(train_rollouts("run", step, tasks_of_step(tasks, step - 1, TASKS, 0), GROUP, 2))
        while leases := await store.lease("run", "worker", limit=8):
            for lease in leases:
                await store.append(_calls(rng, lease.rollout, step))
                await store.complete(lease.rollout.id, lease.attempt, Outcome(reward=float(rng.random())))
        groups = await load_groups(store, await all_rollouts(store, "run", split="train", step=step), ())
        batch = ALGORITHM.batch(groups)
        assert batch.samples
        await store.commit_step(record_step("run", step, groups, batch, checkpoint="", metrics={}, context={}))
    return store


def _calls(rng: random.Random, rollout: Rollout, version: int) -> list[Transition]:
    calls, context = [], [rng.randrange(100) for _ in range(12)]
    for seq in range(2):
        response = [rng.randrange(100) for _ in range(6)]
        calls.append(
            Transition(
                rollout.id,
                rollout.attempt,
                seq,
                f"call-{rollout.id}-{seq}",
                token_ids(context),
                token_ids(response),
                logprobs([-rng.random() for _ in response]),
                versions=(VersionRun(0, version),),
            )
        )
        context = [*context, *response, rng.randrange(100)]
    return calls


class Tampered:
    """A store in which one thing was changed behind everybody's back."""

    def __init__(
        self,
        store: MemoryStore,
        *,
        calls: Callable[[list[Transition]], list[Transition]] = lambda calls: calls,
        rollout: Callable[[Rollout], Rollout] = lambda rollout: rollout,
        record: Callable[[StepRecord], StepRecord] = lambda record: record,
    ) -> None:
        self.store, self.calls, self.rollout, self.record = store, calls, rollout, record

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    async def transitions_of(self, attempts: Sequence[tuple[str, int]]) -> list[list[Transition]]:
        return [self.calls(calls) for calls in await self.store.transitions_of(attempts)]

    async def list_rollouts(self, run: str, **filters: Any) -> Any:
        page = await self.store.list_rollouts(run, **filters)
        return replace(page, items=tuple(self.rollout(rollout) for rollout in page.items))

    async def steps(self, run: str) -> list[StepRecord]:
        return [self.record(record) for record in await self.store.steps(run)]


def _change_call(victim: str, seq: int, change: Callable[[Transition], Transition]) -> dict[str, Any]:
    def apply(calls: list[Transition]) -> list[Transition]:
        return [change(call) if call.rollout == victim and call.seq == seq else call for call in calls]

    return {"calls": apply}


def _one_id(rng: random.Random, victim: str) -> dict[str, Any]:
    prompt = rng.random() < 0.5

    def change(call: Transition) -> Transition:
        changed = list(call.prompt_ids if prompt else call.response_ids)
        place = rng.randrange(len(changed))
        changed[place] = (changed[place] + rng.randrange(1, 100)) % 100
        ids = token_ids(changed)
        return replace(call, prompt_ids=ids) if prompt else replace(call, response_ids=ids)

    return _change_call(victim, rng.randrange(2), change)


def _one_logprob(rng: random.Random, victim: str) -> dict[str, Any]:
    def change(call: Transition) -> Transition:
        changed = list(call.logprobs)
        place = rng.randrange(len(changed))
        changed[place] *= 1 + 1e-6
        return replace(call, logprobs=logprobs(changed))

    return _change_call(victim, rng.randrange(2), change)


def _one_reward(rng: random.Random, victim: str) -> dict[str, Any]:
    nudge = rng.choice([1e-9, -1e-3, 1.0])

    def change(rollout: Rollout) -> Rollout:
        return replace(rollout, reward=(rollout.reward or 0.0) + nudge) if rollout.id == victim else rollout

    return {"rollout": change}


def _one_version(rng: random.Random, victim: str) -> dict[str, Any]:
    runs = rng.choice([(VersionRun(0, 9),), (VersionRun(0, 0), VersionRun(2, 5)), (VersionRun(0, -1),)])
    return _change_call(victim, rng.randrange(2), lambda call: replace(call, versions=runs))


def _the_order(rng: random.Random, victim: str) -> dict[str, Any]:
    if rng.random() < 0.5:

        def swap_calls(calls: list[Transition]) -> list[Transition]:
            if not calls or calls[0].rollout != victim:
                return calls
            return [replace(call, seq=1 - call.seq) for call in reversed(calls)]

        return {"calls": swap_calls}

    def shuffle(record: StepRecord) -> StepRecord:
        order = list(range(len(record.rollouts)))
        first, second = rng.sample(order, 2)
        order[first], order[second] = order[second], order[first]
        return replace(
            record,
            rollouts=tuple(record.rollouts[place] for place in order),
            digests=tuple(record.digests[place] for place in order),
        )

    return {"record": shuffle}


MUTATIONS = {
    "id": _one_id,
    "logprob": _one_logprob,
    "reward": _one_reward,
    "version": _one_version,
    "order": _the_order,
}


async def test_an_untouched_run_is_clean() -> None:
    report = await audit(await _trained_store(), "run")
    assert report.ok, report.findings
    assert report.rederived
    assert (report.steps, report.rollouts) == (STEPS, STEPS * TASKS * GROUP)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MUTATIONS)
async def test_each_of_100_changes_is_found(kind: str) -> None:
    store = await _trained_store()
    trained = [name for record in await store.steps("run") for name, _ in record.rollouts]
    missed = []
    for seed in range(100):
        rng = random.Random(seed)
        tampered = Tampered(store, **MUTATIONS[kind](rng, rng.choice(trained)))
        if (await audit(tampered, "run")).ok:
            missed.append(seed)
    assert missed == []


async def test_without_the_algorithm_recorded_data_is_still_compared() -> None:
    store = await _trained_store()
    run = await store.get_run("run")
    assert run is not None
    described = {**run.config, "algorithm": {"name": "mine", "type": "Mine", "arguments": None}}
    rng = random.Random(0)
    trained = [name for record in await store.steps("run") for name, _ in record.rollouts]

    class WithoutAlgorithm(Tampered):
        async def get_run(self, run_id: str) -> Run | None:
            return Run(run_id, run_id, described)

    clean = await audit(WithoutAlgorithm(store), "run")
    assert clean.ok
    assert not clean.rederived
    assert not (await audit(WithoutAlgorithm(store, **_one_id(rng, trained[0])), "run")).ok


async def test_a_missing_run_is_named() -> None:
    with pytest.raises(StoreError, match="no run 'absent'"):
        await audit(await _trained_store(), "absent")
