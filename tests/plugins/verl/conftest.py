"""Verl engines in this process and on a local Ray, and the torch engine beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lightning.config import Config, LoraConfig, with_settings
from lightning.engines.protocol import Engine, OptimizerConfig
from lightning.losses.correction import NO_CORRECTION
from lightning.losses.policy_gradient import ClippedPolicyGradient, SequencePolicyGradient
from lightning.plugins import plugins
from lightning.testing.tiny_models import make_tiny_model
from lightning_verl.plugin import verl_engine

VOCAB = 320
OpenVerl = Callable[..., Engine]
ALONE = 0
"""The world size of a job in this process."""
LOSS = ClippedPolicyGradient(0.2, 0.28, entropy_coefficient=0.01, correction=NO_CORRECTION)
CALLS = SequencePolicyGradient(0.9, 9.0, kl_coefficient=0.1, kl_estimator="k3", correction=NO_CORRECTION)
"""Wants to know everything before the gradient pass: the current policy's logprobs, and the reference's."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied Qwen3 of two layers."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "untied", vocab=VOCAB)


@pytest.fixture
def open_verl(model: Path) -> Iterator[OpenVerl]:
    """`open_verl(world_size, folder=..., optimizer=..., seed=..., critic=..., **settings of the engine section)`."""
    opened: list[Engine] = []

    def make(
        world_size: int,
        *,
        folder: Path = model,
        optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3),  # noqa: B008 — it is frozen
        seed: int = 0,
        critic: bool = False,
        reference: Path | None = None,
        **settings: object,
    ) -> Engine:
        plain = {
            name: value.model_dump() if isinstance(value, LoraConfig) else value for name, value in settings.items()
        }
        names = {f"engine.{name}": value for name, value in plain.items()}
        config = with_settings(Config(), {"engine.device": "cpu", "engine.verl.world_size": world_size, **names})
        engine = verl_engine(config)
        opened.append(engine)
        head = plugins().get("heads", "critic")(config) if critic else None
        engine.open(folder, optimizer, seed=seed, head=head, reference=reference)
        return engine

    yield make
    for engine in opened:
        engine.close()
