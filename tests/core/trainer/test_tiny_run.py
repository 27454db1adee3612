"""A run of a tiny model with a real engine, on a scripted vLLM."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.cli.output import with_store
from lightning.config import Config, with_settings
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


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


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
