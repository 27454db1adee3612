"""The same script again: it goes on with an unfinished run, or begins beside, and says which; nothing is written over."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.batch.sample import Sample
from lightning.cli.output import with_store
from lightning.engines.torch.engine import TorchEngine
from lightning.errors import ConfigError, EngineError
from lightning.losses.correction import Correction
from lightning.losses.protocol import Loss
from lightning.runner.protocol import Agent
from lightning.store.places import store_in
from lightning.store.protocol import Store
from lightning.store.url import sqlite_url
from lightning.trainer import Summary, Trainer, stack, trainer
from lightning.trainer.run_stages import FORKED, began_with
from lightning.trainer.runs import claim_folder, folders_beside
from lightning.types import LLM, Run, Task

from tests.tiny_families import VOCAB, make_tiny_family

from .test_families import Served, agent

Fit = Callable[..., Summary]


@pytest.fixture
def said() -> list[str]:
    """What runs say of where they go."""
    return []


@pytest.fixture
def fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> Fit:
    """`fit(steps, ...)`: what a script does, each time with the same `out`."""
    monkeypatch.setattr("lightning.testing.vllm_replies.VOCABULARY", VOCAB)
    monkeypatch.setattr(trainer.Reporter, "say", lambda self, text: "resume=" in text and said.append(text))
    folder = make_tiny_family(tmp_path / "folder", "llama2")
    monkeypatch.setattr(stack, "make_policy_server", lambda *_, **__: Served(folder))

    def run(steps: int, asked_of: Agent = agent, **asked: Any) -> Summary:
        algorithm = LightningRL("grpo", group_size=2, correction=Correction("none"))
        made = Trainer(
            folder,
            algorithm,
            runner="inline",
            steps=steps,
            tasks_per_step=1,
            **dict[str, Any](lr=1e-3, out=tmp_path / "pens") | asked,
        )
        return made.fit(asked_of, ["one", "two"])

    return run


@contextmanager
def failing_after(steps: int) -> Iterator[None]:
    """Let a run fail after some steps."""
    take, left = TorchEngine.step, [steps]

    def step(self: TorchEngine, samples: list[Sample], loss: Loss, lr: float | None = None) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise EngineError("out of memory")
        return take(self, samples, loss, lr)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchEngine, "step", step)
        with pytest.raises(EngineError):
            yield


def another_agent(task: Task, llm: LLM) -> float:
    return agent(task, llm)


def last_step(folder: Path) -> int:
    async def ask(store: Store) -> int:
        record = await store.last_step(folder.name)
        return record.step if record else 0

    return asyncio.run(with_store(store_in(folder), ask))


def test_a_script_that_is_run_again_goes_on_or_begins_beside(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    take, fails = TorchEngine.step, [2]

    def step(self: TorchEngine, samples: list[Sample], loss: Loss, lr: float | None = None) -> Any:
        fails[0] -= 1
        if not fails[0]:
            raise EngineError("out of memory")
        return take(self, samples, loss, lr)

    monkeypatch.setattr(TorchEngine, "step", step)
    with pytest.raises(EngineError):
        fit(2)
    assert (last_step(tmp_path / "pens"), said) == (1, [])
    assert fit(2).run == "pens"
    assert said[0].startswith(
        f"{tmp_path / 'pens'} holds an unfinished run with these settings: going on with it after step 1"
    )
    assert "resume=False (--no-resume)" in said[0]

    said.clear()
    assert fit(2).run == "pens-2"
    assert said[0].startswith(
        f"{tmp_path / 'pens'} holds a finished run (2 steps): this is a new run, in "
        f"{tmp_path / 'pens-2'}. resume=True (--resume)"
    )
    assert (last_step(tmp_path / "pens"), last_step(tmp_path / "pens-2")) == (2, 2)

    fails[0] = 1
    with pytest.raises(EngineError):
        fit(1, lr=2e-3)
    said.clear()
    assert fit(1, lr=2e-3).run == "pens-3", "whichever is unfinished and has these settings"
    assert "pens-3 holds an unfinished run with these settings: going on with it after step 0" in said[0]
    assert fit(2, resume=True, lr=3e-3).run == "pens", "also a finished one, under other settings"


def test_other_settings_and_another_process_begin_beside(fit: Fit, tmp_path: Path, said: list[str]) -> None:
    with failing_after(0):
        fit(1)
    with claim_folder(tmp_path / "pens"):
        with pytest.raises(ConfigError, match="another process is training in"):
            fit(1, resume=True)
        assert fit(1).run == "pens-2"
    said.clear()
    assert fit(1, lr=2e-3).run == "pens-3"
    assert re.search(r"pens holds a run with other settings \(engine\.lr 0\.001 → 0\.002\): this is a new run", said[0])
    said.clear()
    assert fit(1, resume=False).run == "pens-4"
    assert "pens holds a run (0 steps), and resume is False" in said[0]


def test_another_agent_begins_beside(fit: Fit, said: list[str]) -> None:
    with failing_after(0):
        fit(1)
    assert fit(1, another_agent).run == "pens-2"
    assert f"pens holds a run of another agent ({agent.__module__}:agent): this is a new run" in said[0]
    assert fit(1, lambda task, llm: agent(task, llm)).run == "pens", "an agent without a name may be the same one"


def test_a_folder_whose_run_another_store_keeps_is_left_as_it_is(fit: Fit, tmp_path: Path, said: list[str]) -> None:
    with failing_after(1):
        fit(2, store=sqlite_url(tmp_path / "central.db"))
    pens = tmp_path / "pens"
    files = sorted(pens.rglob("*"))
    for store in (None, sqlite_url(tmp_path / "other.db")):
        with pytest.raises(
            ConfigError, match=r"pens holds a run that another store keeps, .*central\.db: give this store"
        ):
            fit(2, store=store, resume=True)
    assert fit(1).run == "pens-2"
    assert "pens holds a run that another store keeps, " in said[0]
    assert sorted(pens.rglob("*")) == files
    assert fit(2, store=sqlite_url(tmp_path / "central.db")).run == "pens"
    with pytest.raises(ConfigError, match=r"pens-2 holds a run that another store keeps, .*pens-2/lightning\.db"):
        fit(1, out=pens.with_name("pens-2"), store=sqlite_url(tmp_path / "other.db"), resume=True)


def test_a_run_began_with_the_weights_that_the_same_words_name(tmp_path: Path) -> None:
    own, forked = Run("b", "b"), Run("b", "b", {FORKED: "a@3"})
    assert began_with(own, "", tmp_path / "b")
    assert not began_with(own, "a@3", tmp_path / "b")
    assert not began_with(forked, "", tmp_path / "b")
    assert [began_with(forked, named, tmp_path / "b") for named in ("a@3", "a", "a@4", "c")] == [
        True,
        True,
        False,
        False,
    ]


def test_folders_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [str(folder) for folder, _ in zip(folders_beside(Path("runs/a")), range(3), strict=False)] == [
        "runs/a",
        "runs/a-2",
        "runs/a-3",
    ]
    here = folders_beside(Path())
    assert [next(here), next(here)] == [Path(), tmp_path.with_name(f"{tmp_path.name}-2")]
