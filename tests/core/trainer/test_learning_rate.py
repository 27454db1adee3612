"""The learning rate of a run that names none."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from lightning.config import Config, with_settings
from lightning.trainer import Trainer
from lightning.trainer.model import optimizer_of

LORA = {"engine.lora": {"rank": 2}}


def folder(where: Path, parameters: int) -> Path:
    """A model's folder whose weights have a header, and nothing but holes behind it."""
    where.mkdir()
    (where / "config.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "BF16", "shape": [parameters], "data_offsets": [0, 2 * parameters]}}).encode()
    with (where / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 2 * parameters)
    return where


@pytest.mark.parametrize(
    ("parameters", "settings", "lr"),
    [
        (240_000, {}, 2e-3),
        (135_000_000, {}, 1e-5),
        (135_000_000, LORA, 1e-4),
        (494_000_000, {}, 5e-6),
        (4_000_000_000, {}, 2e-6),
        (4_000_000_000, LORA, 2e-5),
        (32_000_000_000, {}, 1e-6),
        (4_000_000_000, {"engine.lr": 3e-5}, 3e-5),
        (0, {}, 1e-6),  # nothing can be read of it
    ],
)
def test_the_rate_goes_by_the_size_of_the_model_and_stands_in_the_settings(
    tmp_path: Path, parameters: int, settings: dict[str, object], lr: float
) -> None:
    model = folder(tmp_path / "model", parameters)
    trainer = Trainer(model, out=tmp_path / "run", config=with_settings(Config(), settings))
    assert trainer.config.engine.lr == pytest.approx(lr)
    assert optimizer_of(trainer.config).lr == pytest.approx(lr)


def test_a_search_for_prompts_has_no_rate(tmp_path: Path) -> None:
    trainer = Trainer(folder(tmp_path / "model", 8), "apo:component=agent", out=tmp_path / "run")
    assert trainer.config.engine.lr is None
