"""The plugin `policies`: several policies in one run, each for agents of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl, later, made_later

if TYPE_CHECKING:
    from lightning.config import Config, PluginSettings
    from lightning.gateway.calls import Parts
    from lightning.gateway.stages import CallStage
    from lightning.policy_server.policies import PolicySet


@hookimpl
def register_settings(register: Callable[[str, Callable[[], type[PluginSettings]]], None]) -> None:
    """Register the settings `policies.NAME` and `trainer.policy_turns`."""
    register("policies", later("lightning_policies.config:PoliciesConfig"))
    register("trainer.policy_turns", later("lightning_policies.config:TurnsConfig"))


@hookimpl
def register_policy_sets(register: Callable[[str, Callable[[Config], PolicySet | None]], None]) -> None:
    """Register the policies of a run."""
    register("policies", made_later("lightning_policies.policy_set:policy_set"))


@hookimpl
def register_call_stages(register: Callable[[str, Callable[[Parts], CallStage | None]], None]) -> None:
    """Register the call stage `policies`, which chooses the policy of a call."""
    register("policies", made_later("lightning_policies.stage:stage"))
