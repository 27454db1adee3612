"""The settings of trees of rollouts, in the section `trainer`."""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from lightning.config import PluginSettings
from lightning.errors import ConfigError
from pydantic import Field

BranchBy = Literal["random", "entropy", "variance"]
TREE: Final = "tree"
"""The value of `trainer.sampling`."""


class TreeConfig(PluginSettings):
    """Trees of rollouts (`trainer.sampling = tree`)."""

    place: ClassVar[str] = "trainer"
    trunks: int | None = Field(default=None, ge=1)
    """With `sampling = tree`: number of a group's rollouts that begin at the task. null is half of the algorithm's group
    size."""
    branch_by: BranchBy = "random"
    """With `sampling = tree`: the calls at which to branch: `random`; `entropy`, first where the answer to a tool's result was
    most uncertain; `variance`, where the returns of the first branches differ most."""

    def check(self) -> None:
        """Raise `ConfigError` for settings of trees in a run that samples none."""
        if getattr(self, "sampling", "") != TREE and (self.trunks is not None or self.branch_by != "random"):
            raise ConfigError("trainer.trunks and trainer.branch_by are for trainer.sampling = tree: set that, too")
