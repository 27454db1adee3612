"""The configuration: typed sections, read from TOML, environment and `--set`."""

from __future__ import annotations

from lightning.config.arguments import refuse_class, refuses_unknown
from lightning.config.fields import Setting, settings
from lightning.config.load import load_config, recorded_config, with_settings
from lightning.config.plugin_settings import NamedSettings, PluginSettings, config_model
from lightning.config.sections import (
    Config,
    EngineConfig,
    GatewayConfig,
    LimitsConfig,
    LoraConfig,
    PolicyServerConfig,
    RunnerConfig,
    Section,
    TrainerConfig,
    check_endpoint,
)

__all__ = [
    "Config",
    "EngineConfig",
    "GatewayConfig",
    "LimitsConfig",
    "LoraConfig",
    "NamedSettings",
    "PluginSettings",
    "PolicyServerConfig",
    "RunnerConfig",
    "Section",
    "Setting",
    "TrainerConfig",
    "check_endpoint",
    "config_model",
    "load_config",
    "recorded_config",
    "refuse_class",
    "refuses_unknown",
    "settings",
    "with_settings",
]
