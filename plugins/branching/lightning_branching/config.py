"""The settings of trees of rollouts and of rollouts that begin at prefixes, in the section `trainer`."""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from lightning.config import PluginSettings
from lightning.errors import ConfigError
from pydantic import Field

BranchBy = Literal["random", "entropy", "variance"]
TREE: Final = "tree"
PREFIX: Final = "prefix"
"""The values of `trainer.sampling`."""


class BranchingConfig(PluginSettings):
    """Trees of rollouts (`trainer.sampling = tree`), and groups that begin at prefixes (`trainer.sampling = prefix`)."""

    place: ClassVar[str] = "trainer"
    trunks: int | None = Field(default=None, ge=1)
    """With `sampling = tree`: number of a group's rollouts that begin at the task. null is half of the algorithm's group
    size."""
    branch_by: BranchBy = "random"
    """With `sampling = tree`: the calls at which to branch: `random`; `entropy`, first where the answer to a tool's result was
    most uncertain; `variance`, where the returns of the first branches differ most."""
    task_share: float = Field(default=0.5, gt=0.0, le=1.0)
    """With `sampling = prefix`: share of the groups that always begin at their task. The others begin at a prefix where one is
    known."""
    prefix_run: str | None = None
    """With `sampling = prefix`: another run in the same store, whose training rollouts groups may begin behind, too."""

    def check(self) -> None:
        """Raise `ConfigError` for settings of trees or prefixes in a run that samples none."""
        sampling, plain = getattr(self, "sampling", ""), type(self).model_fields
        for kind, names in ((TREE, ("trunks", "branch_by")), (PREFIX, ("task_share", "prefix_run"))):
            if sampling != kind and any(getattr(self, name) != plain[name].default for name in names):
                both = " and ".join(f"trainer.{name}" for name in names)
                raise ConfigError(f"{both} are for trainer.sampling = {kind}: set that, too")
