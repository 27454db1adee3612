"""What a run needs, said before it starts: the core knows of the disk, and stages of memory (`RunStage.needs`); and what a run
leaves on the disk.

The invariant: a need is at least this much. What cannot be known before the start, such as activations and the database, is
named and not guessed.
"""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning.config import Config, LoraConfig
from lightning.errors import ConfigError, PolicyServerError
from lightning.plugins import plugins
from lightning.policy_server.model_folder import folder_tensors
from lightning.policy_server.servers import served_models
from lightning.trainer.model import adapters_of


@dataclass(frozen=True, slots=True)
class Need:
    """At least `bytes` of something (`of`), which consist of `parts`; `free` bytes are there, None if that is unknown. `cure`
    says what to do where they are too few."""

    of: str
    bytes: float
    parts: str
    free: float | None
    cure: str

    @property
    def is_met(self) -> bool:
        """Whether it may be enough: no more is known to be needed than is free."""
        return self.free is None or self.bytes <= self.free

    @property
    def said(self) -> str:
        """The need in words."""
        there = "how much is free is unknown" if self.free is None else f"{size(self.free)} are free"
        return f"needs at least {size(self.bytes)} of {self.of} ({self.parts}); {there}"


def size(count: float) -> str:
    """Format a number of bytes for people."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{math.ceil(count / 1e6)} MB"


def disk_need(out: Path, model: Path, config: Config) -> Need | None:
    """Return what the training states and the exported models of a run need of the disk of its folder; None for a model whose
    weights cannot be read. Each trained policy has a state and a model.

    A state has the trained weights and two moments (AdamW) in float32, adapters where these are trained; one more than
    `keep_checkpoints` lie there while one is written, and so do two models more with `keep = "best"`. Of several policies each
    has a model and adapters of its own. What the run has on the disk already is counted as free.
    """
    models, whole, adapters, exported = served_models(model, config), 0, 0, 0
    for served in models:
        try:
            shapes = [spec.shape for spec in folder_tensors(served.folder).values()]
        except PolicyServerError:  # whoever loads it says what is wrong
            return None
        if not shapes:
            return None
        numbers = sum(map(math.prod, shapes))
        for lora in served.trained:
            own = adapter_weights(shapes, lora)
            whole, adapters = whole + (0 if own else numbers), adapters + own
        exported += numbers * len(served.trained)
    keep, state = config.trainer.keep_checkpoints, 3 * 4 * (whole + adapters)
    export = 4 * exported + (0 if plugins().policy_set(config) is None else 2 * 4 * adapters)
    export *= 3 if config.trainer.keep == "best" else 1
    kept = _bytes_of((out / "checkpoints").glob("step-*/**/*"))
    return Need(
        f"disk in {out}",
        (keep + 1) * state + export,
        f"{keep + 1} training states of {size(state)}, {size(export)} of exported models; the database comes on top",
        shutil.disk_usage(out).free + kept,
        "Give an `out` on another disk"
        + (", set trainer.keep_checkpoints = 1" if keep > 1 else "")
        + (", or train adapters alone (engine.lora)" if whole else ""),
    )


def adapter_weights(shapes: Sequence[tuple[int, ...]], lora: LoraConfig | None) -> int:
    """Return the number of weights that adapters have, 0 without adapters."""
    return sum(sum(shape) * lora.rank for shape in shapes if len(shape) == 2) if lora else 0


def ranks_of_adapters(config: Config) -> int:
    """Return the sum of the ranks of all policies' adapters: together they have as many weights as adapters of this rank. 0 if
    a policy trains all weights."""
    ranks = [lora.rank if lora else 0 for lora in adapters_of(config).values()]
    return sum(ranks) if all(ranks) else 0


def check_disk(need: Need, out: Path) -> None:
    """Raise `ConfigError` if the disk of a run's folder has no room for the run."""
    if not need.is_met and need.free is not None:
        raise ConfigError(
            f"the disk of {out} has {need.free / 1e9:.1f} GB for this run, which needs about {need.bytes / 1e9:.1f} GB: "
            f"{need.parts}. {need.cure}"
        )


def said_of_disk(out: Path) -> str:
    """Say how much of the disk a run's folder takes, and how to free what only another step of training needs."""
    checkpoints = out / "checkpoints"
    taken, states = _bytes_of(out.rglob("*")), _bytes_of(checkpoints.rglob("*"))
    remove = shlex.join(["rm", "-r", str(checkpoints)])
    freed = (
        f", of which {size(states)} are checkpoints. `{remove}` frees these; without them the run cannot go on and no other "
        "run can begin with its steps"
    )
    return f"On the disk {out} takes {size(taken)}{freed if states else ''}."


def _bytes_of(paths: Iterable[Path]) -> int:
    """Return how many bytes the files among `paths` take; those that somebody removes meanwhile take none."""
    taken = 0
    for path in paths:
        with suppress(FileNotFoundError):
            taken += 0 if path.is_dir() else path.lstat().st_size
    return taken
