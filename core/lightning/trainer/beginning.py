"""What a run begins with, or goes on with: its config epochs, and the training state that its engine loads.

The invariant: the state on disk is the one that the run's committed steps lead to, each under its own settings, or that of the
run it was forked from; nothing is changed for a run that cannot begin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from lightning.algorithms.protocol import SearchAlgorithm
from lightning.config import Config
from lightning.engines.protocol import Engine
from lightning.errors import ConfigError
from lightning.store.epochs import Epoch
from lightning.store.protocol import Store
from lightning.trainer.checkpoints import Checkpoints
from lightning.trainer.fork import FORKED, MODEL, fork
from lightning.trainer.progress import Reporter
from lightning.trainer.replay import Rewinder
from lightning.trainer.runs import changes_of, describe_algorithm, plan_epochs, run_id_of
from lightning.trainer.schedule import AlgorithmSchedule
from lightning.types import Json, Run


@dataclass(frozen=True, slots=True)
class Beginning:
    """What is known of a run before anything of it is started. `url` is that of its store where it is not in the folder."""

    store: Store
    folder: Path
    model: Path
    schedule: AlgorithmSchedule | SearchAlgorithm
    config: Config
    make_engine: Callable[[Config], Engine]
    url: str
    reporter: Reporter

    async def prepare(self, run: Run, described: dict[str, Json], parent: str | None) -> tuple[Run, list[Epoch], Path]:
        """The run, its epochs, and the folder of the model that it begins with. `parent` is the run to fork, if any.

        Raises `ConfigError` for a parent that a run cannot have, and what `fork` and `Rewinder` do.
        """
        model = self.model
        if parent is not None:
            run = await self._forked(run, described, parent)
        if FORKED in run.config:
            described[FORKED] = run.config[FORKED]
            model = self.folder / MODEL if (self.folder / MODEL).is_dir() else model
        else:
            self._checkpoints.discard(0)  # of a fork that did not begin
        described["critic"] = described["critic"] or run.config.get("critic", "")
        phases = self.schedule.phases if isinstance(self.schedule, AlgorithmSchedule) else ()
        algorithms = [(first, describe_algorithm(algorithm)) for first, algorithm in phases]
        epochs = await plan_epochs(self.store, run, described, algorithms)
        records = await self.store.list_steps(run.id)
        committed = len(records)
        for epoch in epochs[1:]:
            if committed and epoch.first == committed:
                changed = "\n  ".join(changes_of(epochs, epoch.number))
                self.reporter.say(f"config epoch {epoch.number} begins with step {committed}:\n  {changed}")
        given = [algorithm for _, algorithm in phases]
        again = Rewinder(self.store, records, epochs, self._checkpoints, self.make_engine, model, self.config, given)
        if again.needed(committed):
            self.reporter.phase("taking steps again under the settings that they were taken with")
            await again.bring_to(committed, lambda engine: engine.save(self._checkpoints.path(committed)))
        return run, epochs, model

    async def _forked(self, run: Run, described: dict[str, Json], parent: str) -> Run:
        if not isinstance(self.schedule, AlgorithmSchedule):
            raise ConfigError("a search for prompts trains no weights, so that it cannot begin with those of a run")
        if await self.store.get_run(run.id) is not None:
            if FORKED not in run.config:
                raise ConfigError(
                    f"run {run.id!r} began with the model's own weights: give another `out` to fork a run"
                )
            theirs, step = str(run.config[FORKED]).rsplit("@", 1)
            name, _, asked = parent.partition("@")
            if theirs not in {run_id_of(Path(name)), run_id_of(self.folder.parent / name)} or asked not in ("", step):
                raise ConfigError(
                    f"run {run.id!r} began with the weights of {theirs}@{step}, not of {parent}: leave --from away to go on "
                    "with it, or give another `out`"
                )
            return run
        self.reporter.phase(f"taking the weights of {parent}")
        forked = await fork(parent, self.folder, described, self.config, self.url)
        return replace(run, config={**run.config, FORKED: forked})

    @property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.folder / "checkpoints", self.config.trainer.keep_checkpoints)
