"""What is random in an agent's process: siblings draw other numbers, a repetition the same."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from lightning.config import RunnerConfig
from lightning.runner.process import ProcessRunner
from lightning.runner.protocol import Agent
from lightning.trainer.agents import HowToCall
from lightning.trainer.plan import train_rollouts, val_rollouts
from lightning.types import LLM, Lease, Rollout, Task

NOWHERE = LLM("http://127.0.0.1:1/v1", "key", "policy")


@asynccontextmanager
async def runner_of(agent: Agent, **settings: object) -> AsyncIterator[ProcessRunner]:
    runner = ProcessRunner(agent, RunnerConfig(concurrency=1, **settings))  # type: ignore[arg-type]
    await runner.start()
    yield runner
    await runner.close()


def make_drawing() -> Agent:
    from uuid import uuid4 as imported_before

    def draw(task: Task, llm: LLM) -> dict[str, float]:
        import os
        import random
        import secrets
        import uuid

        import numpy as np  # the first rollout's process has it not yet, those of later ones begin with it

        ids = [uuid.uuid4(), imported_before()]
        assert all(made.version == 4 for made in ids)
        assert ids[0] != ids[1]
        return {
            "random": random.random(),
            "numpy": float(np.random.random()),
            "uuid": ids[0].int % 2**39,
            "imported": ids[1].int % 2**39,
            "urandom": int.from_bytes(os.urandom(4)),
            "secret": secrets.randbelow(2**39),
            "reward": 1.0,
        }

    return draw


SEEDED = ("random", "numpy", "uuid", "imported")


async def test_siblings_draw_other_numbers_and_repetitions_the_same(lease: Callable[..., Lease]) -> None:
    async with runner_of(make_drawing()) as runner:
        drawn = []
        for seed in (1, 2, 1, None, None):
            outcome = await runner.run(lease("x"), replace(NOWHERE, seed=seed))
            assert outcome.error == ""
            drawn.append(outcome.rewards)
    first, sibling, repeated, unseeded, other = drawn
    assert [repeated[name] for name in SEEDED] == [first[name] for name in SEEDED]
    for name in SEEDED:
        assert len({found[name] for found in (first, sibling, unseeded, other)}) == 4, name
    for name in ("urandom", "secret"):  # what keeps secrets follows from no seed
        assert len({found[name] for found in drawn}) == 5, name


async def test_a_process_for_several_rollouts_is_seeded_for_each(lease: Callable[..., Lease]) -> None:
    async with runner_of(make_drawing(), rollouts_per_process=9) as runner:
        drawn = [(await runner.run(lease("x"), replace(NOWHERE, seed=seed))).rewards for seed in (7, 8, 7)]
    assert [drawn[0][name] for name in SEEDED] == [drawn[2][name] for name in SEEDED]
    assert all(drawn[0][name] != drawn[1][name] for name in SEEDED)


async def test_the_runners_own_process_keeps_its_ids() -> None:
    assert uuid.os.__name__ == "os"  # type: ignore[attr-defined]
    assert secrets.token_hex() != secrets.token_hex()


PLACES = st.tuples(st.integers(0, 3), st.sampled_from(["a", "b", "1"]), st.integers(0, 3), st.integers(1, 3))


@given(st.lists(PLACES, min_size=2, max_size=8))
def test_a_seed_follows_from_the_runs_the_place_in_it_the_task_and_the_attempt(
    places: list[tuple[int, str, int, int]],
) -> None:
    def seed(place: tuple[int, str, int, int], run: str) -> int | None:
        number, task, index, attempt = place
        made = Rollout(f"{run}/{index}", run, Task(1, id=task), "g", index=index, attempt=attempt)
        return HowToCall(seed=number).agent_seed(made)

    seeds = {place: seed(place, "one") for place in places}
    assert len(set(seeds.values())) == len(seeds)
    assert all(seed(place, "another") == found for place, found in seeds.items())
    assert all(found is not None and 0 <= found < 2**63 for found in seeds.values())
    assert HowToCall().agent_seed(Rollout("r", "run", Task(1), "g")) is None


def test_no_two_rollouts_of_a_run_have_one_seed() -> None:
    """Also where a task comes twice in a step, and again in later steps and evaluations: ids made of it would be the same."""
    task = Task(1, id="t")
    planned = [
        *(made for step in range(2) for made in train_rollouts("run", step, [task, task], 2, 1)),
        *(made for step in range(2) for made in val_rollouts("run", step, [task], 1)),
        *train_rollouts("run", 0, [task], 2, 1, generation=1),
    ]
    assert len({HowToCall(seed=0).agent_seed(replace(made, attempt=1)) for made in planned}) == len(planned)
