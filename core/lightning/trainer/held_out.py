"""The held-out evaluations of a run: which was the best, its model on disk, and whether training should stop.

The invariant: all of this follows from the run's evaluations and from the files on disk, so that a resumed run keeps the same
model and ends after the same step. Of equally good evaluations the first one is the best.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from lightning.config import Config
from lightning.errors import ConfigError
from lightning.trainer.epochs import Epoch
from lightning.trainer.summary import Evaluation
from lightning.types import Json

logger = logging.getLogger(__name__)

BEST = "best"
"""The folder, in the run's own, with the model of the best evaluation so far, in a folder of its step."""
_STEP = re.compile(r"step-(\d{8})")


def check_held_out(config: Config, val: object) -> None:
    """Raise `ConfigError` if settings need held-out rewards and there are none, or only those of the first and the last
    step."""
    trainer = config.trainer
    asked = [
        name
        for name, wanted in (("keep = 'best'", trainer.keep == "best"), ("patience", trainer.patience > 0))
        if wanted
    ]
    if asked and not val:
        raise ConfigError(
            f"trainer.{asked[0]} looks at held-out rewards: give held-out tasks (fit(val=...), --val FILE)"
        )
    if trainer.patience and not trainer.eval_every:
        raise ConfigError(
            "trainer.patience counts evaluations: set trainer.eval_every to the steps between two of them"
        )


class HeldOut:
    """The evaluations so far, in order, that can be compared (`Evaluation.score`). `folder` is the run's; `since` is the step
    after which held-out tasks or their sampling changed last (`compared_since`)."""

    def __init__(self, folder: Path, since: int = 0) -> None:
        self._folder, self.since = folder / BEST, since
        self._results: dict[int, Evaluation] = {}

    def add(self, results: Iterable[Evaluation], *, fresh: bool = False) -> None:
        """More of them; that of a step takes the place of an earlier one of the same step. What was evaluated before a change
        is left out, also with the step at which it came, unless it is `fresh`; and what says nothing (`Evaluation.known`)."""
        least = self.since if fresh or not self.since else self.since + 1
        self._results |= {result.step: result for result in results if result.known and result.step >= least}

    @property
    def results(self) -> tuple[Evaluation, ...]:
        """All evaluations, sorted by step."""
        return tuple(self._results[step] for step in sorted(self._results))

    @property
    def best(self) -> Evaluation | None:
        """The best evaluation; None without any."""
        return max(self.results, key=_score, default=None)

    def is_over(self, patience: int) -> bool:
        """Whether the last `patience` evaluations were no better than one before them; never with 0."""
        best = self.best
        return bool(patience) and best is not None and sum(step > best.step for step in self._results) >= patience

    @property
    def kept(self) -> Evaluation | None:
        """The evaluation whose model is on disk; None if there is none."""
        names = (_STEP.fullmatch(entry.name) for entry in self._folder.glob("step-*"))
        steps = [int(name.group(1)) for name in names if name]
        return max((self._results[step] for step in steps if step in self._results), key=_score, default=None)

    def keep(self, result: Evaluation, export: Callable[[Path], object]) -> None:
        """Write the engine's model, which `result` evaluates, if it is better than the one on disk, and remove that one. Raises
        `EngineError`."""
        kept = self.kept
        if kept is not None and (kept.step == result.step or _score(result) <= _score(kept)):
            return
        if (best := self.best) is not None and _score(best) > _score(result):
            logger.warning(
                "held-out tasks were solved better after %d steps (%.3f) than now (%.3f), but that model was not kept, because "
                "trainer.keep was not 'best' yet. To get it, start a new run with --from %s@%d",
                best.step,
                _score(best),
                _score(result),
                self._folder.parent,
                best.step,
            )
        mine = self._path(result.step)
        export(mine)
        for other in self._folder.glob("step-*"):
            if other != mine:
                shutil.rmtree(other)

    def deliver(self, model: Path) -> Evaluation | None:
        """Replace the run's exported model by the kept one, wholly or not at all. Return its evaluation; None if no model was
        kept. Raises `EngineError`."""
        from lightning.engines.files import whole_folder  # safetensors: only where something is trained

        kept = self.kept
        if kept is not None:
            with whole_folder(model) as fresh:
                shutil.copytree(self._path(kept.step), fresh, dirs_exist_ok=True)
        return kept

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"


def _score(result: Evaluation) -> float:
    return result.score


def compared_since(epochs: Sequence[Epoch]) -> int:
    """The first step whose evaluation is made as the newest ones are: on the same held-out tasks, sampled alike. A resume may
    change both."""
    first = 0
    for before, after in pairwise(epochs):
        if _measure(before) != _measure(after):
            first = after.first - 1
    return first


def _measure(epoch: Epoch) -> tuple[Json, ...]:
    tasks = epoch.config.get("tasks")
    held_out = tasks.get("val") if isinstance(tasks, Mapping) else None
    return held_out, epoch.setting("trainer", "eval_temperature"), epoch.setting("gateway", "override_sampling")
