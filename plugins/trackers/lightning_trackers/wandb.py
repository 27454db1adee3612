"""The `wandb` tracker: write a Weights & Biases run, with a table of the rollouts of each step, and alarms as alerts.

The invariant: the `WANDB_*` variables and `wandb login` decide where the run is stored. Nothing is asked on the terminal, the
program's output is not captured, and neither code nor the command line is sent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import wandb
from lightning.errors import PluginError
from lightning.store.protocol import Store
from lightning.tracking.protocol import AttemptRecord
from lightning.types import Json

from lightning_trackers.shared import (
    PROJECT,
    calls_of,
    cured,
    error_of,
    facts_of,
    finite,
    known_run,
    messages_of,
    new_name,
    remember_run,
)

COLUMNS: Final = (
    "step",
    "split",
    "rollout",
    "attempt",
    "task",
    "status",
    "reward",
    "error",
    "tokens",
    "input",
    "answer",
)
LONGEST: Final = 4000
"""Most characters of a text in a table."""
CURE: Final = "Log in (wandb login), look at WANDB_BASE_URL, or set WANDB_MODE=offline and upload later (wandb sync)"
SECONDS: Final = 30
"""Seconds that W&B may take to begin a run, unless WANDB_INIT_TIMEOUT is set."""


class WandB:
    """The tracker `wandb`. It sends metrics by step, settings, alarms as alerts, and the attempts of finished rollouts as rows
    of the table `rollouts`. It sends no traces, which belong to Weave, another service: use the tracker `otel` for those."""

    _run: wandb.Run

    def __init__(self) -> None:
        self._rows: list[list[Json]] = []

    def start(self, run: str, config: Mapping[str, Json], folder: Path) -> None:
        """Begin a W&B run, or continue the one whose id is in the run's folder."""
        known = known_run(folder, "wandb")
        settings: dict[str, Any] = {"console": "off", "silent": True, "disable_git": True, "disable_code": True}
        settings |= {"program": "lightning", "x_disable_meta": True, "x_save_requirements": False}
        if "WANDB_INIT_TIMEOUT" not in os.environ:
            settings["init_timeout"] = SECONDS
        folder.mkdir(parents=True, exist_ok=True)
        with cured("W&B did not begin the run", CURE):
            mode = wandb.setup().settings.mode
            if mode == "online" and not wandb.login(prompt=False):  # `init` would ask for a key on the terminal
                raise PluginError(f"W&B did not begin the run: there is no API key. {CURE}")
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or PROJECT,
                id=known or new_name(run),
                name=run,
                dir=os.environ.get("WANDB_DIR") or str(folder),
                resume=None if mode == "offline" else "allow",
                settings=wandb.Settings(**settings),
            )
            self._run.config.update(dict(config), allow_val_change=True)
            # A resumed run may log a step again, which W&B's own step counter does not allow.
            self._run.define_metric("step", hidden=True)
            self._run.define_metric("*", step_metric="step")
        remember_run(folder, "wandb", self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step, and the table of attempts kept since the last step."""
        told: dict[str, Any] = {**finite(values), "step": step}
        if self._rows:
            told["rollouts"] = wandb.Table(columns=list(COLUMNS), data=self._rows, allow_mixed_types=True)
            self._rows = []
        self._run.log(told)

    async def attempt(self, record: AttemptRecord, store: Store) -> None:
        """Keep an attempt as a row of the table `rollouts`, which `log` sends with the next step."""
        facts = facts_of(record) | {"error": error_of(record)}
        facts["tokens"] = sum(len(call.response_ids) for call in record.transitions)
        facts["input"] = _text(record.rollout.task.input)
        calls = await calls_of(record, store)
        said = [exchange for _, exchange in calls if exchange is not None and exchange.reply is not None]
        messages = messages_of(said[-1]) if said else []
        facts["answer"] = _text(messages[-1].get("content")) if messages else ""
        self._rows.append([facts.get(name) for name in COLUMNS])

    def alert(self, alert: Mapping[str, Json]) -> None:
        """Send an alarm as an alert of W&B."""
        title, text = f"{self._run.name}: {alert['cause']}", f"step {alert['step']}: {alert['text']}"
        self._run.alert(title, text, level="WARN", wait_duration=1)

    def close(self) -> None:
        """Finish the W&B run, which uploads the remaining data."""
        with cured("W&B did not take all of the run", "Its folder `wandb` has it: wandb sync"):
            self._run.finish()


def _text(value: Any) -> str:
    text = (
        value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    )
    return text if len(text) <= LONGEST else text[:LONGEST] + " ..."
