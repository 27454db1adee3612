"""The configuration: typed sections, read from TOML, environment and `--set`."""

from __future__ import annotations

from lightning.config.models import (
    Config,
    EngineConfig,
    GatewayConfig,
    LoraConfig,
    PolicyServerConfig,
    RunnerConfig,
    TrainerConfig,
)

__all__ = [
    "Config",
    "EngineConfig",
    "GatewayConfig",
    "LoraConfig",
    "PolicyServerConfig",
    "RunnerConfig",
    "TrainerConfig",
]
