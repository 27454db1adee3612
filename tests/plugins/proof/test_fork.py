"""A fork with a real engine: what it begins with is bit for bit what the other run had."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.cli.output import with_store
from lightning.engines.torch.engine import TorchEngine
from lightning.errors import ConfigError
from lightning.plugins import plugins
from lightning.store.places import store_in
from lightning.store.protocol import Store
from lightning.trainer import trainer as opening
from lightning_proof.audit import audit

from tests.core.trainer.conftest import LedgerEngine
from tests.core.trainer.test_epochs import Bench, trained
from tests.core.trainer.test_tiny_run import equal, model, state
from tests.core.trainer.test_tiny_run import train as train


def rates(folder: Path) -> list[float]:
    """The learning rates of a run's steps."""

    async def read(store: Store) -> list[float]:
        return [record.metrics["lr"] for record in await store.steps(folder.name)]

    return asyncio.run(with_store(store_in(folder), read))


def test_a_fork_begins_with_the_weights_and_the_optimizer_bit_for_bit(train: Any) -> None:
    parent = train("parent", 2)
    train("parent", 4, resume=True, engine__lr=3e-3)
    checkpoints = parent / "checkpoints"
    second, third = (state(checkpoints / f"step-0000000{step}") for step in (2, 3))
    assert not equal(second, third)
    for step in (1, 2, 3):  # now it has to take two steps of one epoch and one of the next again
        shutil.rmtree(checkpoints / f"step-0000000{step}")
    copied = train("copied", 1, from_run="parent@4", engine__lr_schedule="linear")
    falling = {"engine__lr_schedule": "linear", "engine__warmup_steps": 6}
    again = train("again", 2, from_run="copied@1", **falling)
    assert rates(copied) == [1e-3], "a rate falls over the fork's own steps"
    assert rates(again) == [1e-3, 1e-3], "five steps of its ancestors, its first: the warm-up is over"
    assert equal(state(copied / "checkpoints" / "step-00000000"), state(checkpoints / "step-00000004"))
    replayed = train("replayed", 1, from_run="parent@3", engine__lr=5e-3)
    assert equal(state(replayed / "checkpoints" / "step-00000000"), third)
    assert [left.name for left in checkpoints.iterdir()] == ["step-00000004"], "nothing is written to the other run"
    assert not (replayed / "between").exists()
    after = state(replayed / "checkpoints" / "step-00000001")
    assert not equal(after, third)
    counts = {int(value) for name, value in after.items() if name.endswith("|step")}
    assert counts == {4}, "Adam counts on"
    resumed = train("replayed", 2, resume=True, engine__lr=5e-3)
    assert {int(v) for n, v in state(resumed / "checkpoints" / "step-00000002").items() if n.endswith("|step")} == {5}


def test_a_fork_without_a_critic_begins_with_the_weights(train: Any, caplog: pytest.LogCaptureFixture) -> None:
    parent = train("parent", 1, algorithm="ppo:group_size=2,correction.kind=none")
    fork = train("fork", 1, from_run="parent@1")
    assert equal(model(fork / "forked"), model(parent / "model"))
    assert "does not fit other settings of head" in caplog.text
    train("fork", 2, from_run="parent@1", resume=True)
    with pytest.raises(
        ConfigError, match=r"'fork' began with the weights of parent@1, not of other@1: leave --from out"
    ):
        train("fork", 3, from_run="other@1", resume=True)


def test_a_fork_with_adapters_trains_them_on_the_other_runs_weights(
    train: Any, caplog: pytest.LogCaptureFixture
) -> None:
    parent = train("parent", 1)
    forked = train("adapters", 1, from_run=str(parent), engine__lora={"rank": 2})
    assert "begins with its weights, and with a fresh optimizer" in caplog.text
    theirs, ours = model(parent / "model"), model(forked / "forked")
    assert theirs
    assert equal(theirs, ours)
    assert model(forked / "model").keys() == theirs.keys()
    assert any(name.endswith("lora_A.default.weight") for name in state(forked / "checkpoints" / "step-00000001"))


def test_engine_and_policy_server_of_a_fork_open_its_model(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its start and when it goes on: its checkpoints hold adapters alone."""
    opened: list[tuple[str, Path]] = []
    engine, stack = TorchEngine.open, opening.open_stack

    def open_engine(self: TorchEngine, model: Path, *given: Any, **more: Any) -> None:
        opened.append(("engine", model))
        engine(self, model, *given, **more)

    def open_server(*given: Any, **more: Any) -> Any:
        opened.append(("server", more["model"]))
        return stack(*given, **more)

    parent = train("parent", 1)
    monkeypatch.setattr(TorchEngine, "open", open_engine)
    monkeypatch.setattr(opening, "open_stack", open_server)
    for steps, resume in ((1, False), (2, True)):
        fork = train("fork", steps, from_run=str(parent), resume=resume, engine__lora={"rank": 2})
        assert {*opened[-2:]} == {("engine", fork / "forked"), ("server", fork / "forked")}


async def test_a_forks_first_rollouts_see_its_parents_weights(bench: Bench, tmp_path: Path) -> None:
    learned, _ = await trained(bench, tmp_path / "parent", trainer__steps=2)
    async with bench(tmp_path / "fork", parent=str(tmp_path / "parent"), trainer__steps=1) as run:
        await run.loop.restore()
        assert (run.policy.version, run.policy.ledger) == (0, learned)


@pytest.mark.parametrize(
    ("parent", "said"),
    [
        ("nobody@1", "no run 'nobody': neither nobody nor .*nobody is a run's folder; .* has parent"),
        ("parent@9", "run run has 1 committed steps: there is no run@9"),
        ("parent@last", "names no step of a run: write RUN@STEP"),
    ],
)
async def test_a_fork_of_what_there_is_not_names_what_there_is(
    bench: Bench, tmp_path: Path, parent: str, said: str
) -> None:
    await trained(bench, tmp_path / "parent", trainer__steps=1)
    with pytest.raises(ConfigError, match=said):
        async with bench(tmp_path / "fork", parent=parent):
            pass


async def test_a_fork_with_another_lora_begins_with_the_weights_alone(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await trained(bench, tmp_path / "parent", trainer__steps=1)
    monkeypatch.setattr("lightning_proof.fork.plugins", lambda: _Plugins(lambda config: LedgerEngine()))
    async with bench(tmp_path / "fork", parent="parent@1", engine__lora={"rank": 4}, trainer__steps=1) as run:
        assert (tmp_path / "fork" / "forked").is_dir(), "the model that the parent's engine wrote"
        assert run.loop.checkpoints.steps() == []
    assert "begins with its weights, and with a fresh optimizer" in caplog.text


@pytest.mark.parametrize("checkpoint_every", [1, 5])
async def test_a_fork_begins_with_the_state_of_a_step_and_goes_on(
    bench: Bench, tmp_path: Path, checkpoint_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a checkpoint at that step, and, where there is none, from the steps that lead there."""
    parent, fork = tmp_path / "parent", tmp_path / "fork"
    monkeypatch.setattr("lightning_proof.fork.plugins", lambda: _Plugins(lambda config: LedgerEngine()))
    settings = {"trainer__keep_checkpoints": 5, "trainer__checkpoint_every": checkpoint_every}
    learned, _ = await trained(bench, parent, trainer__steps=3, **settings)
    async with bench(fork, parent="parent@2", trainer__eval_every=0, trainer__steps=2, engine__lr=0.5) as run:
        assert run.loop.stack.run.config["forked_from"] == "run@2"
        await run.loop.run({})
        assert run.engine.ledger[:2] == learned[:2]
        assert len(run.engine.ledger) == 4
        records = await run.store.steps("fork")
        assert [(record.step, record.policy_version) for record in records] == [(1, 1), (2, 2)]
        assert (await audit(run.store, "fork")).ok
        ledger = run.engine.ledger
    async with bench(fork, parent="parent@2", trainer__eval_every=0, trainer__steps=3, engine__lr=0.5) as run:
        await run.loop.run({})
        assert run.engine.ledger[:4] == ledger


class _Plugins:
    """The stores there are, and an engine of the test's own."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.opened_store = plugins().opened_store
        self.engine = lambda name: make


def test_policies_begin_with_the_weights_of_one_model_and_not_of_several(train: Any, tmp_path: Path) -> None:
    lora = {"engine__lora": {"rank": 2}}
    begin, first = (Path("checkpoints") / f"step-0000000{step}" for step in (0, 1))
    writer = {"policies__writer__agents": ["*"], **lora}
    parent = train("parent", 1, **lora)
    began = train("began", 1, from_run="parent@1", **writer)
    assert equal(model(parent / "model"), model(began / "forked"))
    several = train("several", 1, **writer)
    again = train("again", 1, from_run="several@1", **writer)
    assert equal(*(state(path / "writer") for path in (again / begin, several / first))), "the same policies go on"
    with pytest.raises(
        ConfigError, match="several trains the policies writer, each with a model of its own"
    ) as refused:
        train("one", 1, from_run="several@1", **lora)
    assert f"as {tmp_path / 'several' / 'model' / 'writer'}@1" in str(refused.value)
    assert not (tmp_path / "one" / "forked").exists()
