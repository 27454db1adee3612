"""A teacher beside verl's model: the same numbers as the torch engine's, and refused where Megatron has no place for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.config import Config, LoraConfig, with_settings
from lightning.engines.protocol import OptimizerConfig
from lightning.engines.torch.engine import TorchEngine
from lightning.errors import ConfigError
from lightning.testing.tiny_models import make_tiny_model
from lightning_finetuning.distillation_loss import DistillationLoss
from lightning_verl.engine import VerlEngine

from .conftest import ALONE, VOCAB, OpenVerl
from .test_engine import assert_equal, rows

pytestmark = pytest.mark.slow
STEADY = OptimizerConfig(lr=1e-3, max_grad_norm=1e9, eps=1e-3)


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another architecture and size."""
    folder = tmp_path_factory.mktemp("models") / "teacher"
    return make_tiny_model(folder, vocab=VOCAB, architecture="llama", hidden=128, layers=3, seed=5)


@pytest.mark.parametrize("settings", [{}, {"lora": LoraConfig(rank=4, alpha=8)}], ids=["whole", "adapters"])
def test_it_distills_as_the_torch_engine_does(
    open_verl: OpenVerl, model: Path, teacher: Path, settings: dict[str, Any]
) -> None:
    engine = open_verl(ALONE, optimizer=STEADY, reference=teacher, tokens_per_microbatch=64, **settings)
    other = TorchEngine(device="cpu", **settings)
    other.open(model, STEADY, seed=0, reference=teacher)
    try:
        for seed in range(2):
            batch = rows(seed)
            found, expected = (each.step(batch, DistillationLoss()).metrics for each in (engine, other))
            for name in ("loss", "teacher_kl", "grad_norm", "masked_share", "clip_fraction"):
                assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
            assert abs(found["teacher_kl"]) > 0.01
            assert_equal(engine.logprobs(batch), other.logprobs(batch), 1e-4)
    finally:
        other.close()


def test_megatron_refuses_a_teacher(open_verl: OpenVerl, teacher: Path) -> None:
    asked = VerlEngine(with_settings(Config(), {"engine.verl.strategy": "megatron"}))  # and nothing is started
    with pytest.raises(ConfigError, match=r"a teacher is another model: set engine.verl.strategy = fsdp2"):
        asked.check_teacher(teacher)
    with pytest.raises(ConfigError, match=r"a teacher is another model: set engine.verl.strategy = fsdp2"):
        open_verl(ALONE, reference=teacher, **{"verl.strategy": "megatron"})
