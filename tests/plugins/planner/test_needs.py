"""What a run needs of GPUs is said by the planner's formulas, where a GPU is and the model can be counted."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lightning.config import Config, with_settings
from lightning.policy_server.auto_settings import LEAST_KV_BYTES, Machine
from lightning.policy_server.model_folder import folder_tensors
from lightning.testing.tiny_models import make_tiny_model
from lightning.trainer.run_stages import Start
from lightning_planner import needs
from lightning_planner.memory import training_items
from lightning_planner.needs import memory_need
from lightning_planner.shape import KNOWN, read_shape

QWEN = "Qwen/Qwen3-4B"


async def needed(model: Path, engine: str = "torch", **settings: Any) -> list[tuple[float, float | None, str]]:
    config = with_settings(Config(), {name.replace("__", "."): value for name, value in settings.items()})
    start = SimpleNamespace(config=config, described={"engine": engine}, model=model)
    found = await needs.GpuNeeds().needs(cast("Start", start))
    return [(need.bytes, need.free, need.parts) for need in found]


async def test_a_run_on_gpus_says_what_each_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "gpu_memory", lambda device: (79e9, 80e9))
    monkeypatch.setattr(needs, "shares_gpu", lambda config: True)
    (tmp_path / "config.json").write_text(json.dumps(KNOWN[QWEN]))
    shape, engine = read_shape(str(tmp_path)), Config().engine
    ((alone, free, parts),) = await needed(tmp_path)
    assert alone == sum(item.bytes for item in training_items(shape, 1, engine))
    assert (free, "vLLM" in parts) == (79e9, False)
    ((meanwhile, _, told),) = await needed(tmp_path, trainer__max_staleness=1)
    assert meanwhile == pytest.approx(alone + 0.4 * 80e9)
    assert told.endswith("vLLM 32.0 GB")
    ((many, _, _),) = await needed(tmp_path, "verl", engine__verl__world_size=8)
    assert many == sum(item.bytes for item in training_items(shape, 8, engine))
    (tmp_path / "config.json").write_text(json.dumps({**KNOWN[QWEN], "model_type": "another"}))
    assert await needed(tmp_path) == []


def test_the_memory_is_that_of_the_gpu_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 + device, 20))
    assert [needs.gpu_memory(device) for device in ("auto", "cuda", "cuda:1")] == [(10, 20), (10, 20), (11, 20)]


def test_a_run_on_a_cpu_or_without_torch_has_no_such_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert needs.on_gpus(Config()) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert needs.on_gpus(Config()) is not None
    assert needs.on_gpus(with_settings(Config(), {"engine.device": "cpu"})) is None
    monkeypatch.setattr(needs, "find_spec", lambda name: None)
    assert needs.on_gpus(Config()) is None  # without torch the engine says which command installs it


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "this_machine", lambda: Machine(2, 10**10))
    monkeypatch.setattr(needs, "pick_device", lambda config: "cuda" if config.device == "cuda" else "cpu")


def made(**settings: object) -> Config:
    given = {"engine.dtype": "float32", "policy_server.dtype": "float32"}
    return with_settings(Config(), given | {name.replace("__", "."): value for name, value in settings.items()})


def test_memory_is_that_of_training_and_of_vllm_where_both_are_on_the_cpu(machine: None, model: Path) -> None:
    shapes = [spec.shape for spec in folder_tensors(model).values()]
    numbers = sum(map(math.prod, shapes))
    need = memory_need(model, made(), "torch", 1)
    assert need is not None
    assert (need.bytes, need.free) == (20 * numbers + 4 * numbers + LEAST_KV_BYTES, 10**10)
    adapters = memory_need(model, made(engine__lora={"rank": 1}), "torch", 1)
    assert adapters is not None
    learned = sum(sum(shape) for shape in shapes if len(shape) == 2)
    assert adapters.bytes == 4 * numbers + 20 * learned + 4 * numbers + LEAST_KV_BYTES
    several = {f"policies__{name}__agents": [name] for name in ("writer", "editor")}
    both = memory_need(model, made(**several, policies__writer__lora={"rank": 3}, engine__lora={"rank": 1}), "torch", 1)
    assert both is not None
    assert both.bytes == 4 * numbers + 20 * 4 * learned + 4 * (numbers + 2 * 3 * learned) + LEAST_KV_BYTES
    attached = memory_need(model, made(policy_server__attach="http://127.0.0.1:1"), "torch", 1)
    assert attached is not None
    assert attached.bytes == 20 * numbers


def test_of_what_is_not_known_nothing_is_said(machine: None, model: Path, tmp_path: Path) -> None:
    assert memory_need(model, made(), "another", 1) is None
    assert memory_need(model, made(engine__device="cuda"), "torch", 1) is None
    assert memory_need(model, made(policy_server__device="cuda"), "torch", 1) is None
    assert memory_need(tmp_path, made(), "torch", 1) is None
