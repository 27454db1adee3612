"""The debug plugin: commands that inspect recorded runs or measure a policy, the stages that check each call and each step, and
the credit function `judge`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl, later, made_later

if TYPE_CHECKING:
    from lightning.config import Config, PluginSettings
    from lightning.credit import Credit
    from lightning.gateway.calls import Parts
    from lightning.gateway.stages import CallStage
    from lightning.trainer.stages import StepStage

COMMANDS = {
    "rollout": ("rollout_command:rollout", "Show a rollout's calls, and which were trained or why not."),
    "reward": ("run_commands:reward", "Grade a run's rollouts again with another reward function."),
    "advise": ("run_commands:advise", "Name what is wrong in a run, and what past runs did better."),
    "profile": ("run_commands:profile", "Show where a run's time and tokens went, and what would help."),
    "eval": ("eval_commands:evaluate", "Measure how good a model is at tasks: avg@k and pass@k."),
    "credit": ("credit_command:app", "Measure credit by execution: which decisions mattered, and which credit saw it."),
    "ab": ("eval_commands:ab", "Compare two prompts, models or temperatures until one is better beyond doubt."),
}
"""For each command, its function in this package and its line in `lightning --help`."""


@hookimpl
def register_settings(register: Callable[[str, Callable[[], type[PluginSettings]]], None]) -> None:
    """Register the setting `trainer.alerts`, and the section `budget`."""
    register("alerts", later("lightning_debug.config:AlertsConfig"))
    register("budget", later("lightning_debug.config:BudgetConfig"))


@hookimpl
def register_commands(register: Callable[[str, Callable[[], Callable[..., None]]], None]) -> None:
    """Register the commands of `COMMANDS`."""
    for name, (place, text) in COMMANDS.items():
        register(name, later(f"lightning_debug.{place}", text))


@hookimpl
def register_step_stages(register: Callable[[str, Callable[[Config], StepStage | None]], None]) -> None:
    """Register the stage that applies the rules to each step, sends `trainer.alerts`, and does dry runs; and the stage that
    ends a run whose `budget` is spent."""
    register("advice", made_later("lightning_debug.stage:Advice"))
    register("budget", made_later("lightning_debug.budget:budget"))


@hookimpl
def register_call_stages(register: Callable[[str, Callable[[Parts], CallStage | None]], None]) -> None:
    """Register the stage that warns about odd calls."""
    from lightning_debug.call_advice import ADVICE, CallAdvice

    register(ADVICE, CallAdvice)


@hookimpl
def register_credits(register: Callable[[str, Credit], None]) -> None:
    """Register the credit function `judge`, from which an audit rebuilds a run's judge. A run must give it a rubric:
    `lightning.Judge(rubric, model=...)`."""
    from lightning_debug.judge import Judge

    register("judge", Judge())
