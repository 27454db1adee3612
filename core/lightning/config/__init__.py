"""The configuration: typed sections, read from TOML, environment and `--set`."""

from __future__ import annotations

from lightning.config.fields import Setting, settings
from lightning.config.load import load_config, recorded_config, with_settings
from lightning.config.sections import (
    BranchBy,
    Config,
    EngineConfig,
    GatewayConfig,
    KubernetesConfig,
    LimitsConfig,
    LoraConfig,
    OptimizerModelConfig,
    PolicyServerConfig,
    ProviderConfig,
    RayConfig,
    RunnerConfig,
    Section,
    ServerConfig,
    TrainerConfig,
    VerlConfig,
    check_endpoint,
)

__all__ = [
    "BranchBy",
    "Config",
    "EngineConfig",
    "GatewayConfig",
    "KubernetesConfig",
    "LimitsConfig",
    "LoraConfig",
    "OptimizerModelConfig",
    "PolicyServerConfig",
    "ProviderConfig",
    "RayConfig",
    "RunnerConfig",
    "Section",
    "ServerConfig",
    "Setting",
    "TrainerConfig",
    "VerlConfig",
    "check_endpoint",
    "load_config",
    "recorded_config",
    "settings",
    "with_settings",
]
