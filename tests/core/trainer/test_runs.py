"""One trainer to a folder, and a resume must be the same run."""

from __future__ import annotations

import json
import re
import shutil
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
from lightning.audit import rebuild_algorithm
from lightning.batch.trajectory import Group
from lightning.config import Config, RunnerConfig, with_settings
from lightning.credit.protocol import GroupAdvantage
from lightning.errors import ConfigError
from lightning.losses.protocol import TokenBatch
from lightning.plugins import plugins
from lightning.runner.remote import RemoteRunner
from lightning.runner.sandbox import bubblewrap
from lightning.store.memory import MemoryStore
from lightning.store.reference import existing_store, store_in
from lightning.store.url import sqlite_url
from lightning.trainer import Trainer
from lightning.trainer.runs import check_run, claim_folder, describe_algorithm, name_folder, run_id_of
from lightning.types import Run


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


async def test_a_resume_may_change_what_alters_nothing() -> None:
    store = MemoryStore()
    await store.open()
    await store.put_run(await check_run(store, "run", _described(), resume=False))
    await check_run(store, "run", _described(trainer__steps=99, runner__concurrency=2, gateway__port=1234), resume=True)


@pytest.mark.parametrize(
    ("settings", "rounded"),
    [
        ({"engine__gradient_checkpointing": True}, ""),
        ({"engine__verl__address": "auto", "engine__verl__restarts": 9, "engine__verl__start_timeout": 1.0}, ""),
        ({"engine__tokens_per_microbatch": 64, "engine__step": "tree"}, "engine.step, engine.tokens_per_microbatch"),
        ({"engine__device": "cpu", "engine__threads": 2}, "engine.device, engine.threads"),
        ({"engine__verl__world_size": 8, "engine__verl__nodes": 2}, "engine.verl.nodes, engine.verl.world_size"),
    ],
)
async def test_a_resume_may_compute_elsewhere_and_says_when_sums_are_rounded_otherwise(
    settings: dict[str, object], rounded: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    await store.open()
    began = {"engine__dtype": "float32"}
    await store.put_run(await check_run(store, "run", _described(**began), resume=False))
    await check_run(store, "run", _described(**began, **settings), resume=True)
    said = f"run run goes on with other settings ({rounded}): steps are the same but for rounding, those that are replayed too"
    assert [record.getMessage() for record in caplog.records] == ([said] if rounded else [])
    with pytest.raises(ConfigError, match=r"\(engine\.lr\)"):
        await check_run(store, "run", _described(**began, **settings, engine__lr=1.0), resume=True)


async def test_a_resume_on_another_device_is_refused_where_that_decides_the_dtype() -> None:
    store = MemoryStore()
    await store.open()
    await store.put_run(await check_run(store, "run", _described(), resume=False))
    with pytest.raises(ConfigError, match=r"\(engine\.device\)"):
        await check_run(store, "run", _described(engine__device="cpu"), resume=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("engine.lr", 1.0),
        ("trainer.seed", 5),
        ("trainer.order", "given"),
        ("gateway.override_sampling", {"temperature": 0.1}),
    ],
)
async def test_a_resume_with_other_settings_names_them(key: str, value: object) -> None:
    store = MemoryStore()
    await store.open()
    await store.put_run(await check_run(store, "run", _described(), resume=False))
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        await check_run(store, "run", _described(**{key.replace(".", "__"): value}), resume=True)


async def test_a_run_of_a_release_that_had_fewer_settings_goes_on_with_their_defaults_only() -> None:
    store = MemoryStore()
    await store.open()
    older = _described()
    del older["config"]["engine"]["critic_lr"], older["config"]["trainer"]["max_staleness"]
    await store.put_run(await check_run(store, "run", older, resume=False))
    await check_run(store, "run", _described(), resume=True)
    with pytest.raises(ConfigError, match=r"trainer\.max_staleness"):
        await check_run(store, "run", _described(trainer__max_staleness=2), resume=True)


async def test_an_algorithm_of_a_release_that_had_fewer_arguments_goes_on_with_their_defaults_only() -> None:
    store = MemoryStore()
    await store.open()
    older = {"low_level": "grpo", "group_size": 4, "credit": "identical", "normalization": None}
    described = {"name": "grpo", "type": "LightningRL", "arguments": older}
    await store.put_run(await check_run(store, "run", {**_described(), "algorithm": described}, resume=False))
    same = describe_algorithm(LightningRL("grpo", group_size=4))
    await check_run(store, "run", {**_described(), "algorithm": same}, resume=True)
    other = describe_algorithm(LightningRL("grpo", group_size=4, kl_coefficient=0.1))
    with pytest.raises(ConfigError, match=r"\(algorithm\.arguments\.kl_coefficient\)"):
        await check_run(store, "run", {**_described(), "algorithm": other}, resume=True)


async def test_a_resume_with_other_tasks_is_refused() -> None:
    store = MemoryStore()
    await store.open()
    await store.put_run(await check_run(store, "run", _described(), resume=False))
    with pytest.raises(ConfigError, match=r"tasks\.train"):
        await check_run(store, "run", {**_described(), "tasks": {"train": ["b"], "val": []}}, resume=True)


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
    assert rebuild_algorithm(Run("run", "run", {"algorithm": described})) is None


def _edited(described: dict[str, Any], *path: str) -> dict[str, Any]:
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


@pytest.mark.parametrize(
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
async def test_a_resume_with_an_edited_function_is_refused(algorithm: Algorithm, path: tuple[str, ...]) -> None:
    described = describe_algorithm(algorithm)
    store = MemoryStore()
    await store.open()
    await store.put_run(await check_run(store, "run", {**_described(), "algorithm": described}, resume=False))
    await check_run(store, "run", {**_described(), "algorithm": describe_algorithm(algorithm)}, resume=True)
    name = ".".join(("algorithm", *path, "sha256"))
    with pytest.raises(
        ConfigError, match=rf"\({re.escape(name)}\) \(sha256 is that of a function's source: it was edited\)"
    ):
        await check_run(store, "run", {**_described(), "algorithm": _edited(described, *path)}, resume=True)


async def test_an_edited_function_of_a_registered_algorithm_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed now is not what the run was started with."""
    known = plugins()
    monkeypatch.setattr(known, "names", lambda kind: ["own_loss"] if kind == "algorithms" else [])
    monkeypatch.setattr(known, "algorithm", lambda name: own_loss)
    described = describe_algorithm(own_loss())
    store = MemoryStore()
    await store.open()
    began = {**_described(), "algorithm": _edited(described, "functions", "loss")}
    await store.put_run(await check_run(store, "run", began, resume=False))
    with pytest.raises(ConfigError, match=r"\(algorithm\.functions\.loss\.sha256\)"):
        await check_run(store, "run", {**_described(), "algorithm": described}, resume=True)


async def test_with_a_function_of_ones_own_the_other_arguments_are_compared() -> None:
    store = MemoryStore()
    await store.open()
    began = describe_algorithm(LightningRL(credit=own_credit, group_size=4))
    arguments = began["arguments"]
    assert isinstance(arguments, dict)
    del arguments["kl_estimator"]  # a release that did not have it yet
    await store.put_run(await check_run(store, "run", {**_described(), "algorithm": began}, resume=False))
    same = describe_algorithm(LightningRL(credit=own_credit, group_size=4))
    await check_run(store, "run", {**_described(), "algorithm": same}, resume=True)
    other = describe_algorithm(LightningRL(credit=own_credit, group_size=4, kl_coefficient=0.5, kl_estimator="k3"))
    with pytest.raises(
        ConfigError, match=r"\(algorithm\.arguments\.kl_coefficient, algorithm\.arguments\.kl_estimator\)"
    ):
        await check_run(store, "run", {**_described(), "algorithm": other}, resume=True)


@pytest.mark.parametrize(
    "algorithm", [LightningRL(credit=own_credit, group_size=4), own_loss("rloo"), own_batch(bar=0.25)]
)
async def test_a_run_of_a_release_that_did_not_describe_functions_goes_on(algorithm: Algorithm) -> None:
    now = describe_algorithm(algorithm)
    older = {name: value for name, value in now.items() if name != "functions"}
    if isinstance(algorithm, LightningRL) and algorithm.credit is own_credit:
        older["arguments"] = None
    store = MemoryStore()
    await store.open()
    await store.put_run(await check_run(store, "run", {**_described(), "algorithm": older}, resume=False))
    await check_run(store, "run", {**_described(), "algorithm": now}, resume=True)
    plain = describe_algorithm(LightningRL("dr_grpo", group_size=6))
    with pytest.raises(ConfigError, match=r"\(algorithm\.arguments"):
        await check_run(store, "run", {**_described(), "algorithm": plain}, resume=True)


def test_a_resume_without_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give its folder as `out`"):
        Trainer(tmp_path, resume=True)


@pytest.mark.parametrize("store", ["", "sqlite:///kept/runs.db", "memory://"])
def test_agents_in_a_sandbox_see_neither_the_run_nor_its_store(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    (tmp_path / "config.json").write_text("{}")
    config = with_settings(Config(), {"runner.sandbox": "bwrap"})
    trainer = Trainer(tmp_path, config=config, out="exp/a", store=store or None)
    given: list[RunnerConfig] = []
    trainer._make_runner = lambda agent, config: given.append(config.runner) or RemoteRunner()  # type: ignore[func-returns-value]
    trainer._runner_of(None)
    secret = [tmp_path / "exp" / "a", *([tmp_path / "kept"] if "kept" in store else [])]
    for folder in secret:
        folder.mkdir(parents=True)
    command = bubblewrap(given[0].sandbox_files, given[0].sandbox_hidden)
    hidden = [command[at + 1] for at, word in enumerate(command) if word == "--tmpfs"]
    assert hidden[-len(secret) :] == [str(folder.resolve()) for folder in secret]
    assert trainer.config == config, "what is kept with the run is what was set"


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
