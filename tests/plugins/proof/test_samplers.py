"""An audit of a run whose groups a stranger's sampler and order made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.plugins import Plugins, stages
from lightning.trainer import samplers
from lightning_proof.audit import audit

Open = Callable[..., AbstractAsyncContextManager[Any]]
STRANGER = """
import lightning
from lightning.trainer.samplers import TaskOrder, TurnSampler


class Twice(TurnSampler):
    api, carries_out = 1, ("sampling", "order")

    def begun(self, group_size):
        return 2 * group_size


class Backwards(TaskOrder):
    api = 1

    def __init__(self, tasks, config):
        self.tasks = tasks

    async def learn(self, store, step, rollouts):
        pass

    def ranked(self, place, group_size, *, without=()):
        return list(reversed(self.tasks))


@lightning.hookimpl
def register_samplers(register):
    register("twice", lambda asked: Twice() if asked.config.trainer.sampling == "twice" else None)


@lightning.hookimpl
def register_orders(register):
    register("backwards", Backwards)
"""
GROUPS = LightningRL("grpo", group_size=2)


@pytest.fixture(autouse=True)
def stranger(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin with a sampler and an order, found as an installed one is."""
    install("stranger-sampler", {"stranger": "stranger_sampler"}, {"stranger_sampler": STRANGER})
    found = Plugins()
    for module in (samplers, stages):
        monkeypatch.setattr(module, "plugins", lambda: found)


async def test_a_run_that_a_strangers_sampler_and_order_sampled_is_proved(bench: Open, tmp_path: Path) -> None:
    settings = {"algorithm": GROUPS, "trainer__sampling": "twice", "trainer__order": "backwards", "trainer__steps": 2}
    async with bench(tmp_path / "run", **settings) as made:
        await made.loop.run({})
        report = await audit(made.store, "run")
        assert report.ok, report.findings


async def test_an_audit_names_the_order_that_is_another(bench: Open, tmp_path: Path) -> None:
    for steps, order in enumerate(("backwards", "shuffled"), 1):
        async with bench(tmp_path / "run", algorithm=GROUPS, trainer__steps=steps, trainer__order=order) as made:
            await made.loop.run({})
    async with bench(tmp_path / "run", algorithm=GROUPS) as made:
        (warning,) = (await audit(made.store, "run")).warnings
    assert warning.startswith("from step 2 on groups were made with other stages than before: 'order backwards' (")
