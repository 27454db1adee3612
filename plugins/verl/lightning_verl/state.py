"""The description of a verl training state, beside the files of the workers.

The invariant: no worker reads a state that another engine wrote, or one of a job whose model was divided differently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning.engines.protocol import Head, OptimizerConfig
from lightning.engines.step import same_head
from lightning.errors import EngineError
from lightning.installation import other_format

FORMAT = 2
_FILE = "state.json"


@dataclass(frozen=True, slots=True)
class Taken:
    """How many optimizer steps were taken, and how many of them changed the policy and the head: Adam counts these
    separately."""

    steps: int = 0
    policy: int = 0
    head: int = 0


def write_state(
    folder: Path, taken: Taken, optimizer: OptimizerConfig, head: Head | None, layout: Mapping[str, object]
) -> None:
    """Write the description of the workers' files into their folder."""
    state = {
        "format": FORMAT, "engine": "verl", "steps": taken.steps, "optimizer": asdict(optimizer), "head": str(head or ""),
        "policy_steps": taken.policy, "head_steps": taken.head, "layout": layout,
    }  # fmt: skip
    (folder / _FILE).write_text(json.dumps(state, indent=1) + "\n")


def read_state(folder: Path, head: Head | None, layout: Mapping[str, object]) -> Taken:
    """Read the numbers of steps after which a training state was saved. Raises `EngineError` for a state of another engine,
    with another head, or of a model that was divided in a way that these workers cannot read."""
    try:
        state: Mapping[str, Any] = json.loads((folder / _FILE).read_text())
    except (OSError, ValueError) as error:
        raise EngineError(f"{folder} holds no training state: {error}") from error
    if state.get("engine") != "verl":
        raise EngineError(
            f"{folder} holds a training state of another engine: go on with the engine that wrote it, or start anew from the "
            "`model` folder of a finished run"
        )
    if state.get("format") != FORMAT:
        raise EngineError(other_format(f"{folder} has format {state.get('format')}", f"format {FORMAT}"))
    same_head(folder, str(state["head"]), str(head or ""))
    _same_layout(folder, state["layout"], layout)
    return Taken(int(state["steps"]), int(state["policy_steps"]), int(state["head_steps"]))


def _same_layout(folder: Path, written: Mapping[str, object], present: Mapping[str, object]) -> None:
    others = {name: value for name, value in written.items() if present.get(name) != value}
    if not others and written.keys() == present.keys():
        return
    if "strategy" in others:
        cure = f"set engine.verl.strategy = {written['strategy']}"
    else:
        cure = "set " + ", ".join(
            f"engine.verl.{name} = {value}" if name == "world_size" else f"engine.verl.megatron.{name} = {value}"
            for name, value in others.items()
        )
    raise EngineError(
        f"{folder} was saved by workers that had the model in other parts, and a state of Megatron can be read only by workers "
        f"that have the model in the same parts: {cure}, or start anew from the `model` folder of a finished run"
    )


def check_seen(host: str, files: Sequence[Path], target: Path) -> None:
    """Raise `EngineError` if a worker wrote no files, or if this machine does not see all of them."""
    missing = [file.name for file in files if not file.exists()]
    if missing or not files:
        raise EngineError(
            f"the trainer's machine does not see {', '.join(missing) or 'any file'} that {host} wrote to {target.resolve()}: "
            "put this folder on a disk that every machine of the cluster sees under the same path"
        )
