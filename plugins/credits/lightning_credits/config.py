"""The settings of the critic, in the section `engine`."""

from __future__ import annotations

from typing import ClassVar, Literal

from lightning.config import PluginSettings
from pydantic import Field


class CriticConfig(PluginSettings):
    """The critic."""

    place: ClassVar[str] = "engine"
    critic_lr: float = Field(default=0.05, gt=0)
    """Learning rate of the critic, for algorithms that have one. A step changes a value by about this much, in any
    model."""
    critic_trunk: Literal["frozen", "shared"] = "frozen"
    """What the critic's loss trains: `frozen` only the critic's own layer, on the model's hidden states; `shared` also
    the model."""
