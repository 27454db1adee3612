"""The configuration: typed sections, read from TOML, environment and `--set`."""

from __future__ import annotations

from lightning.config.fields import Setting, settings
from lightning.config.limits import LimitsConfig
from lightning.config.load import load_config, with_settings
from lightning.config.optimizer_model import OptimizerModelConfig, check_endpoint
from lightning.config.runners import KubernetesConfig, RayConfig
from lightning.config.section import Section
from lightning.config.sections import (
    Config,
    EngineConfig,
    GatewayConfig,
    LoraConfig,
    PolicyServerConfig,
    RunnerConfig,
    ServerConfig,
    TrainerConfig,
)
from lightning.config.verl import VerlConfig

__all__ = [
    "Config",
    "EngineConfig",
    "GatewayConfig",
    "KubernetesConfig",
    "LimitsConfig",
    "LoraConfig",
    "OptimizerModelConfig",
    "PolicyServerConfig",
    "RayConfig",
    "RunnerConfig",
    "Section",
    "ServerConfig",
    "Setting",
    "TrainerConfig",
    "VerlConfig",
    "check_endpoint",
    "load_config",
    "settings",
    "with_settings",
]
