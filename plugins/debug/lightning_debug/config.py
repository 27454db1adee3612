"""The setting `trainer.alerts`, and the section `budget`."""

from __future__ import annotations

from typing import ClassVar

from lightning.config import PluginSettings
from pydantic import Field


class AlertsConfig(PluginSettings):
    """Receivers of alarms."""

    place: ClassVar[str] = "trainer"
    alerts: tuple[str, ...] = ()
    """Receivers of the rules' serious findings, in addition to the log, as JSON: `webhook:NAME` posts it to the URL in the
    environment variable NAME, `command:PROGRAM ARGUMENTS` runs a program with it as standard input."""


class BudgetConfig(PluginSettings):
    """What a run may spend; null sets no limit. The run ends after the step at which a part of its budget is spent, as if the
    step were its last: with its checkpoint and its model, but without another evaluation. Earlier steps of a resumed run count,
    too."""

    place: ClassVar[str] = "budget"
    sampled_tokens: int | None = Field(default=None, ge=1)
    """Tokens that the model sampled in the rollouts of the steps' groups. Failed rollouts and evaluations are not counted."""
    trained_tokens: int | None = Field(default=None, ge=1)
    """Tokens that the engine was trained on."""
    seconds: float | None = Field(default=None, gt=0)
    """Wall time of the training in seconds, evaluations between the steps included; without the start of vLLM."""
    requests: int | None = Field(default=None, ge=1)
    """Requests of judges, of models that optimize prompts, and of the providers of `gateway.providers`, made by the trainer's
    process, retries included. A request beyond the budget is refused with an error, within a step as well."""
