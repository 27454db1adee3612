"""The setting `trainer.alerts`."""

from __future__ import annotations

from typing import ClassVar

from lightning.config import PluginSettings


class AlertsConfig(PluginSettings):
    """Receivers of alarms."""

    place: ClassVar[str] = "trainer"
    alerts: tuple[str, ...] = ()
    """Receivers of the rules' serious findings, in addition to the log, as JSON (`run`, `step`, `cause`, `text`, `steps`,
    `rollouts`): `webhook:NAME` posts it to the URL in the environment variable NAME, `command:PROGRAM ARGUMENTS` runs a
    program with it as standard input."""
