"""What a person sees while a run goes on: what it does now, rollouts done and failed, reward, tokens/s, time left."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from lightning.trainer.summary import NAMED, Evaluation
from lightning.types import Rollout, Status


class Reporter:
    """Live bars on a terminal, one line per step anywhere. A quiet one (`enabled=False`) shows nothing."""

    def __init__(self, *, enabled: bool = True, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, quiet=not enabled)
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not enabled,
        )
        self._steps: TaskID | None = None
        self._now = self._bars.add_task("starting", total=None, note="")
        self._failed = 0
        self._seconds: list[float] = []
        self._total = 0

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def begin(self, first: int, total: int) -> None:
        """The loop is about to take steps `first` to `total`."""
        self._total = total
        self._steps = self._bars.add_task("steps", total=total, completed=first, note="")

    def phase(self, what: str, rollouts: int | None = None) -> None:
        """What is done now; `rollouts` is how many of them this phase waits for."""
        self._failed = 0
        self._bars.reset(self._now, description=what, total=rollouts, note="")

    def rollout(self, rollout: Rollout) -> None:
        """A rollout has ended."""
        self._failed += rollout.status is Status.FAILED
        note = f"[red]{self._failed} failed" if self._failed else ""
        self._bars.update(self._now, advance=1, note=note)

    def step(self, step: int, metrics: Mapping[str, float], seconds: float) -> None:
        """A step has been committed; `seconds` is its wall time."""
        self._seconds = [*self._seconds, seconds][-10:]
        left = (self._total - step - 1) * sum(self._seconds) / len(self._seconds)
        line = (
            f"step {step + 1:>4}/{self._total}  reward {metrics['reward']:.3f}  {_named(metrics)}"
            f"rollouts {metrics['rollouts']:.0f} ({metrics['failed']:.0f} failed)  "
            f"mixed groups {metrics['groups_used']:.0f}/{metrics['groups']:.0f}  "
            f"{metrics['tokens_per_second']:.0f} tok/s  gap {metrics['max_logprob_gap']:.1e}  "
            f"{_pipeline(metrics)}{seconds:.1f} s, {_clock(left)} left"
        )
        self.console.print(line, highlight=False, soft_wrap=True)
        if self._steps is not None:
            self._bars.update(self._steps, completed=step + 1, note=f"{_clock(left)} left")

    def evaluated(self, result: Evaluation) -> None:
        """A held-out evaluation has ended."""
        failed = f", [red]{result.failed} failed[/red]" if result.failed else ""
        reward = "-" if result.reward is None else f"{result.reward:.3f}"
        reward += "".join(f", {name} {value:.3f}" for name, value in result.rewards.items())
        self.console.print(
            f"[bold]held-out after {result.step} steps: reward {reward}[/bold] over {result.rollouts} tasks{failed}",
            highlight=False,
            soft_wrap=True,
        )

    def say(self, text: str) -> None:
        """One line for the person who watches."""
        self.console.print(text, highlight=False, soft_wrap=True)


def _named(metrics: Mapping[str, float]) -> str:
    """The named parts of the reward."""
    return "".join(f"{name.removeprefix(NAMED)} {metrics[name]:.3f}  " for name in metrics if name.startswith(NAMED))


def _pipeline(metrics: Mapping[str, float]) -> str:
    """What is worth knowing where rollouts go on while the engine trains: age of the tokens, groups carried over, waiting."""
    if "pipeline/groups_carried" not in metrics:
        return ""
    return (
        f"stale {metrics['staleness_mean']:.1f} (max {metrics['staleness_max']:.0f})  "
        f"carried {metrics['pipeline/groups_carried']:.0f}  waited {metrics['seconds/rollout']:.1f} s  "
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
