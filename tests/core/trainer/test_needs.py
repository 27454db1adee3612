"""What a run needs is said before it starts, and what it left after it; nothing is counted that is not known."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.config import Config, with_settings
from lightning.policy_server.model_folder import folder_tensors
from lightning.testing.tiny_models import make_tiny_model
from lightning.trainer.needs import Need, disk_need, said_of_disk, size
from lightning.trainer.summary import Reporter
from lightning.trainer.trainer import say_needs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def made(**settings: object) -> Config:
    given = {"engine.dtype": "float32", "policy_server.dtype": "float32"}
    return with_settings(Config(), given | {name.replace("__", "."): value for name, value in settings.items()})


def test_of_what_is_not_known_nothing_is_said(tmp_path: Path) -> None:
    assert disk_need(tmp_path, tmp_path, made()) is None


def test_too_little_memory_is_warned_of_with_a_cure(caplog: pytest.LogCaptureFixture) -> None:
    reporter = Reporter(enabled=False)
    say_needs(
        [Need("memory", 3e9, "parts", 3e9, "Take less"), Need("memory", 3e9, "parts", None, "Take less")], reporter
    )
    assert caplog.text == ""
    say_needs([Need("memory", 3e9, "training 2.0 GB", 2.9e9, "Take a smaller model.")], reporter)
    assert (
        "this run needs at least 3.0 GB of memory (training 2.0 GB); 2.9 GB are free, which is too little. Take a smaller"
        in caplog.text
    )


def test_each_policy_has_a_training_state_a_model_and_adapters_on_the_disk(model: Path, tmp_path: Path) -> None:
    shapes = [spec.shape for spec in folder_tensors(model).values()]
    numbers, width = sum(map(math.prod, shapes)), sum(sum(shape) for shape in shapes if len(shape) == 2)
    agents = {f"policies__{name}__agents": [name] for name in ("writer", "editor", "judge")}
    config = made(
        **agents,
        policies__judge__train=False,
        policies__writer__lora={"rank": 3},
        engine__lora={"rank": 1},
        trainer__keep_checkpoints=1,
    )
    need = disk_need(tmp_path, model, config)
    assert need is not None
    assert need.bytes == 2 * 12 * 4 * width + 2 * 4 * numbers + 2 * 4 * 4 * width
    assert "adapters alone" not in need.cure


def test_disk_is_said_before_and_after(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5e9))
    numbers = sum(math.prod(spec.shape) for spec in folder_tensors(model).values())
    need = disk_need(tmp_path, model, made(trainer__keep_checkpoints=1))
    assert need is not None
    assert (need.bytes, need.free, need.is_met) == (2 * 12 * numbers + 4 * numbers, 5e9, True)
    assert need.said.startswith(f"needs at least {size(need.bytes)} of disk in {tmp_path} (2 training states of ")
    assert need.said.endswith("; the database comes on top); 5.0 GB are free")
    out = tmp_path / "run"
    (out / "checkpoints/step-00000001").mkdir(parents=True)
    (out / "lightning.db").write_bytes(bytes(1_500_000))
    assert said_of_disk(out) == f"On the disk {out} takes 2 MB."
    (out / "checkpoints/step-00000001/weights").write_bytes(bytes(3_000_000))
    assert f"takes 5 MB, of which 3 MB are checkpoints. `rm -r {out / 'checkpoints'}` frees these" in said_of_disk(out)
    (out / "checkpoints/step-00000002/writer").mkdir(parents=True)
    (out / "checkpoints/step-00000002/writer/weights").write_bytes(bytes(1000))
    again = disk_need(out, model, made())
    assert again is not None
    assert again.free == 5e9 + 3_001_000, "a resumed run writes over these"
    spaced = out.rename(tmp_path / "my run")
    assert f"`rm -r '{spaced / 'checkpoints'}'` frees these" in said_of_disk(spaced), (
        "a copied command removes nothing else"
    )
