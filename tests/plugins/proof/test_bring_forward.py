"""Steps are taken again as they were taken: by their algorithm, with their loss, on a GPU that is shared; or are refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from lightning import DPO
from lightning.algorithms import Batch, from_batch
from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.protocol import Algorithm
from lightning.batch.trajectory import Group
from lightning.config import Config, load_config
from lightning.errors import AuditError, ConfigError
from lightning.plugins import plugins
from lightning.store.memory import MemoryStore
from lightning.trainer.checkpoints import Checkpoints
from lightning.trainer.context import Epoch
from lightning.trainer.runs import describe_algorithm
from lightning_proof.bring_forward import Rewinder, algorithm_of
from lightning_session.session import Session

from tests.core.trainer.test_held_out import graded, ledger
from tests.core.trainer.test_runs import each_function, edited_source
from tests.core.trainer.test_shared_gpu import CUDA
from tests.core.trainer.test_shared_gpu import recorded as recorded
from tests.plugins.session.test_session import Open
from tests.plugins.session.test_session import take as take


@each_function
def test_an_algorithm_whose_function_was_edited_takes_no_step_again(
    algorithm: Algorithm, path: tuple[str, ...]
) -> None:
    described = describe_algorithm(algorithm)
    gone = Epoch(0, 1, {"algorithm": edited_source(described, *path)})
    with pytest.raises(ConfigError, match="only its own code can make again"):
        algorithm_of(gone, [algorithm])
    assert algorithm_of(Epoch(0, 1, {"algorithm": described}), [LightningRL(), algorithm]) is algorithm


async def test_a_loss_of_the_batch_itself_trains_it_also_when_it_is_replayed(
    bench: Any, answering: Any, tmp_path: Path
) -> None:
    async def agent(task: Any, llm: Any) -> float:
        return float(await answering(task, llm)) + random.Random(llm.api_key).random()

    settings = {"algorithm": DPO(group_size=2), "trainer__steps": 3, "trainer__checkpoint_every": 10}
    async with bench(tmp_path, agent, **settings) as made:
        made.policy.crash_at = 2
        with pytest.raises(made.Crash):
            await made.loop.run({})
        trained = [loss.pairs for loss in made.engine.losses]
    async with bench(tmp_path, agent, **settings) as made:
        await made.loop.run({})
        again = [loss.pairs for loss in made.engine.losses]
    assert all(trained)
    assert len(again) == 3
    assert again[: len(trained)] == trained


@from_batch
def passed_on(groups: Sequence[Group], *, group_size: int = 4) -> Batch:
    """Another algorithm's rows, under a name of its own."""
    return LightningRL("gspo", group_size=group_size, kl_coefficient=0.5).batch(groups)


async def test_rows_that_another_algorithm_made_have_its_loss_also_when_they_are_replayed(
    bench: Any, tmp_path: Path
) -> None:
    settings = {"algorithm": passed_on(), "trainer__steps": 2, "trainer__checkpoint_every": 10}
    asked_for = LightningRL("gspo", kl_coefficient=0.5).loss
    async with bench(tmp_path, **settings) as made:
        made.policy.crash_at = 1
        with pytest.raises(made.Crash):
            await made.loop.run({})
        assert made.engine.losses == [asked_for]
    async with bench(tmp_path, **settings) as made:
        await made.loop.run({})
        assert made.engine.losses == [asked_for] * 2


async def test_a_run_that_gets_no_better_ends_and_ends_again_when_it_is_resumed(
    bench: Any, tmp_path: Path, answering: Any
) -> None:
    settings = {"trainer__steps": 9, "trainer__keep": "best", "trainer__patience": 2, "trainer__checkpoint_every": 50}
    async with bench(tmp_path / "r", graded([0.2, 0.5, 0.5, 0.3, 1.0], answering), **settings) as made:
        made.engine.export = ledger(made.engine)
        kept = await made.loop.run({})
        assert (kept.step, made.loop.done) == (1, 3)
        assert made.engine.did[-1] == "save:step-00000003", "it can be resumed without taking steps again"
    async with bench(tmp_path / "r", graded([], answering), **settings) as again:
        kept = await again.loop.run({})
        assert (kept.step, again.loop.done) == (1, 3)
    settings |= {"trainer__patience": 3}
    async with bench(tmp_path / "r", graded([0.9, 0.1, 0.1, 0.1], answering), **settings) as more:
        more.engine.export = ledger(more.engine)
        kept = await more.loop.run({})
        assert (kept.step, more.loop.done) == (4, 7), "with more patience it goes on"


async def test_it_sleeps_while_steps_are_taken_again(
    bench: Any, tmp_path: Path, recorded: Callable[[Any], list[str]]
) -> None:
    settings = {**CUDA, "trainer__checkpoint_every": 100}
    async with bench(tmp_path, **settings) as made:
        recorded(made)
        made.engine.crash_at = "step:2"
        with pytest.raises(made.Crash):
            await made.loop.run({})
    async with bench(tmp_path, **settings) as made:
        told = recorded(made)
        await made.loop.restore()
    assert told == ["sleep", "step", "step", "wake", "weights"]


async def test_its_steps_are_not_taken_again_by_the_loop(bench: Open, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    async with bench(folder, own_loop=True) as made, Session(made.loop) as session:
        await take(session)
    for file in (folder / "checkpoints").rglob("*"):
        if file.is_file():
            file.unlink()
    for place in sorted((folder / "checkpoints").glob("*")):
        place.rmdir()
    async with bench(folder) as made:
        with pytest.raises(AuditError, match="was taken by a loop of its own"):
            await made.loop.restore()


@pytest.mark.parametrize(("then", "reopened"), [("0.5", False), ("0.25", True)])
def test_a_policy_of_another_rate_is_opened_anew_for_its_steps(tmp_path: Path, then: str, reopened: bool) -> None:
    def settings(rate: str) -> Config:
        named = ('policies.writer.agents=["writer"]', f"policies.writer.lr={rate}", "engine.lora.rank=2")
        return load_config(overrides=(*named, "engine.dtype=float32", "engine.lr=1"), env={})

    epoch = Epoch(0, 1, {"config": settings(then).model_dump(mode="json")})
    places = Checkpoints(tmp_path / "checkpoints", keep=1)
    again = Rewinder(MemoryStore(), [], [epoch], places, plugins().engine("torch"), tmp_path, settings("0.5"))
    assert again.needed(1) is reopened
