"""Sick runs are named by their first alarm, healthy ones raise none; a grader that rewards length is found out twice."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from lightning.cli.locate import load_agent
from lightning.plugins import plugins
from lightning.store.protocol import Store
from lightning.store.url import sqlite_url
from lightning_debug.advise import Advice, advise
from lightning_debug.regrade import Grader, try_grader

from tests.plugins.debug.sick_runs import HEALTHY, LENGTH_GRADER, SICK, SickRun, Write

T = TypeVar("T")
RUNS = SICK | {"length grader": LENGTH_GRADER.trained}


async def asked(folder: Path, write: Write, ask: Callable[[Store, str], Awaitable[T]]) -> T:
    store = plugins().store(sqlite_url(folder / "lightning.db"))
    await store.open()
    try:
        return await ask(store, await write(store))
    finally:
        await store.close()


async def advised(folder: Path, write: Write) -> Advice:
    return await asked(folder, write, advise)


@pytest.mark.parametrize("name", RUNS)
async def test_the_first_alarm_names_the_sickness_with_its_evidence(name: str, tmp_path: Path) -> None:
    run: SickRun = RUNS[name]
    first, *_ = (await advised(tmp_path, run.write)).alarms
    assert re.search(run.expects, first.found.text, re.IGNORECASE), first.found.text
    assert first.still
    assert first.found.steps
    assert first.found.rollouts or first.found.cause == "held-out falls"


@pytest.mark.parametrize("name", HEALTHY)
async def test_a_healthy_run_raises_no_alarm(name: str, tmp_path: Path) -> None:
    assert (await advised(tmp_path, HEALTHY[name])).alarms == ()


async def test_a_grader_that_rewards_length_is_found_before_anything_is_trained_by_it(tmp_path: Path) -> None:
    grader: Grader = load_agent(LENGTH_GRADER.grader)  # type: ignore[assignment]
    trial = await asked(tmp_path, LENGTH_GRADER.honest, lambda store, run: try_grader(store, run, grader))
    assert any(re.search(LENGTH_GRADER.expects, warning) for warning in trial.warnings)
