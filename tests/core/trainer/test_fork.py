"""A fork with a real engine: what it begins with is bit for bit what the other run had."""

from __future__ import annotations

import asyncio
import gc
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.cli.locate import with_store
from lightning.config import Config, with_settings
from lightning.errors import ConfigError
from lightning.store.places import store_in
from lightning.store.protocol import Store
from lightning.testing import vllm_replies
from lightning.trainer import Trainer, stack
from lightning.trainer.runs import agent_of
from safetensors.torch import load_file

from tests.tiny_families import VOCAB, make_tiny_family

from .test_families import Served, agent


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`train(out, steps, ...)`: a run of a tiny model on a scripted vLLM; returns its folder."""
    monkeypatch.setattr(vllm_replies, "VOCABULARY", VOCAB)
    folder = make_tiny_family(tmp_path / "folder", "llama2")
    monkeypatch.setattr(stack, "make_policy_server", lambda *_, **__: Served(folder))

    def run(out: str, steps: int, **settings: Any) -> Path:
        named = {key: settings.pop(key) for key in ("resume", "from_run") if key in settings}
        algorithm = settings.pop("algorithm", "grpo:group_size=4,correction.kind=none")
        config = with_settings(
            Config(),
            {"runner.concurrency": 4, "engine.lr": 1e-3, "trainer.keep_checkpoints": 9, "trainer.checkpoint_every": 1}
            | {key.replace("__", "."): value for key, value in settings.items()},
        )
        made = Trainer(
            folder,
            algorithm,
            runner="inline",
            config=config,
            steps=steps,
            tasks_per_step=2,
            out=tmp_path / out,
            progress=False,
            **named,
        )
        made.fit(agent, ["one", "two"])
        return tmp_path / out

    return run


def state(folder: Path) -> dict[str, torch.Tensor]:
    """The weights and the optimizer's moments of a checkpoint."""
    return {
        f"{name}/{key}": value
        for name in ("weights", "optimizer")
        for key, value in load_file(folder / f"{name}.safetensors").items()
    }


def model(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a model folder."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def rates(folder: Path) -> list[float]:
    """The learning rates of a run's steps."""

    async def read(store: Store) -> list[float]:
        return [record.metrics["lr"] for record in await store.steps(folder.name)]

    return asyncio.run(with_store(store_in(folder), read))


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


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
    assert "does not fit other settings of critic" in caplog.text
    train("fork", 2, from_run="parent@1", resume=True)
    with pytest.raises(
        ConfigError, match=r"'fork' began with the weights of parent@1, not of other@1: leave --from out"
    ):
        train("fork", 3, from_run="other@1", resume=True)


def test_a_process_that_trains_again_has_let_go_of_the_model(train: Any) -> None:
    """Also where Python does not look for circles by itself: a sweep in one process would hold each of its models."""
    gc.collect()
    gc.disable()
    try:
        before = sum(type(each) is torch.nn.Parameter for each in gc.get_objects())
        train("mine", 1)
        assert sum(type(each) is torch.nn.Parameter for each in gc.get_objects()) == before
    finally:
        gc.enable()


def test_a_run_says_which_agent_it_trained(train: Any) -> None:
    folder = train("mine", 1)

    async def ask(store: Store) -> str:
        run = await store.get_run("mine")
        assert run is not None
        return await agent_of(store, run)

    assert asyncio.run(with_store(store_in(folder), ask)) == f"{agent.__module__}:agent"


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
