"""The commands that look into recorded runs or measure a policy, what looks at each call and each step of a run, and the credit
`judge`, as a plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl, later, made_later

if TYPE_CHECKING:
    from lightning.config import Config
    from lightning.credit import Credit
    from lightning.gateway.calls import Parts
    from lightning.gateway.stages import CallStage
    from lightning.trainer.stages import StepStage


@hookimpl
def register_commands(register: Callable[[str, Callable[[], Callable[..., None]]], None]) -> None:
    """The commands of this plugin."""
    register(
        "reward",
        later("lightning_debug.run_commands:reward", "Grade a run's rollouts again with another reward function."),
    )
    register(
        "advise",
        later("lightning_debug.run_commands:advise", "Name what is wrong in a run, and what past runs did better."),
    )
    register(
        "profile",
        later("lightning_debug.run_commands:profile", "Show where a run's time and tokens went, and what would help."),
    )
    register(
        "eval",
        later("lightning_debug.eval_commands:evaluate", "Measure how good a model is at tasks: avg@k and pass@k."),
    )
    register(
        "ab",
        later(
            "lightning_debug.eval_commands:ab",
            "Compare two prompts, models or temperatures until one is better beyond doubt.",
        ),
    )


@hookimpl
def register_step_stages(register: Callable[[str, Callable[[Config], StepStage | None]], None]) -> None:
    """The rules that look at each step, `trainer.alerts` and dry runs."""
    register("advice", made_later("lightning_debug.stage:Advice"))


@hookimpl
def register_call_stages(register: Callable[[str, Callable[[Parts], CallStage | None]], None]) -> None:
    """What looks at calls."""
    from lightning_debug.call_advice import ADVICE, CallAdvice

    register(ADVICE, CallAdvice)


@hookimpl
def register_credits(register: Callable[[str, Credit], None]) -> None:
    """`judge`, by which an audit makes a run's judge again; a run gives it a rubric: `lightning.Judge(rubric, model=...)`."""
    from lightning_debug.judge import Judge

    register("judge", Judge())
