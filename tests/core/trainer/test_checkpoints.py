"""Checkpoints never run ahead of the committed steps."""

from __future__ import annotations

import asyncio
import math
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from lightning.config import Config, with_settings
from lightning.engines.files import whole_folder
from lightning.errors import ConfigError, PolicyServerError
from lightning.policy_server.model_folder import folder_tensors
from lightning.testing.tiny_models import make_tiny_model
from lightning.trainer.checkpoints import Checkpoints, CheckpointWriter
from lightning.trainer.trainer import Trainer


def _make(folder: Path, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep=2)
    for step in steps:
        checkpoints.path(step).mkdir(parents=True)
    return checkpoints


def test_the_newest_that_was_committed_is_used(tmp_path: Path) -> None:
    checkpoints = _make(tmp_path, 1, 2, 3)
    assert checkpoints.newest(2) == 2
    assert checkpoints.newest(0) is None


def test_uncommitted_ones_are_discarded(tmp_path: Path) -> None:
    checkpoints = _make(tmp_path, 1, 2, 3)
    checkpoints.discard_after(2)
    assert checkpoints.steps() == [1, 2]


def test_one_that_a_crash_left_half_written_is_discarded(tmp_path: Path) -> None:
    checkpoints = _make(tmp_path, 1)
    with whole_folder(checkpoints.path(2)) as fresh:
        pass
    checkpoints.path(2).rename(fresh)  # as a `kill -9` before the end leaves it
    checkpoints.discard_after(1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]


def test_only_the_newest_stay(tmp_path: Path) -> None:
    checkpoints = _make(tmp_path, 1, 2, 3, 4)
    checkpoints.prune(3)
    assert checkpoints.steps() == [2, 3, 4]


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    checkpoints = _make(tmp_path, 1)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-x").mkdir()
    assert checkpoints.steps() == [1]
    assert Checkpoints(tmp_path / "absent", 2).steps() == []


@pytest.mark.parametrize(
    ("every", "seconds", "written"),
    [
        (None, 5.0, [1, 5, 9]),  # the first says that writing takes 2 s: after 20 s of training it is worth it again
        (None, 30.0, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (None, 0.001, [1]),
        (4, 30.0, [4, 8]),
    ],
)
async def test_how_often_a_training_state_is_written(
    tmp_path: Path, every: int | None, seconds: float, written: list[int]
) -> None:
    now, saved = 0.0, []

    def save(folder: Path) -> None:
        nonlocal now
        now += 2.0
        saved.append(int(folder.name[-8:]))

    async with CheckpointWriter(Checkpoints(tmp_path, keep=2), save, every, clock=lambda: now) as writer:
        for step in range(1, 10):
            await writer.training()
            writer.committed(step, taught=True, seconds=seconds)
    assert saved == written
    assert writer.newest == written[-1]
    assert writer.unsaved == (written[-1] < 9)


async def test_training_waits_until_the_state_is_on_disk(tmp_path: Path) -> None:
    """Nothing is copied: what is written are the weights and moments themselves."""
    writing, go_on = threading.Event(), threading.Event()

    def save(folder: Path) -> None:
        writing.set()
        assert go_on.wait(30)
        folder.mkdir(parents=True)

    checkpoints = Checkpoints(tmp_path, keep=2)
    async with CheckpointWriter(checkpoints, save, 1) as writer:
        await writer.training()
        writer.committed(1, taught=True, seconds=1.0)
        training = asyncio.create_task(writer.training())
        while not writing.is_set():
            await asyncio.sleep(0)
        assert not training.done()
        go_on.set()
        await training
        assert checkpoints.steps() == [1]


def test_a_disk_too_small_is_told_before_vllm_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path / "model")
    numbers = sum(math.prod(spec.shape) for spec in folder_tensors(model).values())
    need = 3 * 12 * numbers + 4 * numbers
    monkeypatch.setattr("lightning.trainer.trainer.open_stack", Mock(side_effect=PolicyServerError("it was started")))

    def fit(free: int, **settings: object) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
        config = with_settings(Config(), settings)
        trainer = Trainer(model, out=tmp_path / "run", config=config, progress=False)
        trainer.fit(lambda task, llm: 0.0, ["a"])

    with pytest.raises(
        ConfigError, match=r"needs about .* GB: 3 training states of .*keep_checkpoints = 1, or train adap"
    ):
        fit(need - 1)
    with pytest.raises(PolicyServerError, match="it was started"):
        fit(need)
    with pytest.raises(PolicyServerError, match="it was started"):
        fit(need - 1, **{"trainer.keep_checkpoints": 1})
    (tmp_path / "run/checkpoints/step-00000001").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step-00000001/weights").write_bytes(b"x")  # a resumed run replaces what it has
    with pytest.raises(PolicyServerError, match="it was started"):
        fit(need - 1)
    with pytest.raises(ConfigError, match="of exported models"):
        fit(10, **{"engine.lora": {"rank": 1}})
