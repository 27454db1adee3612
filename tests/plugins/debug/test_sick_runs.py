"""Sick runs are named by their first alarm, healthy ones raise none; a grader that rewards length is found out twice."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from lightning.cli.output import load_agent
from lightning.plugins import plugins
from lightning.store.protocol import Store
from lightning_debug.advise import Advice, advise
from lightning_debug.regrade import Grader, try_grader

from tests.plugins.debug.sick_runs import HEALTHY, LENGTH_GRADER, SICK, SickRun, Write

T = TypeVar("T")
RUNS = SICK | {"length grader": LENGTH_GRADER.trained}


pytestmark = pytest.mark.slow  # a run of 26 steps is written as the trainer writes it


async def asked(write: Write, ask: Callable[[Store, str], Awaitable[T]]) -> T:
    store = plugins().store("memory://")
    await store.open()
    try:
        return await ask(store, await write(store))
    finally:
        await store.close()


async def advised(write: Write) -> Advice:
    return await asked(write, advise)


@pytest.mark.parametrize("name", RUNS)
async def test_the_first_alarm_names_the_sickness_with_its_evidence(name: str) -> None:
    run: SickRun = RUNS[name]
    first, *_ = (await advised(run.write)).alarms
    assert re.search(run.expects, first.found.text, re.IGNORECASE), first.found.text
    assert first.still
    assert first.found.steps
    assert first.found.rollouts
    assert first.found.cause != "held-out falls" or all("/val/" in rollout for rollout in first.found.rollouts)


@pytest.mark.parametrize("name", HEALTHY)
async def test_a_healthy_run_raises_no_alarm(name: str) -> None:
    assert (await advised(HEALTHY[name])).alarms == ()


async def test_a_grader_that_rewards_length_is_found_before_anything_is_trained_by_it() -> None:
    grader: Grader = load_agent(LENGTH_GRADER.grader)  # type: ignore[assignment]
    trial = await asked(LENGTH_GRADER.honest, lambda store, run: try_grader(store, run, grader))
    assert any(re.search(LENGTH_GRADER.expects, warning) for warning in trial.warnings)
