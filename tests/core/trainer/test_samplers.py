"""The place of samplers and orders: what a stranger's does in a run, which one a run has, what becomes of one that fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.config import Config, with_settings
from lightning.errors import ConfigError, DataError
from lightning.plugins import Plugins, stages
from lightning.plugins.stages import StageError
from lightning.trainer import samplers
from lightning.trainer.algorithm import AlgorithmSchedule
from lightning.trainer.context import stages_of
from lightning.trainer.samplers import Asked, Sampler, TurnSampler, sampler_of
from lightning.trainer.training_data import all_rollouts

Open = Callable[..., AbstractAsyncContextManager[Any]]
STRANGER = """
import lightning
from lightning.errors import DataError
from lightning.trainer.samplers import TaskOrder, TurnSampler


class Twice(TurnSampler):
    api, carries_out = 1, ("sampling", "order")

    def __init__(self, does):
        self.does = does

    async def step(self, step):
        if self.does == "fails" and step == 2:
            raise KeyError("a bug")
        if self.does == "refuses":
            raise DataError("not with this data")
        return None if self.does == "returns nothing" else await super().step(step)

    def begun(self, group_size):
        return 2 * group_size

    async def start(self):
        if self.does == "cannot start":
            raise OSError("no socket")


class Old(Twice):
    api = 0


class Odd(Twice):
    carries_out = ("sums",)


class Backwards(TaskOrder):
    api = 1

    def __init__(self, tasks, config):
        self.tasks, self.seen = tasks, 0

    async def learn(self, store, step, rollouts):
        self.seen += len(rollouts)

    def ranked(self, place, group_size, *, without=()):
        return list(reversed(self.tasks)) if self.seen < 99 else []


class Empty(Backwards):
    def ranked(self, place, group_size, *, without=()):
        return []


def twice(asked):
    kind, _, does = asked.config.trainer.sampling.partition(": ")
    if kind == "broken":
        raise KeyError("a bug")
    if kind in ("old", "odd"):
        return Old("") if kind == "old" else Odd("")
    return Twice(does) if kind in ("twice", "both") else None


@lightning.hookimpl
def register_samplers(register):
    register("twice", twice)
    register("other", lambda asked: Twice("") if asked.config.trainer.sampling == "both" else None)


@lightning.hookimpl
def register_orders(register):
    register("backwards", Backwards)
    register("empty", Empty)
"""
GROUPS = LightningRL("grpo", group_size=2)


@pytest.fixture(autouse=True)
def stranger(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin with a sampler and an order, found as an installed one is."""
    install("stranger-sampler", {"stranger": "stranger_sampler"}, {"stranger_sampler": STRANGER})
    found = Plugins()
    for module in (samplers, stages):
        monkeypatch.setattr(module, "plugins", lambda: found)


def chosen(recorded: str | None = None, **settings: Any) -> Sampler:
    config = with_settings(Config(), {f"trainer.{name}": value for name, value in settings.items()})
    return sampler_of(Asked(config, AlgorithmSchedule.of(GROUPS), recorded=recorded))


async def test_a_strangers_sampler_and_order_sample_a_run_and_are_in_its_record(bench: Open, tmp_path: Path) -> None:
    settings = {"algorithm": GROUPS, "trainer__sampling": "twice", "trainer__order": "backwards", "trainer__steps": 2}
    async with bench(tmp_path / "run", **settings) as made:
        await made.loop.run({})
        every = await all_rollouts(made.store, "run", split="train")
        records = await made.store.steps("run")
        assert [each.task.id for each in every] == [task.id for task in made.loop.train[:-3:-1] for _ in range(4)] * 2
        assert made.loop.sampler.order.stage.seen == len(every)
    assert [list(stages_of(record.context)["groups"]) for record in records] == [["twice", "order backwards"]] * 2


async def test_the_cores_own_is_in_no_record(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", algorithm=GROUPS, trainer__steps=1) as made:
        await made.loop.run({})
        assert type(made.loop.sampler) is TurnSampler
        assert [stages_of(record.context)["groups"] for record in await made.store.steps("run")] == [{}]


async def test_a_resume_names_the_order_that_is_another(
    bench: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for steps, order in enumerate(("backwards", "shuffled"), 1):
        assert "other stages" not in caplog.text
        async with bench(tmp_path / "run", algorithm=GROUPS, trainer__steps=steps, trainer__order=order) as made:
            await made.loop.run({})
    assert "groups are made with other stages than in step 1: 'order backwards' (1.0) is missing" in caplog.text


@pytest.mark.parametrize(
    ("does", "said", "committed"),
    [
        (
            "fails",
            r"'twice' of the plugin 'stranger' failed \(step 2: KeyError: 'a bug'\).*DISABLE_PLUGINS=stranger",
            1,
        ),
        ("returns nothing", r"'stranger' failed \(step 1: TypeError: it returned None and no Sampled", 0),
        ("cannot start", r"'stranger' failed \(start: OSError: no socket\)", 0),
    ],
)
async def test_a_sampler_that_fails_ends_the_step_with_its_plugins_name(
    bench: Open, tmp_path: Path, does: str, said: str, committed: int
) -> None:
    async with bench(tmp_path / "run", algorithm=GROUPS, trainer__sampling=f"twice: {does}") as made:
        with pytest.raises(StageError, match=said):
            await made.loop.run({})
        assert len(await made.store.steps("run")) == committed


async def test_what_a_sampler_refuses_is_said_as_it_says_it(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", algorithm=GROUPS, trainer__sampling="twice: refuses") as made:
        with pytest.raises(DataError, match=r"^not with this data$"):
            await made.loop.run({})


async def test_an_order_without_tasks_ends_the_step_with_its_plugins_name(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", algorithm=GROUPS, trainer__order="empty") as made:
        with pytest.raises(StageError, match=r"'empty' of the plugin 'stranger' failed \(ranked: ZeroDivisionError"):
            await made.loop.run({})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"sampling": "three times"},
            r"trainer\.sampling is 'three times', and no plugin .* samplers here are .*twice",
        ),
        (
            {"sampling": "twice", "max_staleness": 1},
            r"one sampler, and its settings ask for .* and 'twice' of the plugin",
        ),
        ({"sampling": "both"}, r"'other' of the plugin 'stranger' .* and 'twice' of the plugin 'stranger'"),
        ({"sampling": "old"}, r"'twice' of the plugin 'stranger' was written without saying for which API"),
        (
            {"sampling": "broken"},
            r"the stage 'twice' of the plugin .*stranger.* cannot be made \(KeyError: 'a bug'",
        ),
        (
            {"order": "forwards"},
            r"'forwards' is neither 'shuffled' nor 'given', and there is no order .* Known: .*backwards",
        ),
        ({"sampling": "odd"}, r"`carries_out` of the stage 'twice' .* names settings that there are none of: sums"),
        ({"sampling": "twice", "recorded": "runs/one"}, r"one sampler, and its settings ask for 'recorded'"),
    ],
)
def test_what_no_sampler_carries_out_is_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        chosen(**settings)


def test_a_sampler_that_takes_no_order_says_so() -> None:
    with pytest.raises(ConfigError, match=r"set trainer\.order to 'shuffled' or 'given'"):
        chosen(recorded="runs/one", order="backwards")
