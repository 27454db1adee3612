"""One trainer to a folder, and a resume must be the same run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.algorithms import Batch, Intake, from_batch, from_loss
from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.protocol import Algorithm
from lightning.batch.trajectory import Group
from lightning.config import Config, with_settings
from lightning.credit.protocol import GroupAdvantage
from lightning.errors import ConfigError
from lightning.losses.protocol import TokenBatch
from lightning.plugins import plugins
from lightning.store.memory import MemoryStore
from lightning.store.places import existing_store, run_id_of, store_in
from lightning.store.protocol import Store
from lightning.store.url import sqlite_url
from lightning.trainer import Trainer
from lightning.trainer.context import base_digest, epoch_at, keep_epochs, read_epochs
from lightning.trainer.runs import (
    changes_of,
    check_run,
    claim_folder,
    describe_algorithm,
    is_claimed,
    name_folder,
    plan_epochs,
    rebuild_algorithm,
)
from lightning.types import Json, StepRecord


@pytest.mark.slow
def test_a_second_trainer_on_a_folder_is_refused(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\nfrom lightning.trainer.runs import claim_folder\n"
        f"with claim_folder(Path({str(tmp_path)!r})): pass"
    )
    with claim_folder(tmp_path):
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "another process is training in" in other.stderr
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_who_asks_whether_a_folder_is_claimed_leaves_it_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert not is_claimed(folder)
    assert not folder.exists()
    with claim_folder(folder):
        assert is_claimed(folder)
    assert not is_claimed(folder)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="cannot write to the run's folder"), claim_folder(file / "run"):
        pass


def _described(**settings: Any) -> dict[str, Any]:
    config = with_settings(Config(), {key.replace("__", "."): value for key, value in settings.items()})
    return {"model": "m", "config": config.model_dump(mode="json"), "tasks": {"train": ["a"], "val": []}}


async def test_a_run_is_not_continued_by_accident() -> None:
    store = MemoryStore()
    await store.open()
    await store.put_run(await check_run(store, "run", _described(), resume=False))
    with pytest.raises(ConfigError, match=r"exists already.*--resume"):
        await check_run(store, "run", _described(), resume=False)


async def _changed(store: Store, described: dict[str, Any]) -> list[str]:
    """The settings that a resume with these changes: what begins the epoch that it begins, if it does."""
    run = await check_run(store, "run", described, resume=True)
    epochs = await plan_epochs(store, run, described)
    assert len(epochs) <= 2
    return [line.split()[0] for line in changes_of(epochs, 1)] if len(epochs) > 1 else []


async def _started(described: dict[str, Any], *, steps: int = 0) -> Store:
    """A store with a run that has committed so many steps."""
    store = MemoryStore()
    await store.open()
    await store.put_run(await check_run(store, "run", described, resume=False))
    for step in range(1, steps + 1):
        context: dict[str, Json] = {"epoch": 0, "base": "the digest"}
        await store.commit_step(StepRecord("run", step, step, (), (), f"{step}", context=context))
    return store


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("engine.lr", 1.0),
        ("engine.dtype", "bfloat16"),
        ("engine.max_grad_norm", 2.0),
        ("engine.verl.world_size", 8),
        ("trainer.steps", 99),
        ("trainer.seed", 5),
        ("trainer.max_staleness", 2),
        ("runner.timeout", 9.0),
        ("policy_server.max_model_len", 64),
        ("policy_server.tool_call_parser", "pythonic"),
        ("gateway.override_sampling", {"temperature": 0.1}),
    ],
)
async def test_a_resume_may_change_any_setting_and_the_change_is_an_epoch(key: str, value: object) -> None:
    store = await _started(_described(), steps=3)
    assert await _changed(store, _described()) == []
    described = _described(**{key.replace(".", "__"): value})
    (name,) = await _changed(store, described)
    assert name.startswith(key)
    run = await check_run(store, "run", described, resume=True)
    epochs = await plan_epochs(store, run, described)
    assert [epoch.first for epoch in epochs] == [1, 4], "it begins behind the last committed step"
    await keep_epochs(store, run, epochs)
    assert await read_epochs(store, run) == epochs
    await store.commit_step(StepRecord("run", 4, 4, (), (), "3"))
    assert await plan_epochs(store, run, described) == epochs, "the same settings go on with the epoch"
    again = await plan_epochs(store, run, _described())
    assert [epoch.first for epoch in again] == [1, 4, 5], "a change back is a change"


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"engine": "verl"}, "engine"),
        ({"config": {"engine.lora": {"rank": 4}}}, r"engine\.lora.*"),
        ({"model": "another"}, "model"),
        ({"head": "critic on a frozen trunk"}, "head"),
    ],
)
async def test_what_a_training_state_cannot_be_loaded_into_is_refused_with_its_cure(
    changes: dict[str, Any], lost: str, tmp_path: Path
) -> None:
    began = {**_described(), "engine": "torch", "head": ""}
    now = {**began, **changes}
    if "config" in changes:
        now["config"] = with_settings(Config(), changes["config"]).model_dump(mode="json")
    if "model" in changes:
        (tmp_path / "model.safetensors").write_text("others")
        now["model"] = str(tmp_path)
    store = await _started(began, steps=2)
    with pytest.raises(ConfigError, match=rf"does not fit other settings of {lost}: .*--from run@2"):
        await check_run(store, "run", now, resume=True)
    await check_run(await _started(began), "run", now, resume=True)  # nothing was trained that could be lost


async def test_a_model_that_was_moved_is_known_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("weights")
    store = await _started(_described())
    context: dict[str, Json] = {"epoch": 0, "base": base_digest(tmp_path, tmp_path / "base.json")}
    await store.commit_step(StepRecord("run", 1, 1, (), (), "0", context=context))
    moved = {**_described(), "model": str(tmp_path)}
    assert await _changed(store, moved) == ["model"]
    assert base_digest(tmp_path, tmp_path / "base.json") == context["base"]
    (tmp_path / "model.safetensors").write_text("changed")
    with pytest.raises(ConfigError, match="other settings of model"):
        await check_run(store, "run", moved, resume=True)
    assert base_digest(tmp_path, tmp_path / "base.json") != context["base"], "a file that was changed is read again"
    kept = (tmp_path / "base.json").read_text()
    (tmp_path / "base.json").write_text(kept[:20])
    base_digest(tmp_path, tmp_path / "base.json")
    assert (tmp_path / "base.json").read_text() == kept, "what a crash left half written is made again"


async def test_a_schedule_of_algorithms_is_planned_as_epochs() -> None:
    phases = [(1, describe_algorithm(LightningRL("rloo"))), (3, describe_algorithm(LightningRL("grpo")))]
    described = {**_described(), "algorithm": phases[0][1]}
    store = await _started(described, steps=1)
    run = await check_run(store, "run", described, resume=True)
    epochs = await plan_epochs(store, run, described, phases)
    assert [(epoch.first, epoch.config["algorithm"]) for epoch in epochs] == phases
    await keep_epochs(store, run, epochs)
    faster = {**_described(engine__lr=1.0), "algorithm": phases[0][1]}
    later = await plan_epochs(store, run, faster, phases)
    assert [(epoch.first, epoch.setting("engine", "lr")) for epoch in later] == [(1, None), (2, 1.0), (3, 1.0)]
    assert [epoch_at(later, step).number for step in range(1, 5)] == [0, 1, 2, 2]


async def test_a_search_for_prompts_goes_on_with_what_it_asks_for() -> None:
    began = {**_described(), "algorithm": {"name": "apo", "arguments": {"rounds": 1, "beam": 2}}}
    store = await _started(began)
    more = {**began, "algorithm": {"name": "apo", "arguments": {"rounds": 5, "beam": 2}}}
    await check_run(store, "run", more, resume=True, searches=True)
    other = {**began, "algorithm": {"name": "apo", "arguments": {"rounds": 1, "beam": 3}}}
    with pytest.raises(ConfigError, match=r"searches for prompts with other settings \(algorithm\.arguments\.beam\)"):
        await check_run(store, "run", other, resume=True, searches=True)


async def test_other_tasks_begin_an_epoch() -> None:
    store = await _started(_described())
    assert await _changed(store, {**_described(), "tasks": {"train": ["b"], "val": []}}) == ["tasks.train"]


def test_an_algorithm_is_described_so_that_it_can_be_made_again() -> None:
    described = describe_algorithm(LightningRL("rloo", group_size=5))
    arguments = described["arguments"]
    assert isinstance(arguments, dict)
    assert LightningRL(**arguments) == LightningRL("rloo", group_size=5)  # type: ignore[arg-type]


def own_credit(group: Group, advantage: GroupAdvantage) -> list[np.ndarray]:
    return [np.zeros(len(member.transitions)) for member in group.trajectories]


def test_an_algorithm_with_a_function_in_it_keeps_all_its_other_arguments() -> None:
    described = describe_algorithm(LightningRL(credit=own_credit, kl_coefficient=0.5, tool_reward=lambda event: 1.0))
    arguments = described["arguments"]
    assert isinstance(arguments, dict)
    assert arguments["kl_coefficient"] == 0.5
    assert arguments["credit"]["function"] == f"{__name__}.own_credit"  # type: ignore[index, call-overload]
    assert rebuild_algorithm({"algorithm": described}) is None


def edited_source(described: dict[str, Any], *path: str) -> dict[str, Any]:
    """As if what is there had been another source."""
    described = json.loads(json.dumps(described))
    place = described
    for name in path:
        place = place[name]
    assert len(place["sha256"]) == 64
    place["sha256"] = "0" * 64
    return described


@from_loss
def own_loss(tokens: TokenBatch) -> torch.Tensor:
    return -tokens.logprobs


@from_batch(loss=lambda tokens: -tokens.logprobs)
def own_batch(groups: Sequence[Group], *, bar: float = 0.5) -> Batch:
    return Intake().batch([], [])


each_function = pytest.mark.parametrize(
    ("algorithm", "path"),
    [
        (LightningRL(credit=own_credit), ("arguments", "credit")),
        (LightningRL(tool_reward=lambda event: 1.0), ("arguments", "tool_reward")),
        (LightningRL(credit=partial(own_credit)), ("arguments", "credit", "partial")),
        (own_loss("rloo", credit=own_credit), ("functions", "loss")),
        (own_batch(bar=0.25), ("functions", "batch")),
        (own_batch(bar=0.25), ("functions", "loss")),
    ],
)
"""Algorithms with code of their own, and where their description says which."""


@each_function
async def test_an_edited_function_begins_an_epoch(algorithm: Algorithm, path: tuple[str, ...]) -> None:
    described = describe_algorithm(algorithm)
    store = await _started({**_described(), "algorithm": described})
    assert await _changed(store, {**_described(), "algorithm": describe_algorithm(algorithm)}) == []
    edited = {**_described(), "algorithm": edited_source(described, *path)}
    assert await _changed(store, edited) == [".".join(("algorithm", *path, "sha256"))]


async def test_an_edited_function_of_a_registered_algorithm_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed now is not what the run was started with."""
    known = plugins()
    monkeypatch.setattr(known, "names", lambda kind: ["own_loss"] if kind == "algorithms" else [])
    monkeypatch.setattr(known, "algorithm", lambda name: own_loss)
    described = describe_algorithm(own_loss())
    store = await _started({**_described(), "algorithm": edited_source(described, "functions", "loss")})
    changed = await _changed(store, {**_described(), "algorithm": described})
    assert changed == ["algorithm.functions.loss.sha256"]


async def test_with_a_function_of_ones_own_the_other_arguments_are_compared() -> None:
    began = describe_algorithm(LightningRL(credit=own_credit, group_size=4))
    store = await _started({**_described(), "algorithm": began})
    same = describe_algorithm(LightningRL(credit=own_credit, group_size=4))
    assert await _changed(store, {**_described(), "algorithm": same}) == []
    other = describe_algorithm(LightningRL(credit=own_credit, group_size=4, kl_coefficient=0.5, kl_estimator="k3"))
    changed = await _changed(store, {**_described(), "algorithm": other})
    assert changed == ["algorithm.arguments.kl_coefficient", "algorithm.arguments.kl_estimator"]


def test_a_resume_without_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give its folder as `out`"):
        Trainer(tmp_path, resume=True)


def test_a_key_that_would_expire_under_its_agent_is_refused(tmp_path: Path) -> None:
    config = with_settings(Config(), {"runner.timeout": 7200.0})
    with pytest.raises(ConfigError, match=r"gateway\.token_ttl \(3600 s\) is shorter than runner\.timeout \(7200 s\)"):
        Trainer(tmp_path, config=config)


async def test_a_resume_of_what_the_store_does_not_know_is_refused() -> None:
    store = MemoryStore()
    await store.open()
    await store.put_run(await check_run(store, "mine", _described(), resume=False))
    with pytest.raises(ConfigError, match=r"no run 'other' to resume in this store; it has mine"):
        await check_run(store, "other", _described(), resume=True)


async def test_a_check_writes_nothing() -> None:
    store = MemoryStore()
    await store.open()
    await check_run(store, "run", _described(), resume=True)
    assert await store.list_runs() == []


def test_a_folder_says_where_its_run_is_kept_and_no_password(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    assert store_in(folder) == ""
    name_folder(folder, "run", "postgresql://me:secret@host/database?schema=a")
    assert store_in(folder) == existing_store(str(folder)) == "postgresql://me@host/database?schema=a"
    (folder / "lightning.db").touch()
    assert store_in(folder) == sqlite_url(folder / "lightning.db"), "its own comes first"


def test_a_renamed_folder_keeps_its_run(tmp_path: Path) -> None:
    folder = tmp_path / "before"
    folder.mkdir()
    assert run_id_of(folder) == "before"
    name_folder(folder, "before")
    assert run_id_of(folder.rename(tmp_path / "after")) == "before"
    (tmp_path / "after" / "run.json").write_text("nonsense")
    with pytest.raises(ConfigError, match=r"run\.json cannot be read"):
        run_id_of(tmp_path / "after")
