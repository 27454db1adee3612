"""Checkpoints with tensors that verl does not train: carried over, or refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.config import Config
from lightning.errors import ConfigError
from lightning_verl.engine import VerlEngine

from tests.tiny_families import make_tiny_family


def test_verl_carries_over_what_it_does_not_train_and_refuses_fp8(tmp_path: Path) -> None:
    engine = VerlEngine(Config())
    said = engine.check(make_tiny_family(tmp_path / "llama2", "llama2"))
    assert said.startswith("2 tensors are not trained and are carried over untouched")
    with pytest.raises(ConfigError, match=r"are FP8, which verl does not train: train the checkpoint in bfloat16"):
        engine.check(make_tiny_family(tmp_path / "fp8", "fp8"))
