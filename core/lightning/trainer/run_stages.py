"""Where plugins stand at a run's beginning and end: the points, and what happens when a stage fails.

The invariant: stages fail closed. A stage that fails ends the run, with its plugin's name as the cause, and a prompt that only
a stage can find is refused before anything starts where no stage is there.

    prompts     a run begins, a dry run too: find the prompts that its agents are given
    exported    a run has ended, and its model lies in its folder: tell others
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lightning.config import Config
from lightning.errors import ConfigError, PluginError
from lightning.plugins import plugins
from lightning.plugins.stages import Contract, Stage, StageLine
from lightning.store.protocol import Store
from lightning.trainer.run_server import of_project
from lightning.types import Json, Rollout, Run

API: Final = 1
"""The number of this file's contract, as that of `lightning.runner.stages`."""
PREFIX: Final = "resource:"
"""Begins a setting that names a text or a model instead of giving it."""
PROBE: Final = "probe"
"""The key of what `exported` is told with some tokens and the trainer's logprobs of them, by which whoever loads the weights
can tell that they are computed with: `ids`, `logprobs` (nats, the first is ignored) and the `dtype` they are of."""


@dataclass
class Prompts:
    """The prompt templates that a run's agents are given. `own` are texts by component; a stage that gives others derives its
    own class from this. `bound` are then the resources of the other components, and `versions` what a rollout of this run runs
    with unless it says otherwise, by resource."""

    own: Mapping[str, str] = field(default_factory=dict)
    bound: dict[str, str] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)

    async def stamp(self, store: Store, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts with the versions they run with; their texts are at hand from now on."""
        return list(rollouts)

    def of(self, rollout: Rollout) -> dict[str, str]:
        """The templates of a rollout, by component."""
        return dict(self.own)

    async def keep(self, store: Store, run: str) -> None:
        """Remember the choice with the run."""


class RunStage(Stage):
    """A plugin's place at a run's beginning and end; it overrides the methods of the points where it stands. `store` is as the
    run's project sees it. `LightningError`s end the run as they are; anything else is a failure of the plugin."""

    async def prompts(self, store: Store, run: Run, given: Mapping[str, str], home: str) -> Prompts:
        """The prompts of a run by its settings `runner.prompts`. The run may go on after a restart, and may not be kept yet.

        `home` is the URL of the store that names without a place mean, where it is another than this. One stage may stand here.
        """
        raise NotImplementedError

    async def exported(self, store: Store, run: Run, folder: Path, about: Mapping[str, Json]) -> None:
        """The run's model lies in a folder. `about` says how it was made."""


CONTRACT: Final = Contract(
    kind=RunStage,
    asked="run_stages",
    api=API,
    points=("prompts", "exported"),
    ordered=(),
    setting="",
    settings=(),
    of_stages=(),
    error=PluginError,
    of="runs",
    where="trainer",
    failed=PluginError,
    alone=(("prompts", "find the prompts of runs"),),
)


class RunLine(StageLine[RunStage]):
    """The stages of a run. Raises `PluginError`, as a `StageLine` does."""

    contract = CONTRACT

    def check_prompts(self, given: Mapping[str, str]) -> None:
        """Raise `ConfigError` for a prompt that only a stage can find, where none is there."""
        named = next((item for item in given.items() if item[1].startswith(PREFIX)), None)
        if named and not self.at("prompts"):
            raise ConfigError(
                f"runner.prompts.{named[0]} is {named[1]!r}, which names a prompt, and no plugin is there that finds it."
                f"{plugins().cures('run_stages', 'prompts')} Or give the text itself"
            )

    async def prompts(self, store: Store, run: Run, given: Mapping[str, str], *, home: str = "") -> Prompts:
        """The prompts of a run, see `RunStage.prompts`. Raises `ConfigError` where no stage finds what is named."""
        self.check_prompts(given)
        for each in self.at("prompts"):
            with CONTRACT.blaming(each, "prompts"):
                return await each.stage.prompts(of_project(store, run.project), run, given, home)
        return Prompts(given)

    async def exported(self, store: Store, run: Run, folder: Path, about: Mapping[str, Json]) -> None:
        """See `RunStage.exported`."""
        for each in self.at("exported"):
            with CONTRACT.blaming(each, "exported"):
                await each.stage.exported(of_project(store, run.project), run, folder, about)


def run_line(config: Config) -> RunLine:
    """The stages that plugins register, for a run with these settings. Raises what `Contract.made` and `RunLine` raise."""
    return RunLine(CONTRACT.made(config, config.runner))
